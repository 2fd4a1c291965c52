"""The tensors that a state may hold, and this rank's part of each."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from prefect_torch.ckpt.state.index import DTYPE_BYTES

_USUAL = {torch.Tensor, torch.nn.Parameter}
DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_BYTES if hasattr(torch, name)}


def storable(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is stored: detached, of torch's own class or a DTensor, sharing its memory.

    Raises:
        ValueError: If it cannot be stored, giving `name` and the reason.

    """
    is_usual = type(value) in _USUAL and value.dtype in DTYPE_NAMES and value.layout is torch.strided
    if not is_usual or value.is_quantized or value.is_meta or value.is_nested:
        _check_unusual(name, value)
    if value.requires_grad:
        value = value.detach()
    if type(value) not in _USUAL and not is_dtensor(value):
        value = value.as_subclass(torch.Tensor)  # the additions of the class could not be read back
    return value


def _check_unusual(name: str, value: torch.Tensor) -> None:
    if (what := why_unstorable(value)) is not None:
        raise ValueError(f"the tensor {name!r} is {what}, which cannot be stored: make it a dense tensor")
    if has_own_operations(value) and not is_dtensor(value):
        raise ValueError(
            f"the tensor {name!r} is {what_wraps(value)}: store those, or report a directory with a file of torch.save"
        )
    if value.dtype not in DTYPE_NAMES:
        raise ValueError(f"the tensor {name!r} is {value.dtype}, which cannot be stored: view it as uint8")


def has_own_operations(value: torch.Tensor) -> bool:
    """Return whether a tensor's class replaces torch's operations: such a class usually wraps tensors and has no other data."""
    return next(kind for kind in type(value).__mro__ if "__torch_dispatch__" in vars(kind)) is not torch.Tensor


def what_wraps(value: torch.Tensor) -> str:
    """Return a description of a tensor whose class replaces torch's operations."""
    return f"a {type(value).__name__}, which wraps others"


def why_unstorable(value: torch.Tensor) -> str | None:
    """Return the reason why a tensor's memory does not hold all its elements, such as "nested"; None if it does."""
    if torch.nn.parameter.is_lazy(value):
        return "not initialized (lazy)"
    if value.is_quantized:
        return "quantized"
    if value.is_meta:
        return "without data (meta)"
    if value.is_nested:
        return "nested"
    return None if value.layout is torch.strided else str(value.layout)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without an import of DTensors that are not in use."""
    # Another thread may be importing them, as torch's compiler does: a partly imported module has no class yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    return value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]


class Place(NamedTuple):
    """Where this rank's part of a tensor lies in memory.

    Attributes:
        storage: The address of its storage; 0 if it has none, as one that wraps others, or is sparse.
        start: The address of its first element.
        stop: The address after its last element, equal to `start` if it has none.

    """

    storage: int
    start: int
    stop: int


def place_of(value: torch.Tensor) -> Place:
    """Return where this rank's part of a tensor lies."""
    local = local_tensor(value)
    if has_own_operations(local) or torch.nn.parameter.is_lazy(local) or local.layout is not torch.strided:
        return Place(0, 0, 0)
    storage, item_bytes = local.untyped_storage().data_ptr(), local.element_size()
    start = storage + int(local.storage_offset()) * item_bytes
    if storage == 0 or local.numel() == 0:
        return Place(storage, start, start)
    if local.is_contiguous():
        return Place(storage, start, start + local.numel() * item_bytes)
    reach = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    return Place(storage, start, start + reach * item_bytes)


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether this rank's parts of two tensors have a byte in common; interleaved ones have none.

    As numpy.shares_memory does it: bounded integers are searched for that make the addresses of two elements equal.
    """
    first, second = place_of(one), place_of(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    mine, theirs = _reaches(local_tensor(one)), _reaches(local_tensor(other))
    strides = sorted({*mine, *theirs}, reverse=True)
    return _is_sum(second.start - first.start, [(stride, -theirs[stride], mine[stride]) for stride in strides])


def _reaches(local: torch.Tensor) -> Counter[int]:
    """Return the largest index of a byte of `local` in each direction, by its stride in bytes."""
    reaches = Counter({1: local.element_size() - 1})
    for size, stride in zip(local.shape, local.stride(), strict=True):
        if stride > 0:
            reaches[stride * local.element_size()] += size - 1
    return reaches


def _is_sum(total: int, ranges: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether `total` is a sum of multiples of the strides, each with a factor between two bounds."""
    if not ranges:
        return total == 0
    (stride, least, largest), rest = ranges[0], ranges[1:]
    low, high = sum(it * lower for it, lower, _ in rest), sum(it * upper for it, _, upper in rest)
    factors = range(max(least, -((high - total) // stride)), min(largest, (total - low) // stride) + 1)
    return any(_is_sum(total - factor * stride, rest) for factor in factors)


def local_part(value: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return the offsets of this rank's part of `value` and the part, sharing its memory; None where it has none.

    Raises:
        ValueError: If a DTensor's parts are partial sums, still to be reduced, or this rank's part is no box of it.

    """
    if not is_dtensor(value):
        return (0,) * value.dim(), value
    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a DTensor with placements {placements}, which holds no values yet")
    local, coordinate = local_tensor(value), mesh.get_coordinate()
    if coordinate is None or (local.numel() == 0 and value.numel() > 0):
        return None
    box = box_of(tuple(value.shape), placements, mesh.shape, coordinate)
    if box is None or box[1] != tuple(local.shape):
        raise ValueError(
            f"a DTensor {list(value.shape)} with placements {placements} on a mesh {list(mesh.shape)}, of which this rank's "
            f"part {list(local.shape)} is not known to be one box of it"
        )
    return box[0], local


def box_of(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets and sizes of the part of a DTensor at a coordinate of its mesh; None where that is no box.

    A dimension is cut as torch.chunk does, by the mesh's dimensions from left to right. A `_StridedShard` comes later, after as
    many parts as its `split_factor`: FSDP2 shards the parts of tensor parallelism, which are to its right. torch's own function
    is wrong where these parts have unequal sizes, and for a part of several intervals it returns the first.
    """
    offsets, sizes = [0] * len(shape), [*shape]
    orders: dict[int, list[int]] = {}
    for number in reversed(range(len(placements))):
        dimension: int | None = getattr(placements[number], "dim", None)
        if dimension is None or mesh_shape[number] == 1:
            continue
        order = orders.setdefault(dimension, [])
        num_parts = [*accumulate((mesh_shape[it] for it in order), mul, initial=1)]
        factor = getattr(placements[number], "split_factor", 1)
        if factor not in num_parts:
            return None
        order.insert(num_parts.index(factor), number)
    for dimension, order in orders.items():
        for number in order:
            chunk = -(-sizes[dimension] // mesh_shape[number])
            first = min(coordinate[number] * chunk, sizes[dimension])
            offsets[dimension] += first
            sizes[dimension] = min(chunk, sizes[dimension] - first)
    return tuple(offsets), tuple(sizes)
