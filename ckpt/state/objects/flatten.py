"""The named leaves of a state: the tensors and the plain values in its modules, optimizers and containers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from prefect_torch.ckpt.state.index import ArrayKind, rank_name, rank_of
from prefect_torch.ckpt.state.key_order import KeyOrder
from prefect_torch.ckpt.state.plan import Step, TensorShard, path_name
from prefect_torch.ckpt.state.random_state import generator_state, is_generator
from prefect_torch.ckpt.state.rank_local import RankLocal

from .arrays import array_kind, tensor_of
from .parameters import (
    ParameterNames,
    check_has_no_flat,
    check_not_flat,
    clean_names,
    is_by_parameter,
    joined_names,
    keys_of,
    own_keys,
    renamed_optimizer_state,
    unwrap,
)
from .tensors import DTYPE_NAMES, has_own_operations, is_dtensor, local_part, storable, what_wraps

_PLAIN = {type(None), bool, int, float, str}
SMALL_BYTES = 64 * 2**10


@dataclass(slots=True)
class Leaf:
    """One tensor or plain value of a state.

    Attributes:
        name: Its path joined with dots, and "@rank<r>" where it is marked as this rank's own.
        path: Its path in the state.
        value: The tensor or plain value itself; for an array, a scalar or a list of scalars of NumPy, a tensor of its values.
        of_model: Whether it belongs to a module or an optimizer, whose tensors are equal on all ranks or sharded.
        by_first: Whether rank 0's copy is stored.
        array: Whether it is a NumPy array, a scalar or a list of scalars; None if it is none.

    """

    name: str
    path: tuple[Step, ...]
    value: Any
    of_model: bool = False
    by_first: bool = False
    array: ArrayKind | None = None

    @property
    def form(self) -> str:
        """What its name leaves open, "" for nothing: a list's index or a dict's key, a key with a dot, a NumPy array."""
        is_plain = self.array is None and len(self.path) == self.name.count(".") + 1
        return "" if is_plain and all(type(step) is str for step in self.path) else f"{self.array}{self.path}"


@dataclass(slots=True)
class Flattened:
    """All that a state consists of.

    Attributes:
        leaves: Its tensors and plain values.
        parts: The parts of its modules and optimizers, unless these are marked as this rank's own.
        orders: The order of the keys in its dicts.
        epochs: The epochs of loaders that share one order among the ranks, unless these are marked as this rank's own.

    """

    leaves: list[Leaf] = field(default_factory=list)
    parts: dict[str, Sequence[object]] = field(default_factory=dict)
    orders: list[KeyOrder] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)


def flatten(state: Mapping[str, Any], rank: int) -> Flattened:
    """Return every leaf of `state`, with the parts of its modules and optimizers and the order of its dicts.

    Leaves are named as torch.distributed.checkpoint names them. Copies nothing.

    Costs a few microseconds a leaf, for which the training waits.

    Raises:
        ValueError: If a leaf has no name, two leaves share one, or a tensor cannot be stored.

    """
    check_is_dict(state)
    try:
        walk = _Walk(ParameterNames(state), rank)
        for key, value in state.items():
            walk.visit(value, _At(str(_checked_key(key, ())), (key,)))
    except RecursionError as exc:
        raise ValueError("the state holds itself, or is nested too deeply to be stored") from exc
    leaves = walk.found.leaves
    if len({leaf.name for leaf in leaves}) < len(leaves):
        twice = next(name for name, count in Counter(leaf.name for leaf in leaves).items() if count > 1)
        raise ValueError(f"two things in the state are named {twice!r}: rename one")
    return walk.found


def check_is_dict(state: object) -> None:
    """Raise unless `state` is a dict of names.

    Raises:
        ValueError: If it is none.

    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be a dict of names, such as {{'model': model}}, not a {type(state).__name__}")  # noqa: TRY004 - one error for a bad state


