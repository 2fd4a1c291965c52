"""A trial's run in the storage: its end, its reports without a decision, its pins, and the deletion of its checkpoints."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.reporting.decisions import DecisionPoints, time_of
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, list_attempts
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.ckpt.runs.deletion.garbage import delete_left_data
from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.history import MetricRecord, newest_of_each, read_history
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.metrics import Metrics, add_newest, clean_metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.whole.trials import pin_token_of
from prefect_torch.ckpt.text import headline
from prefect_torch.flows.sweeps.journal.events import Source
from prefect_torch.flows.sweeps.journal.history import RungReport, TrialRecord
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.tasks.rank.tracebacks import first_line


def status_of_start(run: Run, flow_run_id: str | None) -> AttemptStatus | None:
    """Return the status of a trial's newest attempt; None if this flow run has led no attempt, so that it has not trained.

    The end of an earlier attempt says nothing about this start: the attempt of a paused trial ended as "stopped". A flow run
    that another one has overtaken has trained, and the trial ends as the newest attempt does.

    Args:
        run: The run of the trial.
        flow_run_id: The flow run of this start; None if there is none.

    """
    status = read_status(run)
    if status is None or flow_run_id is None:
        return None
    if status.attempt.owner.flow_run_id == flow_run_id:
        return status
    return status if any(attempt.owner.flow_run_id == flow_run_id for attempt in list_attempts(run)) else None


def end_of(run: Run, outcome: Outcome) -> TrialEnd | None:
    """Return how a trial has ended, by the outcome of its newest attempt: Prefect's state may come from an outage.

    Args:
        run: The run of the trial.
        outcome: The outcome.

    Returns:
        None if it was terminated, or stopped after a report: it continues, unless the search has decided otherwise.

    """
    if outcome.ending in ("preempted", "stopped"):
        return None
    if outcome.ending == "completed":
        return end_of_returned(run, outcome.return_value)
    reason = headline(outcome.error) or outcome.ending
    return TrialEnd("failed", reason, newest_of_each(read_history(run)))


def end_of_error(run: Run, error: BaseException) -> TrialEnd:
    """Return the end of a trial whose start has raised `error`, and recorded no outcome."""
    reason = first_line(error) if isinstance(error, Exception) else repr(error)
    return TrialEnd("failed", reason, newest_of_each(read_history(run)))


def end_of_returned(run: Run, value: object) -> TrialEnd:
    """Return the end of a trial whose function has returned `value`: the metrics in a dict count as its last report."""
    history = read_history(run)
    has_reported = any(not record.is_logged for record in history)
    metrics = newest_of_each(history)
    add_newest(metrics, metrics_in(value))
    return TrialEnd("completed", None, metrics, has_reported)


def metrics_in(value: object) -> Metrics:
    """Return the metrics in a dict that a function has returned, without values that are no metrics."""
    found: Metrics = {}
    for name, item in value.items() if isinstance(value, dict) else ():
        with suppress(ValueError):  # a curve, or a model
            found |= clean_metrics({name: item})
    return found


def count_reports(run: Run) -> int:
    """Return how often a trial has reported up to its latest checkpoint; a step that was trained again counts once."""
    newest = run.find_newest(run.read_or_leave_out)
    return 0 if newest is None else _Reports(read_history(run), [newest]).count_up_to(newest.step)


class _Reports:
    """The numbers of a trial's reports; a kill may have lost records of reports that have a checkpoint."""

    def __init__(self, records: Iterable[MetricRecord], manifests: Iterable[Manifest]) -> None:
        recorded = Counter((record.step, record.attempt) for record in records if not record.is_logged)
        by_step = {manifest.step: 1 for manifest in manifests}
        for (step, _), count in recorded.items():
            by_step[step] = max(count, by_step.get(step, 0))
        self._steps = sorted(by_step)
        self._totals = list(accumulate((by_step[step] for step in self._steps), initial=0))

    def count_up_to(self, step: int) -> int:
        """Return the number of reports up to a step."""
        return self._totals[bisect_right(self._steps, step)]


