"""Random states of the ranks beside a Lightning checkpoint, which contains none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from prefect_torch.ckpt.state.random_state import ProcessGenerators

from .resumes import training_loaders


def save_random_state(folder: Path, rank: int, generators: Sequence[torch.Generator], *, within_epoch: bool) -> None:
    """Write the states of Python's, NumPy's, torch's and the current GPU's generators to a file of this rank in `folder`.

    Args:
        folder: The directory of the checkpoint.
        rank: This rank.
        generators: Those of the dataloaders, whose states are written, too.
        within_epoch: Whether batches of the epoch are still to come.

    """
    states = ProcessGenerators().state_dict()
    # torch.load refuses arrays where only weights may be read
    states["numpy"] = _mapped(states["numpy"], np.ndarray, torch.from_numpy)
    of_loaders = [generator.get_state() for generator in generators]
    torch.save({"within_epoch": within_epoch, "of_loaders": of_loaders, **states}, _file(folder, rank))


def read_random_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the state that `save_random_state` wrote; None where it wrote nothing."""
    path = _file(folder, rank)
    state: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
    return state


def set_random_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Set this process's generators, except for those that this machine does not have, and the dataloaders' `generators`."""
    for generator, saved in zip(generators, state.get("of_loaders", ()), strict=False):  # a program may have got other loaders
        generator.set_state(saved)
    ProcessGenerators().load_state_dict({**state, "numpy": _mapped(state["numpy"], torch.Tensor, torch.Tensor.numpy)})


def loader_generators(trainer: Trainer) -> list[torch.Generator]:
    """Return the generators that the training's dataloaders and their samplers have been given, each once, in a fixed order."""
    found = {id(generator): generator for loader in training_loaders(trainer) for generator in _generators(loader)}
    return list(found.values())


def _generators(owner: object) -> Iterator[torch.Generator]:
    if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
        yield generator
    wrapped = getattr(getattr(owner, "dataset", None), "_sampler", None)  # a sampler of which Lightning gives each rank a share
    for part in (getattr(owner, "batch_sampler", None), getattr(owner, "sampler", None), wrapped):
        if part is not None:
            yield from _generators(part)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `value`, a tuple (version 0.1) or nested dict, with the values of a kind changed."""
    if isinstance(value, Mapping):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(each, kind, change) for each in value)
    return change(value) if isinstance(value, kind) else value


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rng_state_{rank}.pth"  # this name makes it the rank's own; Transformers' Trainer uses the same
