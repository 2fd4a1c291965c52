"""The load into one target: a container, a tensor, a module, an optimizer's state of a parameter."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from prefect_torch.ckpt.errors import StateMismatchError
from prefect_torch.ckpt.state.arrays import array_kind, tensor_of
from prefect_torch.ckpt.state.tensors import has_own_operations, is_dtensor, local_part, why_unstorable


def filled(target: Any, value: Any) -> Any:
    """Return `value` in `target` itself where that is a container of the same kind, which its owner may also use elsewhere."""
    if type(target) is not type(value):
        return value
    if isinstance(target, list):
        target[:] = value
        return target
    if isinstance(target, (dict, set)):
        target.clear()
        target.update(value)
        return target
    return value


def fill_tensor(target: torch.Tensor, value: Any, name: str) -> None:
    """Copy `value`, a tensor or an array, into `target`; of a DTensor, this rank's part.

    Raises:
        StateMismatchError: If it is no tensor of that shape, which only a value returned by a user's function can be.

    """
    if array_kind(value) is not None:
        value = tensor_of(value, name)
    if not isinstance(value, torch.Tensor) or value.shape != target.shape:
        given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise StateMismatchError(f"rank_local returned {given} for {name!r}, a tensor of shape {list(target.shape)}")
    if (part := local_part(target)) is None:
        return
    offsets, local = part
    if local.shape != target.shape:
        value = value[tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))]
    with torch.no_grad():
        local.copy_(value)


def why_unwritable(target: torch.Tensor) -> str | None:
    """Return the reason why no data can be read into `target`; None if they can."""
    if (what := why_unstorable(target)) is not None:
        return what
    if has_own_operations(target) and not is_dtensor(target):
        return f"a {type(target).__name__}, which wraps others"
    if target.is_conj() or target.is_neg():
        return "a view that conjugates or negates"
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        return "expanded, so that its elements share memory"
    return "a view whose elements share memory" if _overlaps(target) else None


def _overlaps(target: torch.Tensor) -> bool:
    """Return whether two elements of `target` have the same memory; costs its own size only where strides do not tell."""
    reach, certain = 0, True
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        certain = certain and (size <= 1 or stride > reach)
        reach += stride * (size - 1)
    if certain or target.numel() == 0:
        return False
    used = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    used.as_strided(target.shape, target.stride()).fill_(True)
    return int(used.sum()) < target.numel()


def does_more_than_copy(module: torch.nn.Module) -> bool:
    """Return whether `load_state_dict` must be called, because of hooks or code of the module's own."""
    plain = torch.nn.Module.load_state_dict
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return type(module).load_state_dict is not plain or any(
        any(getattr(part, hook, None) for hook in hooks)
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")  # noqa: SLF001 - intended for overriding
        for part in module.modules()
    )


def undo_casts(state: MutableMapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Restore the stored dtypes of a state: load_state_dict casts to the parameter's."""
    for key, value in stored.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            state[key] = value.to(now.device)
        elif isinstance(value, Mapping) and isinstance(now, MutableMapping):
            undo_casts(now, value)