def undecided(run: Run, trial: TrialRecord, points: DecisionPoints | None) -> Iterator[DecisionRequest]:
    """Yield the committed reports of a trial that need a decision which was not recorded.

    The first one that allows a decision was left by a kill, since the ranks wait for the decision. Earlier ones lack the metric
    or the time, so the trial continued.

    Args:
        run: The run of the trial.
        trial: The trial.
        points: The reports that need a decision.

    """
    if points is None:
        return
    manifests, records = list_manifests(run)[1], read_history(run)
    reports, decided = _Reports(records, manifests), {report.checkpoint for report in trial.reports}
    last = trial.own_reports[-1].time if trial.own_reports else -math.inf
    for manifest in manifests:
        count = trial.reports_before + reports.count_up_to(manifest.step)
        at = time_of(points.time_attr, manifest.step, count, manifest.reported)
        if manifest.id in decided or (at is not None and at <= last):
            continue
        if points.includes(manifest.step, count, manifest.reported, has_checkpoint=True):
            before = [record for record in records if record.step < manifest.step]
            yield DecisionRequest(0, manifest.step, count, manifest.reported, manifest.id, newest_of_each(before))


def pin_source(sweep: CheckpointStore, source: TrialRecord, clone: str) -> tuple[str, int] | None:
    """Pin the checkpoint of a trial's newest decision, or its newest checkpoint if that one is gone.

    Args:
        sweep: The sweep.
        source: The trial.
        clone: The name of the run that begins from it.

    Returns:
        Its id, and the number of the trial's reports up to it, as far as the storage has them; None if there is none.

    """
    store = sweep.beside(source.run)
    # Before the pin, which otherwise only the journal's next entry records.
    sweep.records.put(sweep.layout.last_pin, {"source": source.run.rpartition("/")[2], "clone": clone.rpartition("/")[2]})
    decided = source.reports[-1] if source.reports else RungReport(0, 0)
    if decided.checkpoint is not None and _pins(store, decided.checkpoint, clone):
        return decided.checkpoint, decided.num_reports
    for _ in range(2):
        newest = store.latest()
        if newest is not None and _pins(store, newest.id, clone):
            return newest.id, source.reports_before + _Reports(read_history(store), [newest]).count_up_to(newest.step)
    return None


def _pins(store: CheckpointStore, checkpoint_id: str, clone: str) -> bool:
    """Pin a checkpoint, and return whether it exists: it may have been pruned while the source continued."""
    try:
        store.pin(checkpoint_id, pin_token_of(clone))
    except CheckpointNotFoundError:
        return False
    return True


def unpin_source(sweep: CheckpointStore, source: Source, clone: str) -> None:
    """Remove the pin of `pin_source`, once the copy is committed; harmless if it was removed."""
    sweep.beside(source.run).unpin(source.checkpoint, pin_token_of(clone))


@dataclass(frozen=True, slots=True)
class _LastPin:
    """The names of the run that was pinned last, and of the run that begins from it, within their sweep."""

    source: str
    clone: str


def remove_lost_pin(sweep: Run, trials: Iterable[TrialRecord]) -> None:
    """Remove the pin of a run that no trial has: a kill came between `pin_source` and the journal's entry. Costs a small read.

    Args:
        sweep: The sweep.
        trials: All its trials.

    """
    last = sweep.records.get(_LastPin, sweep.layout.last_pin, "the last pin of a sweep")
    if last is None:
        return
    clone = f"{sweep.name}/{last.clone}"
    if not any(clone in (trial.run, *trial.earlier_runs) for trial in trials):
        source = sweep.beside(f"{sweep.name}/{last.source}")
        sweep.storage.delete([key for key in source.keys(source.layout.pins) if key.endswith(f".{pin_token_of(clone)}.json")])


def delete_all(store: CheckpointStore) -> frozenset[str]:
    """Delete the checkpoints of a run that has ended, and what a killed deletion has left of others.

    Returns:
        The ids of those that stay for now, since they are pinned, or their data are read in place.

    Raises:
        StorageError, OSError: If some could not be deleted; a repeated call deletes these.

    """
    return delete_checkpoints(store, store.list()) | delete_left_data(store)
