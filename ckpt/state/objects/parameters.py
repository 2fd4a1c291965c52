"""The names of modules' parameters, by which an optimizer's state is known on other ranks and after a resume."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from prefect_torch.ckpt.state.plan import Step, path_name
from prefect_torch.ckpt.state.rank_local import RankLocal

from .tensors import place_of

_FORMER_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and activation checkpointing
_WRAPPERS = re.compile(rf"(?:^|(?<=\.)){_FORMER_WRAPPERS.pattern}")  # not at the end of another name


class ParameterNames:
    """The names of all parameters of the modules in a state, which identify an optimizer's state on other ranks.

    Args:
        state: The state.
        former: Whether names are those that former versions stored.

    Attributes:
        modules: The modules, without their outermost wrappers.

    """

    def __init__(self, state: Any, *, former: bool = False) -> None:
        self.modules: list[torch.nn.Module] = []
        self._former = former
        self._names: dict[torch.Tensor, tuple[str, str]] = {}
        for prefix, module in _modules(state, ()):
            _reshard(module)
            self.modules.append(unwrap(module))
            parameters = dict(self.modules[-1].named_parameters())
            names = clean_names(self.modules[-1], parameters, former=former)
            for name, parameter in parameters.items():
                self._names.setdefault(parameter, (prefix, names[name]))

    def of(self, optimizer: torch.optim.Optimizer) -> list[str | int]:
        """Return the names of an optimizer's parameters, in its own order, and the numbers of those in no module."""
        found = self.in_modules(optimizer)
        return _numbers(found) if self._former and None in found else joined_names(found)

    def in_modules(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, str] | None]:
        """Return the module and name of each parameter of an optimizer; None for a parameter in no module."""
        return [self._names.get(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def joined_names(found: list[tuple[str, str] | None]) -> list[str | int]:
    """Return a name for each parameter, after its module's if there are several modules; its number if it is in no module."""
    is_one = len({known[0] for known in found if known is not None}) <= 1
    names = [number if it is None else it[1] if is_one else ".".join(it) for number, it in enumerate(found)]
    return names if len({*map(str, names)}) == len(names) else _numbers(found)


def _numbers(found: Sequence[object]) -> list[str | int]:
    return list(range(len(found)))


def _reshard(module: torch.nn.Module) -> None:
    """Reshard a module, so that it has its optimizer's parameters: after a forward alone, FSDP2 leaves them gathered."""
    for part in _parts(module, "FSDPModule"):
        part.reshard()


def fsdp_classes(*names: str) -> tuple[type, ...]:
    """Return these classes of `torch.distributed.fsdp`, without an import: none while no module can be of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))  # it has none yet while a thread imports it


def _parts(module: torch.nn.Module, kind: str) -> list[Any]:
    kinds = fsdp_classes(kind)
    return [part for part in module.modules() if isinstance(part, kinds)]


def check_not_flat(module: torch.nn.Module, name: str) -> None:
    """Raise if FullyShardedDataParallel shards a part of `module`: each rank has other data under the same names.

    Raises:
        ValueError: If it does.

    """
    if any(part.sharding_strategy.name != "NO_SHARD" for part in _parts(module, "FullyShardedDataParallel")):
        raise ValueError(_flat(name, "is sharded by FullyShardedDataParallel"))


def check_has_no_flat(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise if `optimizer` has parts of the flat parameters of FullyShardedDataParallel, which differ on each rank.

    Raises:
        ValueError: If it does.

    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        whole: torch.Size | None = getattr(parameter, "_unpadded_unsharded_size", None)
        if whole is not None and whole.numel() > parameter.numel():
            raise ValueError(_flat(name, "has parts of the flat parameters of FullyShardedDataParallel"))


def _flat(name: str, what: str) -> str:
    return (
        f"{name!r} in the state {what}, whose tensors do not say which part of the whole each rank has: shard by FSDP2 "
        "(fully_shard), or report a directory that torch.distributed.checkpoint wrote"
    )


def is_by_parameter(optimizer_state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state numbers its parameters as torch's own optimizers do; a wrapper's may name them."""
    if not {"state", "param_groups"} <= optimizer_state.keys():
        return False
    return all(type(number) is int for group in optimizer_state["param_groups"] for number in group["params"])


def renamed_optimizer_state(state: Mapping[str, Any], names: list[Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with `names[i]` instead of each parameter's key i."""
    renamed: dict[str, Any] = {**state, "state": {_renamed(key, names): value for key, value in state["state"].items()}}
    renamed["param_groups"] = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return renamed


def _renamed(key: Any, names: list[Any]) -> Any:
    return names[key] if type(key) is int else key  # some optimizers keep a state that belongs to no parameter


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DDP or torch.compile wraps."""
    inner = uncompiled(module)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        inner = inner.module
    return module if inner is module else unwrap(inner)


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile wraps, and any other itself: a user's may pass on the name of what is wrapped."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # it is imported where anything is compiled
    kind: Any = getattr(dynamo, "OptimizedModule", ())  # none yet while a thread imports it
    compiled: Any = module
    inner: torch.nn.Module = compiled._orig_mod if isinstance(module, kind) else module  # noqa: SLF001 - it has no other name
    return inner


def clean_names(module: torch.nn.Module, names: Iterable[str], *, former: bool = False) -> dict[str, str]:
    """Return the `names` in `module`, each with its clean name: without the parts that wrappers insert at any depth.

    Args:
        module: The module, without its outermost wrappers.
        names: The names in it.
        former: Whether to return the names that former versions stored, with the parts that DDP inserts.

    """
    wrappers = _FORMER_WRAPPERS if former else _WRAPPERS
    cleaned = {name: wrappers.sub("", name) for name in names}
    if former or not any("module." in name for name in cleaned.values()):  # usual: no search of the module's parts
        return cleaned
    for inner, outer in _prefixes_of_ddp(module):
        for name, clean in cleaned.items():
            if clean.startswith(inner):
                cleaned[name] = outer + clean.removeprefix(inner)
    return cleaned


def is_extra_state(key: str) -> bool:
    """Return whether a key of a module's `state_dict()` is of what a `get_extra_state()` returned."""
    return f".{key}".endswith("._extra_state")


def keys_of(tensors: Mapping[str, torch.Tensor], module: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the keys in `state`, a module's `state_dict()`, of some of its tensors, by name.

    Wrappers and hooks may give other keys there than the names in the module; what has such a key is known by its memory.
    """
    same = tensors.keys() & state.keys()
    if len(same) == len(tensors):  # usual
        return same
    renamed = state.keys() - tensors.keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    places = {place_of(tensor) for tensor in tensors.values()} if renamed else set()
    return same | {key for key in renamed if isinstance(state[key], torch.Tensor) and place_of(state[key]) in places}


def own_keys(module: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the keys in `state`, a module's `state_dict()`, of its parameters and buffers, and of what lies in their memory.

    What a module adds to its `state_dict()` beside these, such as the counts of torchmetrics, nothing makes equal on all ranks.
    """
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    added = state.keys() - tensors.keys()
    storages = {place_of(tensor).storage for tensor in tensors.values()} if added else set()
    in_memory = {key for key in added if isinstance(state[key], torch.Tensor) and place_of(state[key]).storage in storages}
    return (state.keys() - added) | in_memory


def _prefixes_of_ddp(module: torch.nn.Module) -> list[tuple[str, str]]:
    """Return the prefixes of the names that DDP wraps within `module`, with and without DDP's part; the inner ones first."""
    parts = module.named_modules(remove_duplicate=False)
    found = {_WRAPPERS.sub("", name) for name, part in parts if isinstance(part, torch.nn.parallel.DistributedDataParallel)}
    return [(f"{name}.module.", f"{name}.") for name in sorted(found, key=len, reverse=True)]


def _modules(value: Any, path: tuple[Step, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path_name(path), value
    elif isinstance(value, RankLocal):
        yield from _modules(value.value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _modules(item, (*path, [index]))
