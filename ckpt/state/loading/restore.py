"""The load of a state into live objects, in place: every difference is found before anything changes."""

import sys
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from prefect_torch.ckpt.errors import StateMismatchError
from prefect_torch.ckpt.state.index import TensorEntry
from prefect_torch.ckpt.state.key_order import hashable
from prefect_torch.ckpt.state.objects.arrays import array_kind, as_array, memory_of_array
from prefect_torch.ckpt.state.objects.flatten import check_is_dict, is_plain, is_stateful
from prefect_torch.ckpt.state.objects.parameters import (
    ParameterNames,
    clean_names,
    is_by_parameter,
    is_extra_state,
    keys_of,
    unwrap,
)
from prefect_torch.ckpt.state.objects.tensors import Place, local_tensor, place_of
from prefect_torch.ckpt.state.plan import Step, path_name
from prefect_torch.ckpt.state.random_state import ProcessGenerators, is_generator, set_generator
from prefect_torch.ckpt.state.rank_local import RankLocal
from prefect_torch.ckpt.state.staging.device_copies import bytes_of

from .load_plan import Get, LoadPlan, Node, Path, tensors_in
from .optimizers import restore_optimizer
from .targets import (
    does_more_than_copy,
    fill_tensor,
    filled,
    in_form_of,
    resizable_buffers,
    set_items,
    why_unwritable,
    with_versions,
)


def plan_restore(plan: LoadPlan, state: MutableMapping[str, Any]) -> None:
    """Plan the load of a stored state into `state`.

    Raises:
        ValueError: If `state` is no dict.
        StateMismatchError: If a part of `state` is not stored, or has another shape or dtype; `state` is unchanged.
        RankLocalStateError: If values were each rank's own, and another number of ranks stored them.

    """
    check_is_dict(state)
    restore = _Restore(plan, state)
    root = plan.tree()
    for key in state:
        restore.item(state, key, root, ())
    plan.check()


