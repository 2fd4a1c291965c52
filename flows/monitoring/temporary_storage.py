"""Storages that end with a flow run: in the temporary directory that Prefect makes for it, or in its container."""

import re
from contextlib import suppress
from pathlib import Path

from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectNotFound
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.specs.location import is_block_slug
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.prefect_api.flow_run import current_flow_run, flow_runs_from, quick_client
from prefect_torch.tasks.prefect_api.outage import NO_ANSWER
from prefect_torch.tasks.prefect_api.work_pools import has_variable
from prefect_torch.tasks.run_logs import get_run_logger

# The directory that Prefect makes for a flow run: its process worker without the job variable working_dir, and in containers.
_OF_FLOW_RUN = re.compile(r"tmp\w{8}prefect|prefect-flow-run-\w+")
_RELATIVE = re.compile(r"(?!/|[A-Za-z][A-Za-z0-9+.-]+://)")


def warn_of_temporary_storage(run: Run, run_config: RunConfig) -> None:
    """Warn if the run is in the temporary directory of its flow run, or by a relative path in its container alone.

    A relative path in a mounted volume is none of these. Costs some requests, of which a missing answer only costs the warning,
    if the storage is a relative path.

    Args:
        run: The run.
        run_config: Its storage as its caller gave it.

    """
    if any(_OF_FLOW_RUN.fullmatch(part) for part in Path(run.path).parts):
        get_run_logger().warning(
            "%s is in a temporary directory, which Prefect deletes when this process ends: give RunConfig(storage=...) a URL "
            "or an absolute path, in containers that of a volume, or in a pool of processes the job variable working_dir",
            run.path,
        )
    elif has_relative_storage(run_config) and not is_mounted(run.path):
        with suppress(*NO_ANSWER, ObjectNotFound):
            pool = _pool_of_this()
            if pool is not None and (loss := lost_with_container(pool, run_config)) is not None:
                get_run_logger().warning("%s", loss)


def has_relative_storage(run: RunConfig) -> bool:
    """Return whether a run's storage is a path that means another directory in each working directory, or at each home."""
    return isinstance(run.storage, str) and not is_block_slug(run.storage) and _RELATIVE.match(run.storage) is not None


def lost_with_container(pool: WorkPool, run: RunConfig) -> str | None:
    """Return why the checkpoints of a flow run in `pool` would be lost with its container; None if they would not be."""
    if has_variable(pool, "working_dir") or not has_relative_storage(run):
        return None
    has_volumes = has_variable(pool, "volumes")
    others = ", a block, or the absolute path of a volume (job variable volumes)" if has_volumes else " or a block"
    return (
        f"storage {run.storage!r} is a directory of a container, which is lost with it: give RunConfig(storage=...) a "
        f"URL{others}"
    )


def is_mounted(path: str) -> bool:
    """Return whether a path, or what there is above it, is on another file system than the root directory, as a volume is."""
    found = next(it for it in (Path(path), *Path(path).parents) if it.exists())
    return found.stat().st_dev != Path("/").stat().st_dev


def _pool_of_this() -> WorkPool | None:
    """Return the work pool of the flow run in whose process this is called; None without one."""
    with quick_client() as client:
        names = (it.work_pool_name for it in flow_runs_from(client, current_flow_run()))
        name = next(filter(None, names), None)
        return None if name is None else client.read_work_pool(name)
