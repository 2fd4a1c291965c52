"""The named leaves of a state: the tensors and the plain values in its modules, optimizers and containers."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .index import DTYPE_BYTES, rank_name, rank_of
from .plan import Step, TensorShard
from .rank_local import RankLocal

_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and activation checkpointing
_PLAIN = {type(None), bool, int, float, str}
_USUAL = {torch.Tensor, torch.nn.Parameter}
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_BYTES if hasattr(torch, name)}
SMALL_BYTES = 64 * 2**10


@dataclass(slots=True)
class Leaf:
    """One tensor or plain value of a state.

    Attributes:
        name: Its path joined with dots, and "@rank<r>" where it is marked as this rank's own.
        path: Its path in the state.
        value: The tensor or plain value itself.
        of_model: Whether it belongs to a module or an optimizer, whose tensors are equal on all ranks or sharded.
        by_first: Whether rank 0's copy is stored.

    """

    name: str
    path: tuple[Step, ...]
    value: Any
    of_model: bool = False
    by_first: bool = False


def flatten(state: Mapping[str, Any], rank: int) -> tuple[list[Leaf], dict[str, Sequence[object]]]:
    """Return every leaf of `state`, and the parts of its modules and optimizers, unless these are marked as this rank's own.

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
    if len({leaf.name for leaf in walk.leaves}) < len(walk.leaves):
        twice = next(name for name, count in Counter(leaf.name for leaf in walk.leaves).items() if count > 1)
        raise ValueError(f"two things in the state are named {twice!r}: rename one")
    return walk.leaves, walk.parts


