"""The result of a training, read from its storage: while it runs, when it has completed, and when it has failed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt import Checkpoint, CheckpointCorruptError, CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.attempts.begun import check_begun
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.history import MetricRecord, newest_metrics, read_history
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.metrics import Metrics, find_finite_score, find_score, flatten_metrics
from prefect_torch.ckpt.runs.retention import Order, score, sort_by_score
from prefect_torch.ckpt.storage.opening import StorageLike
from prefect_torch.ckpt.text import headline, show_count
from prefect_torch.flows.monitoring.pages.notebook import result_html
from prefect_torch.flows.monitoring.text import show_first_number, show_number

from .result_attributes import data_frame, hinting, hints_of_rays

if TYPE_CHECKING:
    import pandas as pd


_INSTEAD_OF = {  # attributes of Ray's Result
    "config": "the flow run's parameters have it, and so has the trial of a sweep",
    "filesystem": "write CheckpointStore.open(storage, run).storage, or read the files in checkpoint.as_directory()",
    "from_path": "write Result.from_storage(storage, run)",
}


class TrainingFailedError(RuntimeError):
    """The error of a training as its storage records it; `train` itself raises the original error."""


@dataclass(frozen=True)  # with slots, Python before 3.12 would replace `__setstate__`
class Result:
    """The outcome of a training.

    Attributes:
        metrics: Rank 0's last report, and the newest value of each metric logged since; empty without reports in this training.
        checkpoint: The latest checkpoint; None without checkpoints.
        best_checkpoints: The checkpoints in storage with their metrics, best first, including those that are kept for another
            reason, such as the latest.
        history: Every report of rank 0, in order, and what it has logged between reports (`is_logged`); of attempts before
            `first_attempt`, too.
        path: The run's local path or URL.
        attempts: The number of the run's attempts.
        error: The error that ended the newest attempt; None if it completed, runs, or was killed before an error was
            recorded.
        errors: Each failed rank's error, by rank, with the traceback of the first 16; without ranks that failed only because
            another one had.
        completed: Whether the newest attempt completed.
        resumed_from: The path or URL of the checkpoint that the newest attempt resumed from; None for a fresh start.
        return_value: The return value of rank 0's function; from storage, as far as JSON of up to 1 MiB can hold it; a larger
            dict is read without its largest items.
        first_attempt: The attempt that made the run's last fresh start (`resume="never"`), with which this training began; 1
            without one.

    """

    metrics: Metrics
    checkpoint: Checkpoint | None
    best_checkpoints: list[tuple[Checkpoint, Metrics]]
    history: list[MetricRecord] = field(repr=False)
    path: str
    attempts: int
    error: Exception | None = None
    errors: dict[int, str] = field(default_factory=dict)
    completed: bool = False
    resumed_from: str | None = None
    return_value: Any = None
    first_attempt: int = 1

    def __setstate__(self, state: "list[object] | dict[str, object]") -> None:
        """Restore a pickle, also one of version 0.1: a list of its fields; later fields get their defaults."""
        given = state if isinstance(state, dict) else dict(zip([it.name for it in fields(self)], state, strict=False))
        self.__dict__.update({it.name: given.get(it.name, it.default) for it in fields(self)})

    @property
    def metrics_dataframe(self) -> "pd.DataFrame":
        """The history as a pandas DataFrame, with a row per record.

        It has a column per metric ("a/b" for nested ones), and step, attempt, checkpoint, reported_at and is_logged where no
        metric has that name. `frame[~frame["is_logged"]]` has a row for each report.

        Raises:
            ImportError: If pandas is not installed.

        """
        return data_frame([_row(record) for record in self.history], "metrics_dataframe", "history")

    if not TYPE_CHECKING:
        __getattr__ = hinting(hints_of_rays(_INSTEAD_OF))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the curves, the kept checkpoints, and the lines that load one."""
        history = _since(self.history, self.first_attempt)
        steps = [record.step for record in history if not record.is_logged]
        ending = "completed" if self.completed else "failed" if self.error is not None else "not completed"
        outcome = f"{ending}, {_attempts(self)}"
        if steps:
            outcome += f", {len(steps)} report{'s' * (len(steps) != 1)} up to step {steps[-1]}"
        if self.error is not None:
            outcome += f"; {headline(str(self.error)) or type(self.error).__name__}"
        return result_html(self.path, outcome, history, [(it.path, metrics) for it, metrics in self.best_checkpoints])

    def get_best_checkpoint(self, metric: str, mode: Order) -> Checkpoint:
        """Return the best of `best_checkpoints` by any metric; of equal ones the newer.

        Args:
            metric: A metric's name, or an "a/b" path into nested metrics.
            mode: Whether a high ("max") or a low ("min") value is good.

        Raises:
            ValueError: If no checkpoint has that metric as a number, or `mode` is neither "max" nor "min".

        """
        checkpoints = {it.manifest.id: it for it, _ in self.best_checkpoints}
        best_first = sort_by_score([it.manifest for it in checkpoints.values()], metric, mode)
        if not best_first or find_score(best_first[0].metrics, metric) is None:
            raise ValueError(f"no checkpoint of {self.path} has a metric {metric!r} that is a number")
        return checkpoints[best_first[0].id]

    @classmethod
    def from_storage(cls, storage: StorageLike, run: str) -> "Result":
        """Read the result of a run that has completed, has failed or is still running.

        Args:
            storage: A local path, a URL, "block-type-slug/block-name", or a block.
            run: The run's name.

        Raises:
            FileNotFoundError: If there is no such run.
            ValueError: If it is a sweep.
            CheckpointCorruptError: If none of its attempts can be read.
            UnsupportedFormatError: If a newer version made its newest attempt.

        """
        return read_result(CheckpointStore.open(storage, run))


