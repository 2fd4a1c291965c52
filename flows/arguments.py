"""The meaning of a flow's arguments: the checkpoint that they name, GPUs and machines for the ranks, what is restarted."""

import secrets
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from prefect_torch.ckpt import Checkpoint, StorageSpec
from prefect_torch.ckpt.checkpoint import split_path
from prefect_torch.ckpt.runs.layout import check_run_name, is_run_name
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.storage.opening import parse_storage
from prefect_torch.ckpt.storage.specs.location import canonical, refuse_password
from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.monitoring.restarted import CallTry, EarlierTries, restarted_before
from prefect_torch.flows.run_names import digest_of
from prefect_torch.tasks import RunConfig, ScalingConfig
from prefect_torch.tasks.gang.engines.cluster_block import load_cluster
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.gpus.listing import Gpu
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.prefect_api.flow_run import flow_runs_from
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef

_PROCESS = secrets.token_hex(4)  # a flow that is suspended goes on in another process, and Prefect counts no other run


def gpus_for(scaling: ScalingConfig, pool: list[Gpu] | None = None) -> GpuAllocation:
    """Return the GPUs that ranks need, without taking them yet.

    Args:
        scaling: The ranks.
        pool: The GPUs of this machine; None to list them, which takes seconds.

    Raises:
        ValueError: If this machine has fewer GPUs than ranks, or `regrow_after_s` is given without a cluster.

    """
    gpus = gpus_of(scaling, f"flow run {flow_run.name}", scaling.wait_for_gpus_s, pool)
    gpus.check()
    return gpus


def gpus_of(scaling: ScalingConfig, owner: str, wait_s: float | None, pool: list[Gpu] | None = None) -> GpuAllocation:
    """Return the GPUs that ranks need of this machine, none with a cluster.

    Args:
        scaling: The ranks.
        owner: As for a GpuAllocation.
        wait_s: As for a GpuAllocation.
        pool: As for a GpuAllocation.

    Raises:
        ValueError: If `regrow_after_s` is given without a cluster.

    """
    if scaling.cluster is None and scaling.regrow_after_s is not None:
        raise ValueError(
            f"regrow_after_s={scaling.regrow_after_s:g} asks a cluster for more machines, and there is none: give "
            "ScalingConfig(cluster=...), or leave it out; on this machine, each attempt takes the GPUs that are free"
        )
    if not scaling.use_gpu or scaling.cluster is not None:
        return GpuAllocation(0, wait_s, owner)
    return GpuAllocation(scaling.most_workers, wait_s, owner, pool, fewest=scaling.fewest_workers)


def show_ranks(scaling: ScalingConfig) -> str:
    """Return the number of ranks, or the range of it, as text."""
    fewest, most = scaling.fewest_workers, scaling.most_workers
    return show_count(most, "rank") if fewest == most else f"{fewest} to {most} ranks"


def machines_for(scaling: ScalingConfig) -> Machines | None:
    """Return the machines that ranks need, without requesting them yet; None if ranks run on this machine."""
    if scaling.cluster is None:
        return None
    return Machines(
        load_cluster(scaling.cluster),
        scaling.fewest_workers,
        scaling.most_workers,
        use_gpu=scaling.use_gpu,
        regrow_after_s=scaling.regrow_after_s,
    )


def find_named(checkpoint: str, storage: StorageSpec, run: str | None = None) -> CheckpointRef:
    """Return the checkpoint that `checkpoint` names, without a request to the storage.

    Args:
        checkpoint: An id in `run`, "run/id", or a path or URL.
        storage: The storage of an id or "run/id". A path or URL in this storage is read with its credentials, any with its
            retry policy.
        run: The run of an id that is given alone.

    Raises:
        ValueError: If `checkpoint` names none.

    """
    if is_id(checkpoint):
        if run is None:
            raise ValueError(f"checkpoint {checkpoint}: give its run, or its path or URL")
        return CheckpointRef(storage, check_run_name(run), checkpoint)
    run_name, _, checkpoint_id = checkpoint.rpartition("/")
    if is_id(checkpoint_id) and ("/" not in run_name or is_run_name(run_name)):  # else it is a path
        return CheckpointRef(storage, check_run_name(run_name), checkpoint_id)
    place = split_path(checkpoint)
    if place is not None and canonical(parse_storage(place[0]).url) == canonical(storage.url):
        return CheckpointRef(storage, check_run_name(place[1]), place[2])
    named = Checkpoint(checkpoint)
    if named.store is None or named.id is None:
        raise ValueError(
            f"checkpoint {checkpoint!r}: give a committed checkpoint's id, its path or URL, or 'run/id'{_of_others(named)}"
        )
    return CheckpointRef(replace(named.store.spec, retry=storage.retry), named.store.name, named.id)


def committed_checkpoint(given: str | Path | Checkpoint, storage: StorageSpec, run: str | None = None) -> CheckpointRef:
    """Return the checkpoint that an argument of `train` or `evaluate` means, without a request to the storage.

    Args:
        given: The checkpoint, or its id, "run/id", path or URL.
        storage: The storage of the flow, as `find_named` takes it.
        run: The run of an id that is given alone.

    Raises:
        ValueError: If `given` means none.

    """
    if isinstance(given, Checkpoint):
        return _committed(given)
    return find_named(name_checkpoint(given), storage, run)


def name_checkpoint(given: str | Path | Checkpoint) -> str:
    """Return the text that means the same checkpoint as `given`.

    Raises:
        ValueError: If `given` is no committed checkpoint, or a URL that contains a password.

    """
    if isinstance(given, str):
        refuse_password(given)
        return given
    if isinstance(given, Path):
        return str(given.absolute())
    _committed(given)
    return given.path


def _committed(given: Checkpoint) -> CheckpointRef:
    if given.store is None or given.id is None:
        raise ValueError(f"{given!r}: give a committed checkpoint, its path or URL, or 'run/id'{_of_others(given)}")
    return CheckpointRef(given.store.spec, given.store.name, given.id)


def _of_others(named: Checkpoint) -> str:
    """Return how to use a directory that is no committed checkpoint, such as one of Ray's; empty if `named` is no directory."""
    if not Path(named.path).is_dir():
        return ""
    return "; of other files, give the directory in the config, and read Checkpoint(directory) in the function"


def restarted_by_this(run: RunConfig) -> Container[str | None]:
    """Return the flow runs that the current one restarts; empty where the start of the run does not depend on them.

    Those of a flow run that a flow or a task has called are the flow runs that the same flows and task have called in earlier
    tries and restarts. What is not certainly an earlier try counts as another call.
    """
    if run.resume != "never" and not run.takeover:
        return ()
    with get_client(sync_client=True) as client:
        this, *above = flow_runs_from(client, client.read_flow_run(UUID(flow_run.id)))
        restarted = restarted_before(client, above[-1] if above else this)
        if not (callers := [*_callers(above)]):
            return restarted
        call = digest_of([str(this.flow_id), *(name for name, _ in callers)])
        this_try = CallTry(call, tuple(step for _, step in callers), _PROCESS)
        this_try.record(client, this.id)
    return EarlierTries(this_try, restarted)


def _callers(above: Sequence[FlowRun]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield what identifies each flow, and the task, on the way to the current flow, and its step; the outermost first."""
    context = TaskRunContext.get()
    for calling in (None, *reversed(above)):  # None calls a task that no flow calls
        if calling is not None:
            yield str(calling.flow_id), (str(calling.id), calling.run_count)
        if context is not None and context.task_run.flow_run_id == (None if calling is None else calling.id):
            yield context.task.name, (str(context.task_run.id), context.task_run.run_count)
