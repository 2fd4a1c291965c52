"""The load of an optimizer: its state by the names of its parameters, and the options of its parameter groups."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from prefect_torch.ckpt.state.index import TensorEntry
from prefect_torch.ckpt.state.key_order import key_of
from prefect_torch.ckpt.state.plan import path_name

from .load_plan import Get, LoadPlan, Node, Path, step_of, tensors_in
from .targets import undo_casts

_HOW = ("foreach", "fused", "capturable")  # how a step is computed, which its devices and sharding decide
Names: TypeAlias = Callable[[], Sequence[str | int]]


def restore_optimizer(plan: LoadPlan, optimizer: torch.optim.Optimizer, names: Sequence[Names], node: Node, path: Path) -> None:
    """Plan the load of `node` into an optimizer whose state has the form of torch's own optimizers.

    Args:
        plan: The plan of the load.
        optimizer: The optimizer, which may be fresh.
        names: Functions that return the names of the optimizer's parameters, in its own order: first those that this version
            stores, then those that former versions stored.
        node: The stored optimizer.
        path: The path of the optimizer in the state.

    """
    stored_names = _stored_names(plan, optimizer, names, node, path)
    if stored_names is None:
        return
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    states = _read_states(plan, optimizer, parameters, stored_names, node, path)
    groups = []
    for (number,), options in sorted(_groups(plan, node).items()):
        where = (*path, "param_groups", [number])
        groups.append(plan.build(options, where, _options_of(optimizer.param_groups[number], where)))
    known = ("state", "param_groups")
    more = {key: plan.build(child, (*path, key), {}) for key, child in node.children.items() if key not in known}

    def load() -> None:
        restored = {number: get() for number, get in states.items()}
        loaded = [{**get(), **own} for get, own in zip(groups, _own_options(optimizer), strict=True)]
        given = {**restored}  # ZeroRedundancyOptimizer removes the states of parameters that other ranks step
        optimizer.load_state_dict({**{key: get() for key, get in more.items()}, "state": given, "param_groups": loaded})
        for number, (parameter, _) in enumerate(parameters):
            if isinstance(of_parameter := optimizer.state.get(parameter), MutableMapping):
                undo_casts(of_parameter, restored.get(number, {}))

    plan.finish.append(load)


def _children(node: Node, key: str) -> dict[Any, Node]:
    return node.children.get(key, Node()).children


def _groups(plan: LoadPlan, node: Node) -> dict[Any, Node]:
    return {key: child for key, child in _children(node, "param_groups").items() if not plan.is_of_others(child)}


def _read_states(
    plan: LoadPlan,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[tuple[torch.Tensor, Mapping[str, Any]]],
    names: Sequence[str | int],
    node: Node,
    path: Path,
) -> dict[Any, Get]:
    """Plan to read the state of each parameter, by its number."""
    numbers = {name: number for number, name in enumerate(names)}
    ranks = {rank for options in _groups(plan, node).values() for rank in options.children["params"].names}
    states: dict[Any, Get] = {}
    for name, of_parameter in _children(node, "state").items():
        if plan.is_of_others(of_parameter):
            continue
        where, number = (*path, "state", name), numbers.get(name)
        plan.check_held(of_parameter, where, ranks)  # who does not step a parameter would store an old state of it
        like = {} if number is None else _state_like(plan, optimizer, *parameters[number], of_parameter, where)
        states[name if number is None else number] = plan.build(of_parameter, where, like)
    return states


def _stored_names(
    plan: LoadPlan, optimizer: torch.optim.Optimizer, names: Sequence[Names], node: Node, path: Path
) -> Sequence[str | int] | None:
    """Return the names of the parameters in the stored groups; record a problem and return None if the optimizer's differ."""
    groups, where = _groups(plan, node), path_name(path)
    if len(groups) != len(optimizer.param_groups):
        plan.problems.append(
            f"{where!r} has {len(groups)} parameter groups in the checkpoint, not {len(optimizer.param_groups)}"
        )
        return None
    lists: list[tuple[Node, Path, str | None]] = []
    for number in range(len(groups)):
        of_group, at = groups[number,].children.get("params", Node()), (*path, "param_groups", [number], "params")
        name = plan.name_of(of_group, at)
        if name is None and not plan.is_redistributed(of_group):
            return None
        lists.append((of_group, at, name))
    own = iter(plan.values_now([name for _, _, name in lists if name is not None]))
    of_groups = [plan.redistributed_now(of_group, at) if name is None else next(own) for of_group, at, name in lists]
    numbered = _numbered(optimizer)
    chosen = next((it for it in (get() for get in names) if [_named(it, group) for group in numbered] == of_groups), names[0]())
    for number, (group, stored) in enumerate(zip(numbered, of_groups, strict=True)):
        mine = _named(chosen, group)
        if stored != mine:
            plan.problems.append(f"group {number} of {where!r} has other parameters: {_difference(stored, mine)}")
            return None
        if unset := _unset_options(optimizer, number, {*groups[number,].children}):
            plan.problems.append(
                f"group {number} of {where!r} has no {', '.join(unset)} in the checkpoint: another kind of optimizer than "
                f"{type(optimizer).__name__} stored it"
            )
            return None
    return chosen


