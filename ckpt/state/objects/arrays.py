"""NumPy's arrays and scalars in a state: stored as tensors, restored as what they were."""

import sys
from typing import Any

import torch
from prefect_torch.ckpt.state.index import ArrayKind

_LONG = "gG"  # longdouble and its complex numbers


def array_kind(value: object) -> ArrayKind | None:
    """Return whether `value` is an array, a scalar or a list of scalars of NumPy; None for all else. NumPy is not imported.

    The scalars of such a list, as a history of means, are numbers of one type. Each by itself would be an entry of 2 KB.
    """
    numpy = sys.modules.get("numpy")
    array, scalar = getattr(numpy, "ndarray", None), getattr(numpy, "generic", None)  # none yet while a thread imports it
    if array is None or scalar is None:
        return None
    if isinstance(value, array):
        return "array"
    if isinstance(value, scalar):
        return "scalar"
    return "scalars" if type(value) is list and value and isinstance(value[0], scalar) and _are_numbers(value) else None


def tensor_of(value: Any, name: str) -> torch.Tensor:
    """Return a tensor with the dtype, shape and values of what has an `array_kind`; it shares an array's memory where it can.

    Raises:
        ValueError: Naming it, if no tensor has its dtype, or it is of a subclass with more than values.

    """
    import numpy as np  # noqa: PLC0415 - it is already imported, since there is an array

    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise ValueError(f"the array {name!r} is a {type(value).__name__}: give its parts, as plain arrays")
    array = np.asarray(value)
    try:
        return torch.from_numpy(array if _is_shareable(array) else array.copy())
    except (TypeError, ValueError) as exc:
        raise ValueError(f"no tensor has the dtype {array.dtype} of {name!r}: give its tolist(), or another dtype") from exc


def memory_of_array(array: Any) -> torch.Tensor | None:
    """Return a tensor in the memory of an array, to load into; None where it is read-only or reversed."""
    return torch.from_numpy(array) if _is_shareable(array) else None


def as_array(value: torch.Tensor, kind: ArrayKind) -> Any:
    """Return the array, the scalar or the list of scalars that `tensor_of` made a tensor of."""
    array = value.numpy()
    return array if kind == "array" else array[()] if kind == "scalar" else list(array)


def _are_numbers(scalars: list[Any]) -> bool:
    """Return whether NumPy's scalars have one type, a number's that a tensor can have."""
    dtype = scalars[0].dtype
    return dtype.kind in "biufc" and dtype.char not in _LONG and all(type(it) is type(scalars[0]) for it in scalars)


def _is_shareable(array: Any) -> bool:
    """Return whether torch can share the memory of `array`: not reversed, in whole elements, and writable, or torch warns."""
    return array.flags.writeable and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