class _Restore:
    """Plans the load into each kind of object."""

    def __init__(self, plan: LoadPlan, state: Mapping[str, Any]) -> None:
        self._plan = plan
        self._state = state
        self._parameters = ParameterNames(state)
        self._places = {id(module): _places(module) for module in self._parameters.modules}
        plan.memory.reserve(chain.from_iterable(self._places.values()))
        self._names: dict[Any, str] = {}  # of what is read into each tensor of a module

    def item(self, container: Any, key: Any, node: Node, path: Path, step: Step | None = None) -> None:
        """Plan the load into `container[key]`."""
        at: Path = (*path, key if step is None else step)
        child = node.children.get(hashable(at[-1]))
        if child is None and _holds_nothing(container[key]):
            return
        if child is None:
            self._plan.problems.append(f"{path_name(at)!r} is not in the checkpoint")
            return
        self._restore_value(container, key, child, at)

    def _restore_value(self, container: Any, key: Any, node: Node, path: Path) -> None:
        get = self._restore(container[key], node, path)
        if get is not None:
            self._plan.finish.append(lambda: container.__setitem__(key, filled(container[key], get())))

    def _restore(self, target: Any, node: Node, path: Path) -> Get | None:
        """Plan the load into `target`; return a function for its new value where it cannot be restored in place."""
        plan = self._plan
        if isinstance(target, RankLocal):
            inner = self._restore(target.value, node, path)
            if inner is not None:
                plan.finish.append(lambda: setattr(target, "value", filled(target.value, inner())))
        elif isinstance(target, torch.nn.Module):
            self._restore_module(unwrap(target), node, path)
        elif isinstance(target, torch.optim.Optimizer) and _has_usual_form(target):
            names = partial(self._parameters.of, target), lambda: ParameterNames(self._state, former=True).of(target)
            restore_optimizer(plan, target, names, node, path)
        elif isinstance(target, torch.Tensor):
            return self._restore_tensor(target, node, path)
        elif array_kind(target) == "array":
            return self._restore_array(target, node, path)
        elif is_stateful(target) or is_generator(target):
            self._restore_object(target, node, path)
        elif plan.is_one_value(node) or _is_replaceable(target):
            if isinstance(target, (Mapping, list)):
                self._check_has_names(target, node)
            return plan.build(node, path, {})
        else:
            self._restore_container(target, node, path)
        return None

    def _restore_object(self, target: Any, node: Node, path: Path) -> None:
        plan = self._plan
        if is_stateful(target):
            fresh = {} if _may_begin_iteration(target) else target.state_dict()
            get = plan.build(node, path, tensors_in(fresh, path))
            finish = plan.last if isinstance(target, ProcessGenerators) else plan.finish
            finish.append(lambda: target.load_state_dict(in_form_of(fresh, with_versions(fresh, get()))))
        else:
            get = plan.build(node, path, {})
            plan.last.append(lambda: set_generator(target, get(), path_name(path)))

    def _restore_container(self, target: Any, node: Node, path: Path) -> None:
        plan = self._plan
        if isinstance(target, list):
            count = sum(not plan.is_of_others(child) for child in node.children.values())
            absent = [item for index, item in enumerate(target) if hashable([index]) not in node.children]
            if len(target) - sum(map(_holds_nothing, absent)) != count:
                plan.problems.append(f"{path_name(path)!r} has {count} items in the checkpoint, not {len(target)}")
                return
            for index in range(len(target)):
                self.item(target, index, node, path, [index])
            return
        for key in target:
            self.item(target, key, node, path)
        missing = [key for key in node.children if key not in target]  # averages that a fresh process has not created yet
        for key in missing:
            if plan.has_any(node.children[key]):
                plan.finish.append(_assigns(target, key, plan.build(node.children[key], (*path, key), {})))

    def _check_has_names(self, target: Any, node: Node) -> None:
        """Record a problem if the names in `target`, a container, are not in the one value that is stored there."""
        name = self._plan.own_name(node)
        if name is not None and not _is_replaceable(target) and not _has_names(target, self._plan.value_now(name)):
            self._plan.problems.append(
                f"{name!r} is one value in the checkpoint, without the items of the {type(target).__name__} to load into"
            )

    def _restore_tensor(self, target: torch.Tensor, node: Node, path: Path) -> Get | None:
        """Plan the load into `target`; return a function for its new value if it shares memory with another part."""
        own, get = (target, None) if why_unwritable(target) else self._plan.memory.own(target)
        self._fill(own, node, path)
        return None if own is target else get

    def _fill_once(self, target: torch.Tensor, node: Node, path: Path) -> None:
        """Plan the load into a module's tensor, which several names may share: what is stored under them must be equal."""
        place, name = place_of(target), self._plan.own_name(node)
        if name is None or place.start == place.stop:
            self._fill(target, node, path)
            return
        first = self._names.setdefault((place, target.dtype, target.shape, target.stride()), name)
        if first == name:
            self._fill(target, node, path)
            return
        differ = f"{first!r} and {name!r} share memory in the state to load into, and differ in the checkpoint"
        is_equal = self._plan.are_equal(first, name)
        if is_equal is False:
            self._plan.problems.append(differ)
        elif is_equal is None:
            other = torch.empty_like(target.detach())
            self._fill(other, node, path)
            self._plan.finish.append(partial(_check_same, target, other, differ))

    def _fill(self, target: torch.Tensor, node: Node, path: Path) -> None:
        plan = self._plan
        name = plan.name_of(node, path)
        if name is None:
            if plan.is_redistributed(node):
                get = plan.build(node, path, {})
                plan.finish.append(lambda: fill_tensor(target, get(), path_name(path)))
            return
        entry = plan.entry_of(name)
        if isinstance(entry, TensorEntry):
            if plan.fits(target, entry.dtype, entry.shape, name):
                plan.fill(target, entry)
        elif entry.tensor is None:
            plan.problems.append(f"{name!r} is a plain value in the checkpoint and a tensor in the state to load into")
        elif plan.fits(target, *entry.tensor, name):
            value = plan.value(name)
            plan.finish.append(lambda: fill_tensor(target, value(), name))

    def _restore_array(self, target: Any, node: Node, path: Path) -> Get | None:
        memory = memory_of_array(target)
        if memory is None:
            self._plan.problems.append(
                f"{path_name(path)!r} is to be loaded into an array that is read-only or reversed: give a copy"
            )
            return None
        get = self._restore_tensor(memory, node, path)
        return None if get is None else lambda: target if (value := get()) is memory else as_array(value, "array")

    def _restore_module(self, module: torch.nn.Module, node: Node, path: Path) -> None:
        if any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
            self._plan.problems.append(
                f"{path_name(path)!r} has parameters that are not initialized (lazy): run a batch through it before the load"
            )
            return
        state = module.state_dict()
        own = {place.storage for place in self._places[id(module)]}
        former = clean_names(module, state, former=True)
        names = {
            former[key] if former[key] in node.children and name not in node.children else name: key
            for key, name in clean_names(module, state).items()
        }
        has_new, resizable = False, keys_of(resizable_buffers(module), module, state)
        any_form = resizable | {key for key in state if is_extra_state(key) or isinstance(state[key], list)}
        for name, key in names.items():
            if key in any_form and name in node.children:
                has_new = self._restore_any_form(state, key, node.children[name], (*path, name)) or has_new
            elif isinstance(state[key], torch.Tensor) and name in node.children:
                self._fill_once(state[key], node.children[name], (*path, name))
            else:
                self.item(state, key, node, path, name)
        is_own = not self._plan.is_of_others(node)  # else what another rank had is asked for
        unknown = (
            key for key in node.children.keys() - names.keys() if not (is_own and self._plan.is_of_others(node.children[key]))
        )
        for unexpected in sorted(str(key) for key in unknown):
            self._plan.problems.append(
                f"{path_name((*path, unexpected))!r} is in the checkpoint and not in the module: give its state_dict() to load "
                "what it has"
            )
        if has_new or does_more_than_copy(module) or not all(_is_in(own, value) for value in state.values()):
            self._plan.finish.append(_loads(module, state, path))

    def _restore_any_form(self, state: MutableMapping[str, Any], key: str, node: Node, path: Path) -> bool:
        """Plan the load of a module's extra state, list or resizable buffer; return whether `state[key]` is replaced.

        Its stored form may differ from that of a fresh module: it may be the pickled bytes of what the module has counted, the
        batches of a metric, or one scale for each channel, where FakeQuantize has a single scale until its first batch.
        Containers are new: the fresh ones may be the module's own, which it may clear before it takes the items of those that
        it is given.
        """
        plan = self._plan
        if isinstance(state[key], torch.Tensor) and plan.attempt(lambda: self._fill(state[key], node, path)):
            return False
        get = plan.build(node, path, tensors_in(state[key], path))
        plan.finish.append(lambda: state.__setitem__(key, in_form_of(state[key], get())))
        return True


