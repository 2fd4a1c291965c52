"""How attempts have ended, as their leaders record it."""

import asyncio
import json
from datetime import datetime, timezone
from typing import Any

from prefect.context import FlowRunContext
from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Ending, Outcome, claim_key, write_outcome
from prefect_torch.ckpt.runs.manifest import step_of
from prefect_torch.ckpt.runs.metrics import from_json
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.tasks.gang.termination import CancelledInPrefect, Interruption, Termination
from prefect_torch.tasks.prefect_api.flow_run import is_being_cancelled
from prefect_torch.tasks.rank.errors import RankFailedError, show_traceback
from prefect_torch.tasks.rank.failures import CONSEQUENCES, counts_against
from prefect_torch.tasks.rank.plain_result import encode_value
from prefect_torch.tasks.run_logs import get_run_logger

_MAX_RETURN_BYTES = 1 << 20
_MOST_TRACEBACKS = 16  # of hundreds of ranks that raise the same


def record_outcome(run: Run, claimed: Attempt, outcome: Outcome) -> None:
    """Store how an attempt ended; log a failure to store it, lest that hide the error that is being raised.

    Not stored is that of an attempt whose claim is gone: the number may be another attempt's by now.
    """
    try:
        if find_size(run.storage, claim_key(run, claimed)) is None:
            get_run_logger().warning(
                "the outcome of attempt %d of run %r is not stored: its claim is gone", outcome.attempt, run.name
            )
        else:
            write_outcome(run, outcome)
    except (StorageError, OSError) as exc:
        get_run_logger().warning("the outcome of attempt %d of run %r could not be written: %s", outcome.attempt, run.name, exc)


def safe_work(run: str, newest: str | None) -> str:
    """Return up to which step the work of a run is safe.

    Args:
        run: The run's name.
        newest: The id of its newest checkpoint; None if there is none.

    """
    if newest is None:
        return "nothing was committed yet"
    return f"work is safe up to step {step_of(newest)} ({newest}), where the next training named {run!r} continues"


def count_as_lost(failure: RankFailedError) -> None:
    """Count a rank or a machine that SIGTERM has ended as lost, where the attempt has committed nothing: it may recur."""
    if failure.kind == "preemption":
        failure.kind = "infrastructure"


def log_failure(failure: RankFailedError, safe_work: str) -> None:
    """Log which rank failed, and why, with its traceback, which ends with the message; then which work is safe, if known."""
    shown = show_traceback(failure)
    text = f"{shown}\n" if shown else f"{failure}; "
    get_run_logger().error("%s", f"{text}{safe_work}".rstrip("; \n"))


def warn_of_failure_at_termination(failure: Exception) -> None:
    """Warn of a rank that failed by itself while it was to end: that costs no budget, and may occur at each termination."""
    if isinstance(failure, RankFailedError) and failure.kind not in ("preemption", *CONSEQUENCES):
        get_run_logger().warning("%s", show_traceback(failure) or failure)


def outcome_of_failure(claimed: Attempt, error: Exception) -> Outcome:
    """Return the outcome of an attempt that failed, with the traceback of each rank that did."""
    if isinstance(error, RankFailedError):
        message = _with_own_traceback(error)
        of_ranks = [it for it in (error, *error.others) if it.rank is not None]
        texts = [_with_own_traceback(it) if number < _MOST_TRACEBACKS else str(it) for number, it in enumerate(of_ranks)]
        errors = {str(it.rank): text for it, text in zip(of_ranks, texts, strict=True)}
    else:
        message, errors = repr(error), {}
    return Outcome(claimed.number, "failed", claimed.owner.flow_run_id, counts_against(error), message, errors)


def outcome_of_end(claimed: Attempt, ending: Ending, value: Any) -> Outcome:
    """Return the outcome of an attempt whose ranks have returned, rank 0 with `value`."""
    return Outcome(claimed.number, ending, claimed.owner.flow_run_id, return_value=recorded_value(value))


def outcome_of_regrowth(claimed: Attempt, safe_work: str) -> Outcome:
    """Return the outcome of an attempt that goes on with more ranks; it is of no kind, and costs no budget."""
    message = f"it goes on with more ranks; {safe_work}"
    return Outcome(claimed.number, "preempted", claimed.owner.flow_run_id, error=message)


def _with_own_traceback(error: RankFailedError) -> str:
    return "\n\n".join(filter(None, [str(error), error.traceback]))


def outcome_of_termination(claimed: Attempt, termination: Termination, grace_s: float, safe_work: str) -> Outcome:
    """Return the outcome of an attempt whose termination was requested.

    Args:
        claimed: The attempt.
        termination: The termination of its flow run.
        grace_s: How long its ranks had for a last checkpoint.
        safe_work: Which work is safe, for the message.

    """
    flow_run_id, cause = claimed.owner.flow_run_id, termination.cause
    is_cancelled = isinstance(cause, CancelledInPrefect) or (flow_run_id is not None and is_being_cancelled(flow_run_id))
    message = f"{'cancelled' if is_cancelled else 'terminated'} ({_terminated_by(termination, grace_s)}); {safe_work}"
    if is_cancelled:
        return Outcome(claimed.number, "cancelled", flow_run_id, error=message)
    if isinstance(cause, Interruption):  # of no kind: it costs no budget
        return Outcome(claimed.number, "preempted", flow_run_id, error=f"{cause.reason}; {safe_work}")
    return Outcome(claimed.number, "preempted", flow_run_id, "preemption", message)


def _terminated_by(termination: Termination, grace_s: float) -> str:
    """Return what requested the termination. Prefect ends a flow at its timeout by the same error as at any cancellation."""
    cause = termination.cause
    if termination.is_by_keyboard:
        return "Ctrl-C"
    if isinstance(cause, CancelledInPrefect):
        return "in Prefect"
    context = FlowRunContext.get()
    if isinstance(cause, asyncio.CancelledError) and context is not None and context.flow is not None:
        limit_s, grace_used_s = context.flow.timeout_seconds, grace_s - termination.grace_left_s
        elapsed_s = (datetime.now(timezone.utc) - context.start_time).total_seconds() - grace_used_s
        if limit_s is not None and elapsed_s >= limit_s:
            return f"timeout_seconds={limit_s:g}"
    return type(cause).__name__


def recorded_value(value: Any) -> Any:
    """Return the part of a return value that an outcome records: no models, and of a large dict only the small items."""
    encoded = encode_value(value)
    if encoded is None:
        return None
    plain = json.loads(encoded)
    if len(encoded) > _MAX_RETURN_BYTES:
        plain = _small_items(plain) if isinstance(plain, dict) else None
    return from_json(plain)


def _small_items(value: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest items of a dict that are up to 1 MiB together: a score is kept beside a long curve."""
    sizes = {name: len(json.dumps({name: item})) for name, item in value.items()}
    kept, total = set(), 0
    for name in sorted(value, key=lambda name: sizes[name]):
        total += sizes[name]
        if total > _MAX_RETURN_BYTES:
            break
        kept.add(name)
    return {name: item for name, item in value.items() if name in kept}
