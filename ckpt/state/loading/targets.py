"""The load into one target: a container, a tensor, a module, an optimizer's state of a parameter."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from prefect_torch.ckpt.errors import StateMismatchError
from prefect_torch.ckpt.state.objects.arrays import array_kind, tensor_of
from prefect_torch.ckpt.state.objects.tensors import (
    Place,
    has_own_operations,
    is_dtensor,
    local_part,
    local_tensor,
    place_of,
    what_wraps,
    why_unstorable,
)
from prefect_torch.ckpt.state.staging.device_copies import bytes_of


def filled(target: Any, value: Any) -> Any:
    """Return `target` filled with `value` if both are containers of one kind, since others may hold `target`; else `value`."""
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
        StateMismatchError: If `value` has another shape or is no tensor, as only the result of a user's function can be.

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
    with torch.inference_mode():  # the target may be an inference tensor, which only this mode can change
        local.copy_(value)


def why_unwritable(target: torch.Tensor) -> str | None:
    """Return the reason why no data can be read into `target`; None if they can."""
    if (what := why_unstorable(target)) is not None:
        return what
    if has_own_operations(target) and (what := _why_no_memory(target)) is not None:
        return what
    if target.is_conj() or target.is_neg():
        return "a view that conjugates or negates"
    is_empty = target.numel() == 0  # NumPy gives such an array strides of 0
    if not is_empty and any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        return "expanded, so that its elements share memory"
    return "a view whose elements share memory" if _overlaps(target) else None


def _why_no_memory(target: torch.Tensor) -> str | None:
    """Return the reason why a tensor with operations of its own has no memory to fill on this rank; None if it has."""
    if not is_dtensor(target):
        return what_wraps(target)
    try:
        part = local_part(target)
    except ValueError as exc:
        return str(exc)
    if part is None or not has_own_operations(part[1]):
        return None
    return f"a DTensor whose part on this rank is {what_wraps(part[1])}"


def _overlaps(target: torch.Tensor) -> bool:
    """Return whether two elements of `target` share memory; costs memory of about its size only if strides do not show it."""
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
    """Return whether `load_state_dict` must be called, because of hooks or the module's own code."""
    plain = torch.nn.Module.load_state_dict
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return type(module).load_state_dict is not plain or any(
        any(getattr(part, hook, None) for hook in hooks) or _loads_itself(part) for part in module.modules()
    )


def resizable_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of the buffers whose shape a load may change: those of parts with their own code for loading."""
    parts = ((f"{prefix}.".lstrip("."), part) for prefix, part in module.named_modules(remove_duplicate=False))
    return {f"{prefix}{name}" for prefix, part in parts if _loads_itself(part) for name, _ in part.named_buffers(recurse=False)}


def _loads_itself(part: torch.nn.Module) -> bool:
    return not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")  # noqa: SLF001 - intended for overriding


class FilledMemory:
    """The memory that a load fills in place: that of modules, and of each other tensor that shares none with an earlier one."""

    def __init__(self) -> None:
        self._of_modules: list[Place] = []  # in order, and apart
        self._starts: set[int] = set()

    def reserve(self, places: Iterable[Place]) -> None:
        """Reserve the places of all modules' tensors for the modules."""
        merged = self._of_modules
        for place in sorted(places, key=lambda it: it.start):
            if merged and place.start <= merged[-1].stop:
                merged[-1] = merged[-1]._replace(stop=max(merged[-1].stop, place.stop))
            elif place.stop > place.start:
                merged.append(place)

    def own(self, target: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Return the tensor to read `target`'s values into, and a function that returns the restored tensor.

        Usually both are `target` itself. If it shares memory with a module or an earlier tensor, as in a dict that begins as
        references to a model's parameters, both would be read into that memory, and the values of one would be lost. Then the
        values are read into a new tensor, which replaces `target` unless they are equal to the values in `target`.
        """
        place = place_of(target)
        if place.stop == place.start:
            return target, lambda: target
        if place.start not in self._starts and not self._is_in_module(place):
            self._starts.add(place.start)
            return target, lambda: target
        mine = target.detach()
        new = torch.empty_like(mine)
        return new, lambda: target if torch.equal(bytes_of(local_tensor(mine)), bytes_of(local_tensor(new))) else new

    def _is_in_module(self, place: Place) -> bool:
        before = bisect_left(self._of_modules, place.stop, key=lambda it: it.start)  # those that begin before its end
        return before > 0 and self._of_modules[before - 1].stop > place.start


def undo_casts(state: MutableMapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Restore the stored dtypes of a state: load_state_dict casts to the parameter's."""
    for key, value in stored.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            state[key] = value.to(now.device)
        elif isinstance(value, Mapping) and isinstance(now, MutableMapping):
            undo_casts(now, value)
