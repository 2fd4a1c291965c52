"""The directory in which the flow runs of a deployment begin."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.runner.storage import LocalStorage
from prefect_torch.tasks.prefect_api.work_pools import default_of, has_variable

_STAYING = ("run_shell_script", "pip_install_requirements")  # Prefect's steps that leave the directory as it is


class _Here(LocalStorage):
    """Code that lies where a job begins: the pull step names no directory of the machine that deploys."""

    @property
    def destination(self) -> Path:
        return Path()


def begin_in_place(deployment: RunnerDeployment, pool: WorkPool) -> None:
    """Let flow runs begin where their containers do; in a pool of processes, the job variable `working_dir` says where.

    Without a pull step, Prefect first copies all that is in that directory, mounted volumes as well, to a temporary one.
    """
    if not has_variable(pool, "working_dir"):
        deployment.storage = _Here(".")


def run_directory(deployment: DeploymentResponse, pool: WorkPool) -> Path | None:
    """Return where the flow runs of a pool of processes begin, on the worker's machine; None if in one that each makes itself.

    It makes one for what it clones or downloads, and where no directory is named at all.
    """
    named = (deployment.job_variables or {}).get("working_dir") or default_of(pool, "working_dir")
    directory = Path(named) if named else None
    for step in deployment.pull_steps or ():
        for name, inputs in step.items():
            directory = _after(directory, name, inputs or {})
    return directory


def _after(directory: Path | None, step: str, inputs: Mapping[str, Any]) -> Path | None:
    kind = step.rpartition(".")[2]
    if kind == "set_working_directory":
        named = Path(inputs.get("directory", ""))
        return named if directory is None and named.is_absolute() else directory and directory / named
    return directory if kind in _STAYING else None


def is_here(directory: Path | None) -> bool:
    """Return whether this machine has `directory`, and this process can work in it."""
    return directory is not None and directory.is_absolute() and os.access(f"{directory}/", os.X_OK)


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """Have `directory` as the working directory of this process in the body."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