def read_result(store: CheckpointStore) -> Result:
    """Read the result of a run; see `Result.from_storage`."""
    status = read_status(store)
    if status is None:
        check_begun(store)
        raise CheckpointCorruptError(
            f"run {store.run!r} in {store.storage.url} has no claim of an attempt that can be read; "
            "CheckpointStore.list() returns its checkpoints"
        )
    attempt, outcome = status.attempt, status.outcome
    if attempt.is_sweep:
        raise ValueError(f"run {store.run!r} in {store.storage.url} is a sweep: read it by SweepResult.from_storage(...)")
    listed, manifests = list_manifests(store)
    history = read_history(store, listed)
    policy = attempt.policy
    best = sort_by_score(manifests, policy.checkpoint_score_attribute, policy.checkpoint_score_order)
    return Result(
        metrics=newest_metrics(_since(history, attempt.lineage)),
        checkpoint=store.checkpoint(manifests[-1]) if manifests else None,
        best_checkpoints=[(store.checkpoint(it), it.metrics) for it in best],
        history=history,
        path=store.path,
        attempts=attempt.number,
        error=None if outcome is None or outcome.error is None else TrainingFailedError(outcome.error),
        errors={} if outcome is None else {int(rank): text for rank, text in outcome.errors.items()},
        completed=status.is_completed,
        resumed_from=attempt.resumed_from,
        return_value=None if outcome is None else outcome.return_value,
        first_attempt=attempt.lineage,
    )


def _since(history: Sequence[MetricRecord], attempt: int) -> list[MetricRecord]:
    return [record for record in history if record.attempt >= attempt]


def _row(record: MetricRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "attempt": record.attempt,
        "checkpoint": record.checkpoint,
        "reported_at": record.reported_at,
        "is_logged": record.is_logged,
        **dict(flatten_metrics(record.metrics)),
    }


def summarize(result: Result, policy: RetentionPolicy) -> str:
    """Return a completed training in one line, such as "150 steps, val_loss 0.0013 (best at 143), 2 attempts"."""
    reports = [record for record in _since(result.history, result.first_attempt) if not record.is_logged]
    return ", ".join([*_steps(reports), *_best(result, reports, policy), _attempts(result)])


def _attempts(result: Result) -> str:
    return show_count(result.attempts - result.first_attempt + 1, "attempt")


def _steps(reports: Sequence[MetricRecord]) -> list[str]:
    reported = [record.step for record in reports]
    if not reported:
        return ["no report"]
    number = max(reported) + (1 if min(reported) == 0 else 0)  # most trainings count from 0
    return [show_count(number, "step")]


def _best(result: Result, reports: Sequence[MetricRecord], policy: RetentionPolicy) -> list[str]:
    """Return the best score; without a score, the last value of the first metric that is a number."""
    name, order = policy.checkpoint_score_attribute, policy.checkpoint_score_order
    if name is None:
        return show_first_number(result.metrics)
    # A step that was trained again has replaced the lost one.
    by_step = {record.step: record.metrics for record in reports if find_score(record.metrics, name) is not None}
    scored = [(metrics, step) for step, metrics in by_step.items()]
    if not scored:  # an evaluation attached it
        found = [(it.manifest, metrics) for it, metrics in result.best_checkpoints]
        own = [it for it in found if it[0].attempt >= result.first_attempt]
        scored = [(metrics, manifest.step) for manifest, metrics in own if find_score(metrics, name) is not None]
    if not scored:
        return []
    finite = [it for it in scored if find_finite_score(it[0], name) is not None]
    if not finite:
        return [f"no finite {name}"]
    metrics, step = max(finite, key=lambda it: (score(it[0], name, order), it[1]))
    last, _ = max(scored, key=lambda it: it[1])
    at_end = [] if find_finite_score(last, name) is not None else [f"{show_number(find_score(last, name))} at the end"]
    return [f"{name} {show_number(find_score(metrics, name))} (best at {step})", *at_end]
