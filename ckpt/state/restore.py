"""The load of a state in place: every difference is found before any data is read."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from prefect_torch.ckpt.errors import RankLocalStateError, StateMismatchError

from .flatten import (
    ParameterNames,
    check_is_dict,
    clean_name,
    is_by_parameter,
    is_plain,
    is_stateful,
    local_part,
    path_name,
    unwrap,
)
from .index import StateIndex, TensorEntry, ValueEntry, rank_of
from .plan import Step
from .rank_local import RankLocal
from .read import Block, StateReader, tensor_blocks, value_block
from .targets import does_more_than_copy, fill_tensor, filled, undo_casts, why_unwritable
from .values import read_value

Path: TypeAlias = tuple[Step, ...]
Get: TypeAlias = Callable[[], Any]
Redistribute: TypeAlias = Callable[[str, list[Any], int, int], Any]
_MOST_LISTED = 5


class Node:
    """The tensors and values stored at a path and below.

    Attributes:
        names: The names of those stored at the path itself, by rank; None stands for all ranks.
        children: The nodes below.

    """

    def __init__(self) -> None:
        self.names: dict[int | None, str] = {}
        self.children: dict[Any, Node] = {}

    @classmethod
    def tree(cls, index: StateIndex) -> "Node":
        """Return the root of all stored tensors and values."""
        root = cls()
        for name, path in index.paths():
            node = root
            for step in path:
                node = node.children.setdefault(_hashable(step), cls())
            node.names[rank_of(name)] = name
        return root


class Restore:
    """The plan of a load: the blocks to read and the actions once they are read.

    Args:
        index: The index of the stored state.
        reader: The reader of its files.
        rank: This rank.
        world_size: The number of ranks.
        redistribute: Called with a name, the values of all former ranks, this rank and the number of ranks, where another
            number of ranks had values of their own; None refuses.

    """

    def __init__(
        self, index: StateIndex, reader: StateReader, rank: int, world_size: int, redistribute: Redistribute | None = None
    ) -> None:
        self._index = index
        self._reader = reader
        self._rank = rank
        self._world_size = world_size
        self._redistribute = redistribute
        self._problems: list[str] = []
        self._of_ranks: list[str] = []
        self._parameters = ParameterNames({})
        self.blocks: list[Block] = []
        self.finish: list[Callable[[], None]] = []

    def into(self, state: MutableMapping[str, Any]) -> None:
        """Plan the load into `state`.

        Raises:
            ValueError: If `state` is no dict.
            StateMismatchError: If a part of `state` is not stored, or has another shape or dtype; `state` is unchanged.
            RankLocalStateError: If values were each rank's own, of another number of ranks.

        """
        check_is_dict(state)
        self._parameters = ParameterNames(state)
        root = Node.tree(self._index)
        for key in state:
            self._restore_item(state, key, root, ())
        if self._problems:
            more = len(self._problems) - _MOST_LISTED
            listed = "\n  ".join(self._problems[:_MOST_LISTED]) + (f"\n  and {more} more" if more > 0 else "")
            raise StateMismatchError(
                f"{self._reader.where} does not fit the state to load into:\n  {listed}\n"
                "To train another model, give the run another name, or resume='never'"
            )
        if self._of_ranks:
            raise RankLocalStateError(
                f"{', '.join(self._of_ranks[:_MOST_LISTED])} differed between the {self._index.world_size} ranks that stored "
                f"{self._reader.where}, and now there are {self._world_size}: give load_state(..., rank_local=function), leave "
                "them out of the state to load into, or run on as many ranks"
            )

    def _restore_item(self, container: Any, key: Any, node: Node, path: Path, step: Step | None = None) -> None:
        """Plan the load into `container[key]`."""
        at: Path = (*path, key if step is None else step)
        child = node.children.get(_hashable(at[-1]))
        if child is None:
            self._problems.append(f"{path_name(at)!r} is not in the checkpoint")
            return
        get = self._restore(container[key], child, at)
        if get is not None:
            self.finish.append(lambda: container.__setitem__(key, filled(container[key], get())))

    def _restore(self, target: Any, node: Node, path: Path) -> Get | None:
        """Plan the load into `target`; return a function for its new value where it cannot be restored in place."""
        if isinstance(target, RankLocal):
            inner = self._restore(target.value, node, path)
            if inner is not None:
                self.finish.append(lambda: setattr(target, "value", filled(target.value, inner())))
        elif isinstance(target, torch.nn.Module):
            self._restore_module(unwrap(target), node, path)
        elif isinstance(target, torch.optim.Optimizer) and is_by_parameter(target.state_dict()):
            self._restore_optimizer(target, node, path)
        elif isinstance(target, torch.Tensor):
            self._restore_tensor(target, node, path)
        elif is_stateful(target):
            get = self._build(node, path, _tensors_in(target.state_dict(), path))
            self.finish.append(lambda: target.load_state_dict(get()))
        elif node.names or is_plain(target):
            return self._build(node, path, {})
        else:
            self._restore_container(target, node, path)
        return None

    def _restore_container(self, target: Any, node: Node, path: Path) -> None:
        if isinstance(target, list):
            if len(target) != len(node.children):
                self._problems.append(
                    f"{path_name(path)!r} has {len(node.children)} items in the checkpoint, not {len(target)}"
                )
                return
            for place in range(len(target)):
                self._restore_item(target, place, node, path, [place])
            return
        for key in target:
            self._restore_item(target, key, node, path)
        for key in node.children.keys() - target.keys():  # such as averages that a fresh process has not created yet
            if self._has_any(node.children[key]):
                self.finish.append(_assigns(target, key, self._build(node.children[key], (*path, key), {})))

    def _restore_tensor(self, target: torch.Tensor, node: Node, path: Path) -> None:
        name = self._name(node, path)
        entry = self._index.tensors.get(name or "")
        if entry is not None and name is not None:
            if self._fits(target, entry.dtype, entry.shape, name):
                self._fill(target, entry)
            return
        if name is None:
            if node.names and not self._is_refused(node):
                get = self._build(node, path, {})
                self.finish.append(lambda: fill_tensor(target, get(), path_name(path)))
            return
        small = self._index.values[name].tensor
        if small is None:
            self._problems.append(f"{name!r} is a plain value in the checkpoint and a tensor in the state to load into")
        elif self._fits(target, *small, name):
            value = self._value(name)
            self.finish.append(lambda: fill_tensor(target, value(), name))

    def _restore_module(self, module: torch.nn.Module, node: Node, path: Path) -> None:
        state = module.state_dict()
        own = {tensor.untyped_storage().data_ptr() for tensor in (*_local(module.parameters()), *_local(module.buffers()))}
        has_to_load = does_more_than_copy(module)
        names = {clean_name(key): key for key in state}
        for name, key in names.items():
            value = state[key]
            self._restore_item(state, key, node, path, name)
            shared = isinstance(value, torch.Tensor) and all(
                part.untyped_storage().data_ptr() in own for part in _local([value])
            )
            has_to_load = has_to_load or not shared
        unknown = (key for key in node.children.keys() - names.keys() if not self._is_of_others(node.children[key]))
        for unexpected in sorted(str(key) for key in unknown):
            self._problems.append(
                f"{path_name((*path, unexpected))!r} is in the checkpoint and not in the module: give its state_dict() to load "
                "what it has"
            )
        if has_to_load:
            self.finish.append(lambda: _load_module(module, state))

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, node: Node, path: Path) -> None:
        names = self._parameters.of(optimizer)
        parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        groups = node.children.get("param_groups", Node()).children
        state = node.children.get("state", Node()).children
        if not self._check_groups(optimizer, groups, names, path):
            return
        states: dict[Any, Get] = {}
        for name, of_parameter in state.items():
            if self._is_of_others(of_parameter):
                continue
            where, number = (*path, "state", name), numbers.get(name)
            like = {} if number is None else _state_like(optimizer, *parameters[number], of_parameter, where, self._index)
            states[name if number is None else number] = self._build(of_parameter, where, like)
        places = []
        for (number,), options in sorted(groups.items()):
            where = (*path, "param_groups", [number])
            places.append(self._build(options, where, _options_like(optimizer.param_groups[number], where)))

        known = ("state", "param_groups")
        more = {key: self._build(child, (*path, key), {}) for key, child in node.children.items() if key not in known}

        def load() -> None:
            restored = {number: get() for number, get in states.items()}
            loaded = [{**get(), "params": group["params"]} for get, group in zip(places, _numbered(optimizer), strict=True)]
            optimizer.load_state_dict({**{key: get() for key, get in more.items()}, "state": restored, "param_groups": loaded})
            for number, (parameter, _) in enumerate(parameters):
                undo_casts(optimizer.state.get(parameter, {}), restored.get(number, {}))

        self.finish.append(load)

    def _check_groups(
        self, optimizer: torch.optim.Optimizer, groups: Mapping[Any, Node], names: Sequence[Any], path: Path
    ) -> bool:
        where = path_name(path)
        if len(groups) != len(optimizer.param_groups):
            self._problems.append(
                f"{where!r} has {len(groups)} parameter groups in the checkpoint, not {len(optimizer.param_groups)}"
            )
            return False
        entries: list[ValueEntry] = []
        for place in range(len(groups)):
            node = groups[place,].children.get("params", Node())
            name = self._name(node, (*path, "param_groups", [place], "params"))
            if name is None:
                return False
            entries.append(self._index.values[name])
        for place, (group, data) in enumerate(zip(_numbered(optimizer), self._reader.read_values(entries), strict=True)):
            stored = read_value(data)
            mine = [names[number] for number in group["params"]]
            if stored != mine:
                differing = sorted({str(name) for name in {*stored} ^ {*mine}})
                is_alone = {type(name) for name in stored} == {str} and {type(name) for name in mine} == {int}
                self._problems.append(
                    f"group {place} of {where!r} has other parameters: {', '.join(differing) or 'another order'}"
                    + ("; they have their names from their module: load that, too" if is_alone else "")
                )
                return False
        return True

    def _build(self, node: Node, path: Path, like: Mapping[Path, torch.Tensor]) -> Get:
        """Plan to read all data at `node` into new memory, with the shapes of `like` at the same paths."""
        if not node.names:
            children = {step: child for step, child in node.children.items() if not self._is_of_others(child)}
            parts = {step: self._build(child, (*path, _step(step)), like) for step, child in children.items()}
            if parts and all(isinstance(step, tuple) for step in parts):
                return lambda: [parts[step]() for step in sorted(parts)]
            return lambda: {step: get() for step, get in parts.items()}
        name = self._name(node, path)
        if name is not None:
            return self._value(name) if name in self._index.values else self._tensor(name, like.get(_key(path)))
        if self._redistribute is None or self._is_refused(node):
            return lambda: None  # a problem is recorded
        redistribute, everybody = (
            self._redistribute,
            [node.names[rank] for rank in sorted(rank for rank in node.names if rank is not None)],
        )
        of_ranks = [self._value(name) if name in self._index.values else self._tensor(name, None) for name in everybody]
        return lambda: redistribute(path_name(path), [get() for get in of_ranks], self._rank, self._world_size)

    def _name(self, node: Node, path: Path) -> str | None:
        """Return the stored name of `node` for this rank; None where there is a problem, or ranks must be redistributed."""
        if None in node.names:
            return node.names[None]
        as_many = self._index.world_size == self._world_size
        if as_many and self._rank in node.names:
            return node.names[self._rank]
        if as_many or not node.names:
            self._problems.append(f"{path_name(path)!r} is not in the checkpoint{' for this rank' if node.names else ''}")
        elif self._redistribute is None:
            self._of_ranks.append(path_name(path))
        return None

    def _has_any(self, node: Node) -> bool:
        """Return whether any value at `node` is for this rank: others may have had more in a container than it had."""
        if node.names:
            own = self._rank in node.names if self._index.world_size == self._world_size else self._redistribute is not None
            return None in node.names or own
        return any(self._has_any(child) for child in node.children.values())

    def _is_of_others(self, node: Node) -> bool:
        """Return whether only other ranks had the values at `node`, where every rank receives its own values."""
        return self._index.world_size == self._world_size and not self._has_any(node)

    def _is_refused(self, node: Node) -> bool:
        """Return whether `_name` recorded a problem when it returned None."""
        return not node.names or self._redistribute is None or self._index.world_size == self._world_size

    def _value(self, name: str) -> Get:
        data: list[bytes] = []
        self.blocks.append(value_block(self._index.values[name], lambda read: data.append(bytes(read))))
        return lambda: read_value(data[0])

    def _tensor(self, name: str, like: torch.Tensor | None) -> Get:
        entry = self._index.tensors[name]
        dtype = getattr(torch, entry.dtype)
        if like is not None and tuple(like.shape) == entry.shape:
            tensor = like if like.dtype == dtype else torch.empty_like(like, dtype=dtype)
        else:
            tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
        self._fill(tensor, entry)
        return lambda: tensor

    def _fill(self, target: torch.Tensor, entry: TensorEntry) -> None:
        if (part := local_part(target)) is not None:
            self.blocks.extend(tensor_blocks(entry, self._index.block_bytes, part[1], part[0]))

    def _fits(self, target: torch.Tensor, dtype: str, shape: Sequence[int], name: str) -> bool:
        what = why_unwritable(target)
        if what is not None:
            self._problems.append(f"{name!r} is to be loaded into a tensor that is {what}: make it one with memory of its own")
            return False
        mine = str(target.dtype).removeprefix("torch.")
        if (mine, tuple(target.shape)) == (dtype, tuple(shape)):
            return True
        self._problems.append(f"{name!r} is {dtype} {list(shape)} in the checkpoint, not {mine} {list(target.shape)}")
        return False


def _state_like(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    node: Node,
    path: Path,
    index: StateIndex,
) -> dict[Path, torch.Tensor]:
    """Return the tensors into which an optimizer's state of one parameter is read: its own, or new ones like the parameter."""
    like = _tensors_in(optimizer.state.get(parameter, {}), path)
    has_step_on_device = group.get("fused") or group.get("capturable")
    for step, child in node.children.items():
        if step == "step" and not has_step_on_device:  # of the shape of a scalar parameter, and read by the host at each step
            continue
        entry: TensorEntry | ValueEntry | None = next((index.tensors.get(name) for name in child.names.values()), None)
        at = _key((*path, _step(step)))
        if isinstance(entry, TensorEntry) and at not in like and entry.shape == tuple(parameter.shape):
            like[at] = torch.empty_like(parameter.detach(), dtype=getattr(torch, entry.dtype))
    return like


