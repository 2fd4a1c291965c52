"""Random states of the ranks beside a Lightning checkpoint, which contains none."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefect_torch.ckpt.state.random_state import ProcessGenerators


def save_random_state(folder: Path, rank: int, *, within_epoch: bool) -> None:
    """Write the states of Python's, NumPy's, torch's and the current GPU's generators to a file of this rank in `folder`.

    Args:
        folder: The directory of the checkpoint.
        rank: This rank.
        within_epoch: Whether batches of the epoch are still to come.

    """
    states = ProcessGenerators().state_dict()
    # torch.load refuses arrays where only weights may be read
    states["numpy"] = _mapped(states["numpy"], np.ndarray, torch.from_numpy)
    torch.save({"within_epoch": within_epoch, **states}, _file(folder, rank))


def read_random_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the state that `save_random_state` wrote; None where it wrote nothing."""
    path = _file(folder, rank)
    state: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set this process's generators to `state`, except for those that this machine does not have."""
    ProcessGenerators().load_state_dict({**state, "numpy": _mapped(state["numpy"], torch.Tensor, torch.Tensor.numpy)})


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `value`, a tuple (version 0.1) or nested dict, with the values of a kind changed."""
    if isinstance(value, Mapping):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(each, kind, change) for each in value)
    return change(value) if isinstance(value, kind) else value


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rng_state_{rank}.pth"  # this name makes it the rank's own; Transformers' Trainer uses the same
