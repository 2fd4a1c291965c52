"""Random states of the ranks beside a Lightning checkpoint, which contains none.

Part of `prefect_torch.ckpt.lightning.callback`.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_random_state(folder: Path, rank: int, *, within_epoch: bool) -> None:
    """Write the states of Python's, NumPy's, torch's and the current GPU's generators to a file of this rank in `folder`.

    Args:
        folder: The directory of the checkpoint.
        rank: This rank.
        within_epoch: Whether batches of the epoch are still to come.

    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the process's own
    state = {
        "within_epoch": within_epoch,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]  # torch's
    }
    torch.save(state, _file(folder, rank))


def read_random_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the state that `save_random_state` wrote; None where it wrote nothing."""
    path = _file(folder, rank)
    state: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set this process's generators to `state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy(), position, has_gauss, gauss))  # noqa: NPY002 - the process's own
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rng_state_{rank}.pth"  # this name makes it the rank's own; Transformers' Trainer uses the same
