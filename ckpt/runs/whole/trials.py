"""A sweep and its trials, each of which is a run of its own."""

from dataclasses import replace
from typing import TypeVar

from prefect_torch.ckpt.runs.layout import is_run_name
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.sizes import find_size

RunT = TypeVar("RunT", bound=Run)


def is_sweep(run: Run) -> bool:
    """Return whether a run is a sweep, whose trials are runs of their own; one request."""
    return find_size(run.storage, run.layout.sweep) is not None


def trials_of(sweep: RunT) -> list[RunT]:
    """Return the runs of a sweep's trials, by name; one listing."""
    names = (f"{sweep.name}/{name}" for name in sorted(set(sweep.storage.folders(f"{sweep.name}/"))))
    return [replace(sweep.beside(name), memory=ManifestMemory()) for name in names if is_run_name(name)]


def pin_token_of(trial: str) -> str:
    """Return the token of the pin by which the checkpoint that a trial begins from is kept.

    Args:
        trial: The name of the trial's run, which ends with eight hexadecimal digits.

    """
    return trial[-8:]
