"""The load into one target: a container, a tensor, a module, an optimizer's state of a parameter."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

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
    share_elements,
    what_wraps,
    why_unstorable,
)
from prefect_torch.ckpt.state.staging.device_copies import bytes_of

_WITH_FORM = (torch.Tensor, dict, list, tuple)  # of which `in_form_of` takes something from what was there


def filled(target: Any, value: Any) -> Any:
    """Return `target` filled with `value` if both are containers of one kind, since others may hold `target`; else `value`.

    Every kind of dict with tensors is stored as a dict.
    """
    value = in_form_of(target, value)
    if type(target) is not type(value) and not (isinstance(target, dict) and type(value) is dict):
        return value
    if isinstance(target, list):
        target[:] = value
        return target
    if isinstance(target, (dict, set)):
        target.clear()
        if isinstance(target, set):
            target.update(value)
        else:
            set_items(target, value)
        return target
    return value


def set_items(target: MutableMapping[Any, Any], items: Mapping[Any, Any]) -> None:
    """Set `items` one by one: the `update` that a user's own kind of dict inherits does not call its `__setitem__`."""
    for key, item in items.items():
        target[key] = item


def in_form_of(former: Any, value: Any) -> Any:
    """Return `value` with what `former` has in the same places: the devices of tensors, and the kinds of dicts.

    Tensors of a tuple, such as the hidden state of an LSTM, are stored as one value, which is read on the CPU. A defaultdict is
    stored as a dict, and an OrderedDict with tensors, too. Where a defaultdict has no item yet, what its factory makes has the
    form.
    """
    if isinstance(former, torch.Tensor) and isinstance(value, torch.Tensor):
        return value if former.is_meta else value.to(former.device)
    if isinstance(former, Mapping) and type(value) is dict:
        items = {key: in_form_of(_item_like(former, key, item), item) for key, item in value.items()}
        if type(former) is defaultdict:
            return defaultdict(former.default_factory, items)
        return OrderedDict(items) if type(former) is OrderedDict else items
    if type(former) is type(value) in (list, tuple) and len(former) == len(value):
        return type(value)(map(in_form_of, former, value))
    return value


def _item_like(former: Mapping[Any, Any], key: Any, item: Any) -> Any:
    """Return what `former` has, or would make, under `key`, as the form of `item`; None if it has nothing."""
    if type(former) is defaultdict and former.default_factory and key not in former and isinstance(item, _WITH_FORM):
        return former.default_factory()
    return former.get(key)


def with_versions(fresh: Any, value: Any) -> Any:
    """Return `value` with the versions of modules that `fresh` has: a module's `state_dict()` has them as an attribute.

    A module takes a dict without them for one of the first version of its code.
    """
    if isinstance(fresh, list) and isinstance(value, list):
        return [*map(with_versions, fresh, value), *value[len(fresh) :]]
    if not isinstance(fresh, Mapping) or not isinstance(value, dict):
        return value
    items = {key: with_versions(fresh.get(key), item) for key, item in value.items()}
    if not hasattr(fresh, "_metadata"):
        return items
    of_module = OrderedDict(items)
    vars(of_module).update(vars(fresh))
    return of_module


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


def resizable_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers whose shape a load may change, by name: those of parts with their own code for loading."""
    parts = ((f"{prefix}.".lstrip("."), part) for prefix, part in module.named_modules(remove_duplicate=False))
    own = ((prefix, part) for prefix, part in parts if _loads_itself(part))
    return {f"{prefix}{name}": buffer for prefix, part in own for name, buffer in part.named_buffers(recurse=False)}


def _loads_itself(part: torch.nn.Module) -> bool:
    return not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")  # noqa: SLF001 - intended for overriding


class _Neighbours(NamedTuple):
    """Tensors that lie between two addresses, interleaved if there are several."""

    start: int
    stop: int
    tensors: list[torch.Tensor]


class FilledMemory:
    """The memory that a load fills in place: that of modules, and of each other tensor that shares none with an earlier one."""

    def __init__(self) -> None:
        self._of_modules: list[Place] = []  # in order, and apart
        self._of_others: list[_Neighbours] = []  # in order, and apart

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
        if not self._is_in_module(place) and self._takes(place, target):
            return target, lambda: target
        mine = target.detach()
        new = torch.empty_like(mine)
        return new, lambda: target if torch.equal(bytes_of(local_tensor(mine)), bytes_of(local_tensor(new))) else new

    def _takes(self, place: Place, target: torch.Tensor) -> bool:
        """Take the memory of `target` unless an earlier tensor has some of it; return whether it was taken."""
        first = bisect_right(self._of_others, place.start, key=lambda it: it.stop)
        last = bisect_left(self._of_others, place.stop, lo=first, key=lambda it: it.start)
        met = self._of_others[first:last]
        tensors = [tensor for it in met for tensor in it.tensors]
        if any(share_elements(target, tensor) for tensor in tensors):
            return False
        start, stop = min([place.start, *(it.start for it in met)]), max([place.stop, *(it.stop for it in met)])
        self._of_others[first:last] = [_Neighbours(start, stop, [*tensors, target])]
        return True

    def _is_in_module(self, place: Place) -> bool:
        before = bisect_left(self._of_modules, place.stop, key=lambda it: it.start)  # those that begin before its end
        return before > 0 and self._of_modules[before - 1].stop > place.start


def undo_casts(now: Any, stored: Any) -> Any:
    """Return `now` with the stored dtypes, changed in place where it can be: load_state_dict casts to the parameter's."""
    if isinstance(stored, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if now.dtype == stored.dtype else stored.to(now.device)
    if isinstance(stored, Mapping) and isinstance(now, MutableMapping):
        now.update({key: undo_casts(now[key], value) for key, value in stored.items() if key in now})
    elif isinstance(stored, list) and isinstance(now, list) and len(now) == len(stored):
        now[:] = map(undo_casts, now, stored)
    elif isinstance(stored, tuple) and isinstance(now, tuple) and len(now) == len(stored):
        cast = [*map(undo_casts, now, stored)]
        return type(now)(*cast) if hasattr(now, "_fields") else type(now)(cast)
    return now