def check_is_dict(state: object) -> None:
    """Raise unless `state` is a dict of names.

    Raises:
        ValueError: If it is none.

    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be a dict of names, such as {{'model': model}}, not a {type(state).__name__}")  # noqa: TRY004 - one error for a bad state


def path_name(path: tuple[Step, ...]) -> str:
    """Return `path` joined with dots."""
    return ".".join(str(step[0] if isinstance(step, list) else step) for step in path)


def is_stateful(value: object) -> bool:
    """Return whether `value` keeps its state itself: a module, an optimizer, a scheduler, a loader."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def is_plain(value: object) -> bool:
    """Return whether `value` is stored as one value: it contains no tensor and no object with a state of its own."""
    if isinstance(value, (torch.Tensor, RankLocal)) or is_stateful(value):
        return False
    if isinstance(value, Mapping):
        return not value or (not _has_plain_keys(value) and all(is_plain(item) for item in value.values()))
    return not isinstance(value, list) or all(is_plain(item) and not isinstance(item, Mapping) for item in value)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DDP or torch.compile wraps."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        inner: torch.nn.Module = module.module
        return inner
    return getattr(module, "_orig_mod", None)


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers insert."""
    return _WRAPPERS.sub("", name)


class ParameterNames:
    """The names of all parameters of the modules in a state, which identify an optimizer's state on other ranks."""

    def __init__(self, state: Any) -> None:
        modules = dict(_modules(state, ()))
        self._names: dict[torch.Tensor, tuple[str, str]] = {}
        for prefix, module in modules.items():
            _reshard(module)
            for name, parameter in unwrap(module).named_parameters():
                self._names.setdefault(parameter, (prefix, clean_name(name)))

    def of(self, optimizer: torch.optim.Optimizer) -> list[str | int]:
        """Return the name of each of its parameters, in its own order; their numbers where a parameter has no name."""
        return _parameter_names(self.in_modules(optimizer))

    def in_modules(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, str] | None]:
        """Return the module and name of each parameter of an optimizer; None for a parameter in no module."""
        return [self._names.get(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(found: list[tuple[str, str] | None]) -> list[str | int]:
    known = [name for name in found if name is not None]
    if len(known) < len(found):
        return list(range(len(found)))
    if len({prefix for prefix, _ in known}) <= 1:
        return [name for _, name in known]
    return [f"{prefix}.{name}" for prefix, name in known]


def _reshard(module: torch.nn.Module) -> None:
    """Reshard a module, so that it has its optimizer's parameters: FSDP2 leaves gathered ones after a forward alone."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded: list[Any] = [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]
    for part in sharded:
        part.reshard()


def is_by_parameter(optimizer_state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state has the form of torch's own; that of a wrapper may not."""
    return {"state", "param_groups"} <= optimizer_state.keys()


def renamed_optimizer_state(state: Mapping[str, Any], names: list[Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with `names[i]` instead of each parameter's key i."""
    renamed: dict[str, Any] = {**state, "state": {_renamed(key, names): value for key, value in state["state"].items()}}
    renamed["param_groups"] = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return renamed


def _renamed(key: Any, names: list[Any]) -> Any:
    return names[key] if type(key) is int else key  # some optimizers keep a state that belongs to no parameter


def _modules(value: Any, path: tuple[Step, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path_name(path), value
    elif isinstance(value, RankLocal):
        yield from _modules(value.value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _modules(item, (*path, [place]))


@dataclass(slots=True)
class _At:
    """The current position of a walk."""

    name: str
    path: tuple[Step, ...]
    of_model: bool = False
    rank_local: bool = False

    def below(self, key: Step, step: Step) -> "_At":
        return _At(f"{self.name}.{key}", (*self.path, step), self.of_model, self.rank_local)


class _Walk:
    """Collects the leaves of a state."""

    def __init__(self, names: ParameterNames, rank: int) -> None:
        self.leaves: list[Leaf] = []
        self.parts: dict[str, Sequence[object]] = {}
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
        elif is_stateful(value):
            self.visit(value.state_dict(), at)
        elif is_plain(value):
            self._take(value, at)
        elif isinstance(value, Mapping):
            self._visit_items(value, at)
        else:
            for place, item in enumerate(value):
                self.visit(item, at.below(place, [place]))

    def _visit_items(self, value: Mapping[Any, Any], at: _At) -> None:
        for key, item in value.items():
            self.visit(item, at.below(_checked_key(key, at.path), key))

    def _visit_module(self, module: torch.nn.Module, at: _At) -> None:
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        parts: list[str] = []
        for key, value in module.state_dict().items():
            name = clean_name(key)
            parts.append(name)
            of_module = _At(f"{at.name}.{name}", (*at.path, name), of_model=True, rank_local=at.rank_local)
            if isinstance(value, torch.Tensor) or is_plain(value):
                self._take(value, of_module, by_first=key in buffers)
            elif isinstance(value, (Mapping, list)):  # from get_extra_state()
                self.visit(value, of_module)
            else:
                kind = type(value).__name__
                raise ValueError(f"{of_module.name!r} in the module's state_dict() is a {kind}, neither a tensor nor plain")
        if not at.rank_local:
            self.parts[at.name] = parts

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer, at: _At) -> None:
        found = self._names.in_modules(optimizer)
        if not at.rank_local:
            self.parts[at.name] = found
        state = optimizer.state_dict()
        named = renamed_optimizer_state(state, _parameter_names(found)) if is_by_parameter(state) else state
        self.visit(named, replace(at, of_model=True))

    def _take(self, value: Any, at: _At, *, by_first: bool = False) -> None:
        if "@rank" in at.name and rank_of(at.name) is not None:
            raise ValueError(f"the name {at.name!r} ends like one of a rank's own values: rename it")
        name = rank_name(at.name, self._rank) if at.rank_local else at.name
        if isinstance(value, torch.Tensor):
            _check_tensor(name, value)
            if value.requires_grad:
                value = value.detach()
            if type(value) not in _USUAL and not is_dtensor(value):
                value = value.as_subclass(torch.Tensor)  # the additions of the class could not be read back
        self.leaves.append(Leaf(name, at.path, value, at.of_model, by_first))


def _has_plain_keys(value: Mapping[Any, Any]) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _checked_key(key: object, path: tuple[Step, ...]) -> Step:
    if type(key) in (str, int) and key != "":
        return key  # type: ignore[return-value]  # mypy does not narrow on `type(x) in`
    raise ValueError(f"the key {key!r} under {path_name(path) or 'the top level'!r} must be a string or an int, and not empty")


def _check_tensor(name: str, value: torch.Tensor) -> None:
    is_usual = type(value) in _USUAL and value.dtype in _DTYPE_NAMES and value.layout is torch.strided
    if is_usual and not (value.is_quantized or value.is_meta or value.is_nested):
        return
    if (what := _why_unstorable(value)) is not None:
        raise ValueError(f"the tensor {name!r} is {what}, which cannot be stored: make it a dense tensor")
    if _has_own_operations(value) and not is_dtensor(value):
        raise ValueError(f"the tensor {name!r} is a {type(value).__name__}, which wraps others: store those, by a state_dict")
    if value.dtype not in _DTYPE_NAMES:
        raise ValueError(f"the tensor {name!r} is {value.dtype}, which cannot be stored: view it as uint8")


def _has_own_operations(value: torch.Tensor) -> bool:
    """Return whether a tensor's class replaces torch's operations: such a class usually wraps tensors and has no other data."""
    return next(kind for kind in type(value).__mro__ if "__torch_dispatch__" in vars(kind)) is not torch.Tensor


def _why_unstorable(value: torch.Tensor) -> str | None:
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
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(value: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return the offsets of this rank's part of `value` and the part, sharing its memory; None where it has none.

    Raises:
        ValueError: If a DTensor's parts are partial sums, still to be reduced.

    """
    if not is_dtensor(value):
        return (0,) * value.dim(), value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - for DTensors only

    if any(placement.is_partial() for placement in value.placements):  # type: ignore[attr-defined]
        raise ValueError(f"a DTensor with placements {value.placements} holds no values yet: redistribute it")  # type: ignore[attr-defined]
    local: torch.Tensor = value.to_local()  # type: ignore[attr-defined]
    if value.device_mesh.get_coordinate() is None or (local.numel() == 0 and value.numel() > 0):  # type: ignore[attr-defined]
        return None
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)  # type: ignore[attr-defined]
    assert tuple(shape) == tuple(local.shape)
    return tuple(offsets), local


def is_unowned(leaf: Leaf) -> bool:
    """Return whether ranks may have different tensors there: no module, optimizer or DTensor keeps them equal or sharded."""
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
        part = local_part(value)
        if part is None:
            return None
        offsets, local = part
        dtype, shape, sizes = _DTYPE_NAMES[local.dtype], value.shape, local.shape
        described = (leaf.path, dtype, shape, offsets, sizes, leaf.by_first)
        if known is None or (known.path, known.dtype, known.shape, known.offsets, known.sizes, known.by_first) != described:
            known = TensorShard(
                leaf.name, leaf.path, dtype, local.element_size(), tuple(shape), offsets, tuple(sizes), leaf.by_first
            )
            self._known[leaf.name] = known
        return known, local