def _holds_nothing(target: Any) -> bool:
    """Return whether `target` is modules without a state, such as losses, of which version 0.1 stored nothing."""
    if isinstance(target, RankLocal):
        return _holds_nothing(target.value)
    if isinstance(target, (Mapping, list)):
        items = target.values() if isinstance(target, Mapping) else target
        return bool(target) and all(map(_holds_nothing, items))
    return isinstance(target, torch.nn.Module) and not target.state_dict()


def _may_begin_iteration(target: Any) -> bool:
    """Return whether `target.state_dict()` may begin an iteration: torchdata's start workers, and one would not begin another.

    An optimizer of several ones, such as torchtitan's, can be iterated over, too, and has tensors to read into.
    """
    is_iterable = hasattr(type(target), "__iter__") and not hasattr(type(target), "__getitem__")
    return is_iterable and not isinstance(target, torch.optim.Optimizer)


def _has_usual_form(optimizer: torch.optim.Optimizer) -> bool:
    kind: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if kind is not None and isinstance(optimizer, kind):
        return True  # its state_dict() raises unless all ranks have sent this one their parts
    return is_by_parameter(optimizer.state_dict())


def _is_in(storages: set[int], value: Any) -> bool:
    return isinstance(value, torch.Tensor) and place_of(value).storage in storages


def _places(module: torch.nn.Module) -> list[Place]:
    return [place_of(tensor) for tensor in (*module.parameters(), *module.buffers())]


def _is_replaceable(target: Any) -> bool:
    """Return whether `target` has nothing to load into: it is plain, a scalar of NumPy, or a list of these."""
    if isinstance(target, list):
        return all(not isinstance(item, Mapping) and _is_replaceable(item) for item in target)
    return is_plain(target) or array_kind(target) == "scalar"


def _has_names(target: Any, value: Any) -> bool:
    """Return whether `value` has all items of `target`."""
    if _is_replaceable(target):
        return True
    if isinstance(target, Mapping):
        return isinstance(value, Mapping) and all(key in value and _has_names(item, value[key]) for key, item in target.items())
    if isinstance(target, list):
        return isinstance(value, list) and len(value) == len(target) and all(map(_has_names, target, value))
    return False


def _assigns(target: MutableMapping[Any, Any], key: Any, get: Get) -> Callable[[], None]:
    return lambda: set_items(target, in_form_of(target, {key: get()}))


def _loads(module: torch.nn.Module, state: Mapping[str, Any], path: Path) -> Callable[[], None]:
    def load() -> None:
        try:
            if type(module).load_state_dict is torch.nn.Module.load_state_dict:
                _load_module(module, state)
            else:
                module.load_state_dict(state)
        except RuntimeError as exc:  # for example of a buffer that only the module itself could have resized
            what = f"{path_name(path)!r} does not take what is stored, and may be partly loaded"
            raise StateMismatchError(f"{what}: {exc}") from exc

    return load


def _load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a module's own `state_dict()`, except for entries that it does not take and that were already read into place.

    Some modules return names in `state_dict()` that they do not take, as bitsandbytes does for the data of 4-bit weights, or
    leave out there what they would take, as frozen weights.

    Raises:
        RuntimeError: As load_state_dict raises it, or if the module does not take a name and has another value for it.

    """
    found = module.load_state_dict(state, strict=False)
    given = {name: key for key, name in clean_names(module, state).items()}
    missing = [name for name in clean_names(module, found.missing_keys).values() if name in given]
    not_taken = [*clean_names(module, found.unexpected_keys).values(), *missing]
    now = module.state_dict() if not_taken else {}
    other = [name for name in not_taken if name not in given or not _is_same(state[given[name]], now[given[name]])]
    if other:
        raise RuntimeError(f"it does not take {', '.join(other)}")


def _check_same(target: torch.Tensor, other: torch.Tensor, differ: str) -> None:
    if not _is_same(target, other):
        raise StateMismatchError(f"{differ}: it may be partly loaded")


def _is_same(stored: Any, now: Any) -> bool:
    if not isinstance(stored, torch.Tensor) or not isinstance(now, torch.Tensor):
        return bool(type(stored) is type(now) and stored == now)
    one, other = local_tensor(stored), local_tensor(now)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))