def _named(names: Sequence[str | int], group: Mapping[str, Any]) -> list[str | int]:
    return [names[number] for number in group["params"]]


def _unset_options(optimizer: torch.optim.Optimizer, number: int, stored: Collection[Any]) -> list[str]:
    """Return the options that a load of the `stored` ones leaves without a value, if another kind of optimizer stored them.

    An option that a later version has added gets a default from `__setstate__`, or its optimizer copes without it. A checkpoint
    of another kind of optimizer also has options that this one does not have. An optimizer's `state_dict()` may leave some out.
    """
    if {*stored} <= optimizer.param_groups[number].keys():
        return []
    fresh = object.__new__(type(optimizer))
    fresh.__dict__.update(optimizer.__dict__)
    try:
        # A wrapper may have no defaults. torch's __setstate__ adds an option to them that the groups may lack.
        options = getattr(optimizer, "defaults", {}).keys() & optimizer.state_dict()["param_groups"][number].keys()
        fresh.__setstate__({"state": defaultdict(dict), "param_groups": [{**dict.fromkeys(stored), "params": []}]})
    except Exception:  # noqa: BLE001 - the user's class may want more than a group of options
        return []
    return sorted(options - fresh.param_groups[0].keys())


def _difference(stored: Sequence[Any], mine: Sequence[Any]) -> str:
    differing = sorted({str(name) for name in {*stored} ^ {*mine}})
    is_alone = str in {type(name) for name in stored} and {type(name) for name in mine} == {int}
    hint = "; they have their names from their module: load that, too" if is_alone else ""
    return (", ".join(differing) or "another order") + hint


def _state_like(
    plan: LoadPlan, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any], node: Node, path: Path
) -> dict[Path, torch.Tensor]:
    """Return the tensors into which an optimizer's state of one parameter is read: its own, or new ones like the parameter."""
    like = tensors_in(optimizer.state.get(parameter, {}), path)
    has_step_on_device = group.get("fused") or group.get("capturable")
    for key, child in node.children.items():
        if key == "step" and not has_step_on_device:  # shaped like a scalar parameter, but the host reads it at each step
            continue
        entry = next((plan.entry_of(name) for name in child.names.values()), None)
        at = key_of((*path, step_of(key)))
        if isinstance(entry, TensorEntry) and at not in like and entry.shape == tuple(parameter.shape):
            like[at] = torch.empty_like(parameter.detach(), dtype=getattr(torch, entry.dtype))
    return like


def _options_of(group: Mapping[str, Any], path: Path) -> dict[Path, torch.Tensor]:
    """Return the tensors into which a parameter group's options, such as `lr`, are read: its own."""
    return tensors_in({name: value for name, value in group.items() if name != "params"}, path)


def _own_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what a load leaves as it is in each group: the parameters, as numbers, and how a step is computed."""
    groups = zip(_numbered(optimizer), optimizer.param_groups, strict=True)
    return [{**numbered, **{name: group[name] for name in _HOW if name in group}} for numbered, group in groups]


def _numbered(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group's parameters as the numbers that load_state_dict uses."""
    start, groups = 0, []
    for group in optimizer.param_groups:
        groups.append({"params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    return groups
