"""The Prefect task that leads the attempts of a training; Prefect's own retries make the next attempt."""

import json
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.transactions import CommitMode, transaction
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.attempts import Outcome, write_outcome
from prefect_torch.ckpt.metrics import from_json, to_json

from .attempt import choose_start, claim
from .audience import AttemptEnded, AttemptStarted, Audience
from .checkpoint_ref import CheckpointRef
from .errors import RankFailedError
from .gang import meet
from .job import TrainJob
from .journal import Journal
from .rank_spec import RankSpec, on_one_machine
from .rendezvous import Address
from .restarts import failure_kind
from .run_logs import library_logs_in_run

_FLUSH_S = 30.0
_MAX_RETURN_BYTES = 1 << 20


@task(name="train_workers", task_run_name="train-{job.run}", cache_policy=NO_CACHE, persist_result=False)
def train_workers(job: TrainJob, audience: Audience) -> Any:
    """Run one attempt of all ranks to its end and return rank 0's return value.

    A failed attempt is recorded in the run's storage before it is raised. No rank's process outlives this call, however it
    ends.

    Args:
        job: The training.
        audience: Who is told what happens.

    Raises:
        Exception: What the failing rank's function raised, from the RankFailedError with its traceback.
        RankFailedError: If a rank died, or its exception cannot be rebuilt here.
        CheckpointError: If the attempt could not begin.

    """
    flow_run_id = flow_run.id
    store = job.open_store()
    claimed = claim(store, job, flow_run_id)
    attempt = claimed.number

    def record(outcome: Outcome) -> None:
        _record(store, outcome)
        audience.tell(AttemptEnded(outcome))

    try:
        with library_logs_in_run():
            restored = choose_start(store, job, claimed, audience)
        audience.tell(AttemptStarted(claimed, None if restored is None else restored.open().path))
        # Else Prefect marks the task runs of ranks and prunes as rolled back as soon as this one fails.
        with transaction(commit_mode=CommitMode.EAGER):
            value = _lead(store, job, attempt, restored, audience)
    except RankFailedError as exc:
        errors = {} if exc.rank is None else {str(exc.rank): str(exc)}
        record(Outcome(attempt, "failed", flow_run_id, failure_kind(exc), str(exc), errors))
        if exc.original is not None:
            raise exc.original from exc
        raise
    except (TerminationSignal, KeyboardInterrupt) as exc:
        message = f"ended from outside ({type(exc).__name__}); {_what_is_safe(store)}"
        record(Outcome(attempt, "preempted", flow_run_id, "preemption", message))
        get_run_logger().warning("attempt %d: %s", attempt, message)
        raise
    except Exception as exc:
        record(Outcome(attempt, "failed", flow_run_id, failure_kind(exc), repr(exc)))
        raise
    record(Outcome(attempt, "completed", flow_run_id, return_value=_as_json(value)))
    return value


def _lead(store: CheckpointStore, job: TrainJob, attempt: int, restored: CheckpointRef | None, audience: Audience) -> Any:
    journal = Journal(store, job, attempt, None if restored is None else restored.checkpoint_id, audience)
    gang, key_value = meet(lambda address: _specs(job, attempt, restored, address), job.hang_timeout_s)
    try:
        return gang.run(key_value, journal)
    except (TerminationSignal, KeyboardInterrupt):
        get_run_logger().warning("the training is ended from outside: ranks have %g s for a last checkpoint", job.grace_s)
        gang.drain(key_value, journal, job.grace_s)
        raise
    finally:
        gang.stop(key_value, "the attempt is over")
        journal.close()


def _record(store: CheckpointStore, outcome: Outcome) -> None:
    """Write an outcome down; where storage refuses, say so, and leave what is being raised as it is."""
    try:
        write_outcome(store, outcome)
    except (StorageError, OSError) as exc:
        get_run_logger().warning("the outcome of attempt %d could not be written: %s", outcome.attempt, exc)


def _what_is_safe(store: CheckpointStore) -> str:
    latest = store.latest()
    return "nothing was committed yet" if latest is None else f"work is safe up to step {latest.step} ({latest.id})"


def _specs(job: TrainJob, attempt: int, restored: CheckpointRef | None, rendezvous: Address) -> list[RankSpec]:
    return on_one_machine(
        RankSpec(
            world_size=job.num_workers,
            local_world_size=job.num_workers,
            rendezvous=rendezvous,
            storage=job.storage,
            run=job.run,
            attempt=attempt,
            restored=restored,
            function=job.function,
            use_gpu=job.use_gpu,
            backend=job.backend,
            reports=job.reports,
            flush_s=_FLUSH_S,
        )
    )


def _as_json(value: Any) -> Any:
    """Return `value` as JSON gives it back, None where it does not fit: an outcome tells a result, it carries no models."""
    try:
        encoded = json.dumps(to_json(value))
    except (TypeError, ValueError, RecursionError):
        return None
    return from_json(json.loads(encoded)) if len(encoded) <= _MAX_RETURN_BYTES else None
