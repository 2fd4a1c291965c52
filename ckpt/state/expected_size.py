"""An estimate of the bytes of a state that this rank will stage, made before its first report."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from prefect_torch.ckpt.context import rank_and_world_size
from prefect_torch.ckpt.state.staging import spare_memory
from torch.optim.optimizer import register_optimizer_step_post_hook

from .index import StateIndex, rank_of
from .plan import LEAST_SPLIT_BYTES

_BYTES_OF_A_CHUNK = 2048  # its archive's header and footer, and the alignment

_lock = threading.Lock()
_modules: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def expected_bytes(sizes: Iterable[int], world_size: int) -> int:
    """Return an estimate, rather too high than too low, of the bytes that each rank stages of tensors of these sizes.

    Args:
        sizes: The sizes of the whole tensors, each of which is stored once.
        world_size: The number of ranks that share them.

    """
    found = list(sizes)
    slack = LEAST_SPLIT_BYTES if world_size > 1 else 0  # smaller tensors are not split, so one rank may have this much more
    return sum(found) // world_size + len(found) * _BYTES_OF_A_CHUNK + slack


def prepare_for_loaded(index: StateIndex, rank: int, world_size: int) -> None:
    """Prepare memory for a state like the stored one, of which this rank has loaded at least a part.

    A part may be all that the training needs of it, as of a model that is only used. So this takes at most half of the memory
    that `watch_steps` was given.
    """
    whole = [_bytes_of(entry) for name, entry in index.tensors.items() if rank_of(name) is None]
    own = [_bytes_of(entry) for name, entry in index.tensors.items() if rank_of(name) == rank]
    size = expected_bytes(whole, world_size) + expected_bytes(own, 1)
    if spare_memory.available_bytes is None or size <= spare_memory.available_bytes() // 2:
        spare_memory.prepare(size)


def note_module(module: torch.nn.Module) -> None:
    """Expect the parameters and buffers of `module` in a state."""
    with _lock:
        _modules.add(module)


def watch_steps(available_bytes: Callable[[], int]) -> None:
    """Prepare memory once an optimizer of this process has stepped twice: by then all optimizers have their tensors.

    Unlike a load, a step does not show that the training reports states at all, so this takes at most a quarter of the
    available memory.

    Args:
        available_bytes: Returns how much memory this rank can take.

    """
    spare_memory.available_bytes = available_bytes
    stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    is_over = False

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal is_over
        if is_over or torch.compiler.is_compiling():  # a compiler would take the hook for a part of the step
            return
        if optimizer not in stepped:
            stepped.add(optimizer)
            return
        is_over = True
        size = expected_bytes(_sizes([*stepped]), rank_and_world_size()[1])
        if size <= available_bytes() // 4:
            spare_memory.prepare(size)

    register_optimizer_step_post_hook(after_step)


def _sizes(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[int]:
    with _lock:
        modules = [*_modules]
    tensors = [tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)]
    tensors += [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    known = [tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]  # a part that no step has run yet
    yield from ({id(tensor): tensor.numel() * tensor.element_size() for tensor in known}).values()


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in _values(state) if isinstance(value, torch.Tensor))


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _bytes_of(entry: Any) -> int:
    return int(torch.Size(entry.shape).numel()) * int(entry.item_bytes)