def is_stateful(value: object) -> bool:
    """Return whether `value` keeps its state itself: a module, an optimizer, a scheduler, a loader."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def is_plain(value: object) -> bool:
    """Return whether `value` is stored as one value: it contains no tensor, array or object with a state of its own."""
    if isinstance(value, (torch.Tensor, RankLocal)) or is_stateful(value) or array_kind(value) is not None:
        return False
    if isinstance(value, Mapping):
        if not value or _has_plain_keys(value):
            return not value
        is_named = all(type(key) in (str, int) for key in value)
        return all(map(is_plain if is_named else _holds_only_plain, value.values()))
    return not isinstance(value, list) or all(is_plain(item) and not isinstance(item, Mapping) for item in value)


@dataclass(slots=True)
class _At:
    """The current position of a walk."""

    name: str
    path: tuple[Step, ...]
    of_model: bool = False
    rank_local: bool = False
    of_object: bool = False  # in the state of an object, which gets it back as it is stored

    def below(self, key: Step, step: Step) -> "_At":
        return _At(f"{self.name}.{key}", (*self.path, step), self.of_model, self.rank_local, self.of_object)


class _Walk:
    """Collects the leaves of a state."""

    def __init__(self, names: ParameterNames, rank: int) -> None:
        self.found = Flattened()
        self._names = names
        self._rank = rank

    def visit(self, value: Any, at: _At) -> None:
        """Collect the leaves in `value`, whose position is `at`."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, torch.Tensor):
            self._take(value, at)
        elif kind is dict and not is_plain(value):  # before the checks for objects: most values are dicts
            self._visit_items(value, at)
        elif isinstance(value, torch.nn.Module):
            self._visit_module(unwrap(value), at)
        elif isinstance(value, torch.optim.Optimizer):
            self._visit_optimizer(value, at)
        elif isinstance(value, RankLocal):
            self.visit(value.value, replace(at, rank_local=True))
        elif is_stateful(value) or (not (at.of_model or at.of_object) and is_generator(value)):
            self._visit_object(value, at)
        elif is_plain(value) or array_kind(value) is not None:
            self._take(value, at)
        elif isinstance(value, Mapping):
            self._visit_items(value, at)
        else:
            for index, item in enumerate(value):
                self.visit(item, at.below(index, [index]))

    def _visit_items(self, value: Mapping[Any, Any], at: _At) -> None:
        if len(value) > 1:
            self.found.orders.append(KeyOrder(at.path, tuple(value)))
        for key, item in value.items():
            self.visit(item, at.below(_checked_key(key, at.path), key))

    def _visit_object(self, value: Any, at: _At) -> None:
        state = value.state_dict() if is_stateful(value) else generator_state(value)
        if getattr(type(value), "has_epoch_of_all_ranks", False) and not at.rank_local:  # others may have any __getattr__
            self.found.epochs[at.name] = value.epoch
        self.visit(state, replace(at, of_object=True))

    def _visit_module(self, module: torch.nn.Module, at: _At) -> None:
        if not at.rank_local:
            check_not_flat(module, at.name)
        state = module.state_dict()
        buffers = keys_of(dict(module.named_buffers(remove_duplicate=False)), module, state)
        names, own = clean_names(module, state), own_keys(module, state)
        for key, value in state.items():
            name = names[key]
            is_added = key not in own
            of_module = _At(f"{at.name}.{name}", (*at.path, name), not is_added, at.rank_local, of_object=is_added)
            if isinstance(value, torch.Tensor) or is_plain(value) or array_kind(value) is not None:
                self._take(value, of_module, by_first=key in buffers)
            elif isinstance(value, (Mapping, list)):  # from get_extra_state(), or a metric's batches
                self.visit(value, of_module)
            else:
                kind = type(value).__name__
                raise ValueError(f"{of_module.name!r} in the module's state_dict() is a {kind}, neither a tensor nor plain")
        if not state:  # such as a loss or a metric: a load must find it
            self._take({}, at)
        if not at.rank_local:
            self.found.parts[at.name] = [*names.values()]

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer, at: _At) -> None:
        found = self._names.in_modules(optimizer)
        if not at.rank_local:
            check_has_no_flat(optimizer, at.name)
            self.found.parts[at.name] = found
        state, of_model, known = optimizer.state_dict(), replace(at, of_model=True), len(self.found.orders)
        if is_by_parameter(state):
            self.visit(renamed_optimizer_state(state, joined_names(found)), of_model)
            del self.found.orders[known:]  # it is loaded by the names of its parameters, in any order
        else:
            self.visit(state, of_model)

    def _take(self, value: Any, at: _At, *, by_first: bool = False) -> None:
        if "@rank" in at.name and rank_of(at.name) is not None:
            raise ValueError(f"the name {at.name!r} ends like one of a rank's own values: rename it")
        name = rank_name(at.name, self._rank) if at.rank_local else at.name
        array = None
        if isinstance(value, torch.Tensor):
            value = storable(name, value)
        elif type(value) not in _PLAIN and (array := array_kind(value)) is not None:
            value = tensor_of(value, name)
        self.found.leaves.append(Leaf(name, at.path, value, at.of_model, by_first, array))


def _holds_only_plain(value: object) -> bool:
    """Return whether nothing in `value` would have a name of its own but items of dicts and lists."""
    if isinstance(value, (Mapping, list)):
        return all(map(_holds_only_plain, value.values() if isinstance(value, Mapping) else value))
    return is_plain(value)


def _has_plain_keys(value: Mapping[Any, Any]) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _checked_key(key: object, path: tuple[Step, ...]) -> Step:
    if type(key) in (str, int) and key != "":
        return key  # type: ignore[return-value]  # mypy does not narrow on `type(x) in`
    raise ValueError(f"the key {key!r} under {path_name(path) or 'the top level'!r} must be a string or an int, and not empty")


def is_unowned(leaf: Leaf) -> bool:
    """Return whether a leaf's tensors may differ between ranks: no module, optimizer or DTensor keeps them equal or sharded."""
    return not leaf.of_model and not is_dtensor(leaf.value)


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether an unowned tensor is stored like a plain value."""
    return tensor.numel() * tensor.element_size() < SMALL_BYTES


class Describer:
    """The descriptions of a rank's tensor shards; those that do not change are kept from report to report."""

    def __init__(self) -> None:
        self._known: dict[str, TensorShard] = {}

    def describe(self, leaf: Leaf) -> tuple[TensorShard, torch.Tensor] | None:
        """Return the description of this rank's part of a tensor leaf and its memory; None where this rank has none."""
        value, known = leaf.value, self._known.get(leaf.name)
        try:
            part = local_part(value)
        except ValueError as exc:
            raise ValueError(f"{leaf.name!r} in the state is {exc}: redistribute it") from exc
        if part is None:
            return None
        offsets, local = part
        if type(local) is not torch.Tensor and has_own_operations(local):
            raise ValueError(
                f"{leaf.name!r} in the state is a DTensor whose part on a rank is {what_wraps(local)}: report a directory that "
                "torch.distributed.checkpoint wrote"
            )
        dtype, shape, sizes = DTYPE_NAMES[local.dtype], value.shape, local.shape
        described = (leaf.path, dtype, shape, offsets, sizes, leaf.by_first)
        if known is None or (known.path, known.dtype, known.shape, known.offsets, known.sizes, known.by_first) != described:
            known = TensorShard(
                leaf.name, leaf.path, dtype, local.element_size(), tuple(shape), offsets, tuple(sizes), leaf.by_first
            )
            self._known[leaf.name] = known
        return known, local
