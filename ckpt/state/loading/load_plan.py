"""The plan of a load: what is stored under each path for this rank, the reads, and what follows when they are done."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from prefect_torch.ckpt.errors import RankLocalStateError, StateMismatchError
from prefect_torch.ckpt.state.index import StateIndex, TensorEntry, ValueEntry, rank_of
from prefect_torch.ckpt.state.key_order import hashable, key_of, ordered
from prefect_torch.ckpt.state.objects.arrays import as_array
from prefect_torch.ckpt.state.objects.tensors import local_part
from prefect_torch.ckpt.state.plan import Step, path_name

from .read import Block, StateReader, stored_value, value_block
from .targets import FilledMemory, fill_tensor, why_unwritable
from .tensor_blocks import tensor_blocks

Path: TypeAlias = tuple[Step, ...]
Get: TypeAlias = Callable[[], Any]
Redistribute: TypeAlias = Callable[[str, list[Any], int, int], Any]
_MOST_LISTED = 3


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
    def tree(cls, index: StateIndex, rank: int | None) -> "Node":
        """Return the root of all stored tensors and values, with the children of each node in the order that `rank` had."""
        root = cls()
        for name, path in index.paths():
            node = root
            for step in path:
                node = node.children.setdefault(hashable(step), cls())
            node.names[rank_of(name)] = name
        for order in index.orders:  # the order for all ranks comes before those for single ranks
            if order.rank in (None, rank) and (of_dict := root._at(order.path)) is not None:
                children = of_dict.children
                of_dict.children = {key: children[key] for key in ordered(children, key_of(order.keys))}
        return root

    def _at(self, path: Sequence[Step]) -> "Node | None":
        node: Node | None = self
        for key in key_of(path):
            node = None if node is None else node.children.get(key)
        return node


class LoadPlan:
    """The reads of a load, and the actions on their data; planning reads only small values that it must compare.

    Args:
        index: The index of the stored state.
        reader: The reader of its files.
        rank: This rank.
        world_size: The number of ranks.
        redistribute: Called with a name, the values of the former ranks that had one, this rank and the number of ranks, for
            values that were each rank's own, of another number of ranks; None refuses such a load.

    Attributes:
        values: The blocks of values, which are read before any tensor changes.
        unpack: The actions that decode these blocks, and refuse values that this process cannot read.
        blocks: The blocks of tensors to read then.
        finish: The actions once all blocks are read, in order.
        last: The actions after these: they set random generators, from which the others may draw.
        problems: The differences between what is stored and the state to load into.
        memory: The memory that is filled in place.
        devices: The devices of the tensors that are filled.
        filled: These tensors; of a DTensor, this rank's part.

    """

    def __init__(
        self, index: StateIndex, reader: StateReader, rank: int, world_size: int, redistribute: Redistribute | None = None
    ) -> None:
        self.values: list[Block] = []
        self.unpack: list[Callable[[], None]] = []
        self.blocks: list[Block] = []
        self.finish: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        self.problems: list[str] = []
        self.memory = FilledMemory()
        self.devices: set[torch.device] = set()
        self.filled: list[torch.Tensor] = []
        self._index = index
        self._reader = reader
        self._rank = rank
        self._world_size = world_size
        self._redistribute = redistribute
        self._of_ranks: list[str] = []
        self._of_some: list[str] = []

    def tree(self) -> Node:
        """Return the root of all that is stored."""
        return Node.tree(self._index, self._rank if self._index.world_size == self._world_size else None)

    def check(self) -> None:
        """Raise if the load cannot be done as planned.

        Raises:
            StateMismatchError: If there are problems, naming the first three.
            RankLocalStateError: If values were each rank's own, or an optimizer's tensors only some ranks', and another number
                of ranks stored them.

        """
        if self.problems:
            more = len(self.problems) - _MOST_LISTED
            listed = "; ".join(self.problems[:_MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
            raise StateMismatchError(
                f"{self._reader.where} does not fit the state to load into: {listed}. "
                "To train another model, give the run another name, or resume='never'"
            )
        if self._of_ranks:
            raise RankLocalStateError(
                f"{', '.join(self._of_ranks[:_MOST_LISTED])} differed between the {self._index.world_size} ranks that stored "
                f"{self._reader.where}, and now there are {self._world_size}: give load_state(..., rank_local=function), leave "
                "them out of the state to load into, or run on as many ranks"
            )

        if self._of_some:
            raise RankLocalStateError(
                f"only some of the {self._index.world_size} ranks that stored {self._reader.where} had "
                f"{', '.join(self._of_some[:_MOST_LISTED])}, and now there are {self._world_size}, of which nothing says who "
                "steps what: leave the optimizer out of the state to load into, or run on as many ranks"
            )

    def attempt(self, planned: Callable[[], None]) -> bool:
        """Call `planned`, and undo what it planned if it finds problems; return whether it found none."""
        lists: list[list[Any]] = [self.values, self.unpack, self.blocks, self.finish, self.last, self.problems, self._of_ranks]
        before, num_problems = [len(it) for it in lists], len(self.problems)
        planned()
        if len(self.problems) == num_problems:
            return True
        for it, length in zip(lists, before, strict=True):
            del it[length:]
        return False

    def name_of(self, node: Node, path: Path) -> str | None:
        """Return the stored name of `node` for this rank; None if there is a problem, or the values must be redistributed."""
        if (name := self.own_name(node)) is not None:
            return name
        as_many = self._index.world_size == self._world_size
        if as_many or not node.names:
            self.problems.append(f"{path_name(path)!r} is not in the checkpoint{' for this rank' if node.names else ''}")
        elif self._redistribute is None:
            self._of_ranks.append(path_name(path))
        return None

    def own_name(self, node: Node) -> str | None:
        """Return the stored name of `node` for this rank, None where it has none."""
        own = node.names.get(self._rank) if self._index.world_size == self._world_size else None
        return node.names.get(None, own)

    def entry_of(self, name: str) -> TensorEntry | ValueEntry:
        """Return the entry of a stored name."""
        return self._index.tensors.get(name) or self._index.values[name]

    def are_equal(self, name: str, other: str) -> bool | None:
        """Return whether the same is stored under two names, by the digests; None if these do not show it."""
        one, two = self.entry_of(name), self.entry_of(other)
        if isinstance(one, ValueEntry) and isinstance(two, ValueEntry):
            return True if (one.digest, one.bytes, one.tensor) == (two.digest, two.bytes, two.tensor) else None
        if isinstance(one, TensorEntry) and isinstance(two, TensorEntry) and (one.dtype, one.shape) == (two.dtype, two.shape):
            first, second = ({(it.offsets, it.sizes): it.digests for it in entry.chunks} for entry in (one, two))
            return first == second if first.keys() == second.keys() else None
        return None

    def has_any(self, node: Node) -> bool:
        """Return whether any value at or below `node` is for this rank: other ranks may have had more items in a container."""
        shared = node.names.get(None)
        if shared is not None and self._is_held(shared):
            return True
        if node.names and self._index.world_size != self._world_size:
            return self._redistribute is not None and shared is None
        return self._rank in node.names or any(map(self.has_any, node.children.values()))

    def _is_held(self, name: str) -> bool:
        """Return whether this rank had the tensor `name`, as all ranks had most; one rank alone is all of them."""
        holders = self._index.holders.get(name)
        as_many = self._index.world_size == self._world_size
        return holders is None or self._world_size == 1 or (as_many and self._rank in holders)

    def check_held(self, node: Node, path: Path, ranks: set[int | None]) -> None:
        """Refuse a load on another number of ranks if only some of `ranks`, of which None is all, had a tensor in `node`."""
        names = [name for name in node.names.values() if name in self._index.holders and not self._is_held(name)]
        if self._index.world_size != self._world_size and any({*self._index.holders[name]} != ranks for name in names):
            self._of_some.append(path_name(path))
        for step, child in node.children.items():
            self.check_held(child, (*path, step_of(step)), ranks)

    def is_one_value(self, node: Node) -> bool:
        """Return whether this rank has a tensor or value at `node` itself, which may be a container on other ranks."""
        if not node.names or self._rank in node.names or self._index.world_size != self._world_size:
            return bool(node.names)
        return None in node.names or not any(map(self.has_any, node.children.values()))

    def is_of_others(self, node: Node) -> bool:
        """Return whether only other ranks had the values at `node`, where every rank receives its own values."""
        return self._index.world_size == self._world_size and not self.has_any(node)

    def is_redistributed(self, node: Node) -> bool:
        """Return whether the values that another number of ranks had at `node` are given to the user's function."""
        return bool(node.names) and self._redistribute is not None and self._index.world_size != self._world_size

    def build(self, node: Node, path: Path, like: Mapping[Path, torch.Tensor]) -> Get:
        """Plan to read all data at `node` into new memory, with the shapes of `like` at the same paths."""
        if not self.is_one_value(node):
            children = {step: child for step, child in node.children.items() if not self.is_of_others(child)}
            parts = {step: self.build(child, (*path, step_of(step)), like) for step, child in children.items()}
            if parts and all(isinstance(step, tuple) for step in parts):
                return lambda: [parts[step]() for step in sorted(parts)]
            return lambda: {step: get() for step, get in parts.items()}
        name = self.name_of(node, path)
        if name is not None:
            return self._read(name, like.get(key_of(path)))
        if self._redistribute is None or not self.is_redistributed(node):
            return lambda: None  # a problem is recorded
        redistribute = self._redistribute
        of_ranks = [self._read(name, None) for name in _names_of_ranks(node)]
        return lambda: redistribute(path_name(path), [get() for get in of_ranks], self._rank, self._world_size)

    def value(self, name: str) -> Get:
        """Plan to read a stored value."""
        found: list[Any] = []
        entry, is_of_all = self._index.values[name], rank_of(name) is None
        self.values.append(value_block(entry, lambda read: found.append(bytes(read)), is_replicated=is_of_all))
        self.unpack.append(lambda: found.append(stored_value(name, entry, found.pop(), self._reader.where)))
        return lambda: found[0]

    def value_now(self, name: str) -> Any:
        """Return what is stored under `name`, read immediately; None for a tensor."""
        return self.values_now([name])[0] if name in self._index.values else None

    def values_now(self, names: Sequence[str]) -> list[Any]:
        """Return stored values, read immediately."""
        entries = [self._index.values[name] for name in names]
        found = zip(names, entries, self._reader.read_values(entries), strict=True)
        return [stored_value(name, entry, data, self._reader.where) for name, entry, data in found]

    def redistributed_now(self, node: Node, path: Path) -> Any:
        """Return what the user's function makes of the values that another number of ranks had at `node`, read immediately."""
        assert self._redistribute is not None
        return self._redistribute(path_name(path), self.values_now(_names_of_ranks(node)), self._rank, self._world_size)

    def fill(self, target: torch.Tensor, entry: TensorEntry) -> None:
        """Plan to read a stored tensor into `target`; of a DTensor, this rank's part."""
        self.devices.add(target.device)
        if (part := local_part(target)) is not None:
            self.filled.append(part[1])
            self.blocks.extend(tensor_blocks(entry, self._index.block_bytes, part[1], part[0]))

    def fits(self, target: torch.Tensor, dtype: str, shape: Sequence[int], name: str) -> bool:
        """Return whether a stored tensor can be read into `target`; otherwise a problem is recorded."""
        self.devices.add(target.device)
        what = why_unwritable(target)
        if what is not None:
            self.problems.append(f"{name!r} is to be loaded into a tensor that is {what}: make it one with memory of its own")
            return False
        mine = str(target.dtype).removeprefix("torch.")
        if (mine, tuple(target.shape)) == (dtype, tuple(shape)):
            return True
        self.problems.append(f"{name!r} is {dtype} {list(shape)} in the checkpoint, not {mine} {list(target.shape)}")
        return False

    def _read(self, name: str, like: torch.Tensor | None) -> Get:
        kind = self._index.arrays.get(name)
        if kind is not None:
            get = self._read_tensor(name, None)
            return lambda: as_array(get(), kind)
        return self._read_tensor(name, like)

    def _read_tensor(self, name: str, like: torch.Tensor | None) -> Get:
        entry = self.entry_of(name)
        if isinstance(entry, ValueEntry):
            return self.value(name) if like is None or entry.tensor is None else self._read_small(name, like, *entry.tensor)
        tensor, get = self._memory_like(like, entry.dtype, entry.shape)
        self.fill(tensor, entry)
        return get

    def _read_small(self, name: str, like: torch.Tensor, dtype: str, shape: Sequence[int]) -> Get:
        """Plan to read a tensor that is stored as a value."""
        value = self.value(name)
        tensor, get = self._memory_like(like, dtype, shape)
        self.devices.add(tensor.device)
        self.finish.append(lambda: fill_tensor(tensor, value(), name))
        return get

    def _memory_like(self, like: torch.Tensor | None, dtype_name: str, shape: Sequence[int]) -> tuple[torch.Tensor, Get]:
        """Return the tensor to read into, which is `like` if it can be, and a function that returns the restored tensor."""
        dtype = getattr(torch, dtype_name)
        if like is None or tuple(like.shape) != tuple(shape):
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        elif why_unwritable(like) is not None:
            tensor = torch.empty(shape, dtype=dtype, device="cpu" if like.is_meta else like.device)
        elif like.dtype != dtype:
            tensor = torch.empty_like(like, dtype=dtype)
        else:
            return self.memory.own(like)
        return tensor, lambda: tensor


def _names_of_ranks(node: Node) -> list[str]:
    return [node.names[rank] for rank in sorted(rank for rank in node.names if rank is not None)]


def tensors_in(value: Any, path: Path) -> dict[Path, torch.Tensor]:
    """Return the tensors in `value`, which is at `path`, by their paths; `LoadPlan.build` reads into tensors like them."""
    if isinstance(value, torch.Tensor):
        return {} if torch.nn.parameter.is_lazy(value) else {key_of(path): value.detach()}
    found: dict[Path, torch.Tensor] = {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            found.update(tensors_in(item, (*path, key)))
    if isinstance(value, list):
        for index, item in enumerate(value):
            found.update(tensors_in(item, (*path, [index])))
    return found


def step_of(key: Any) -> Step:
    """Return the step of a path for a node's key for its child."""
    return [key[0]] if isinstance(key, tuple) else key