def _options_like(group: Mapping[str, Any], path: Path) -> dict[Path, torch.Tensor]:
    """Return the tensors into which a parameter group's options, such as `lr`, are read: its own."""
    return _tensors_in({name: value for name, value in group.items() if name != "params"}, path)


def _tensors_in(value: Any, path: Path) -> dict[Path, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {_key(path): value.detach()}
    found: dict[Path, torch.Tensor] = {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            found.update(_tensors_in(item, (*path, key)))
    if isinstance(value, list):
        for place, item in enumerate(value):
            found.update(_tensors_in(item, (*path, [place])))
    return found


def _numbered(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group's parameters as the numbers that load_state_dict uses."""
    start, groups = 0, []
    for group in optimizer.param_groups:
        groups.append({"params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    return groups


def _local(tensors: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if (part := local_part(tensor)) is not None:
            yield part[1]


def _load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state)


def _assigns(target: MutableMapping[Any, Any], key: Any, get: Get) -> Callable[[], None]:
    return lambda: target.__setitem__(key, get())


def _key(path: Path) -> Path:
    """Return `path` in a hashable form."""
    return tuple(_hashable(step) for step in path)


def _hashable(step: Step) -> Any:
    return (step[0],) if isinstance(step, list) else step


def _step(step: Any) -> Step:
    return [step[0]] if isinstance(step, tuple) else step
