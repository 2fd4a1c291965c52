"""The view of a sweep that its page and the terminal show: its trials, and their curves, in bounded memory."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import AT_ONCE, read_all
from prefect_torch.flows.sweeps.definition import Definition
from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, TrialState, score_in, value_in

from .parameters import Value, parameters_of
from .trial_curves import TrialCurve, read_curve

_MAX_CURVES = 200
_LONGEST_S = 10.0
_Version: TypeAlias = tuple[str, TrialState, int]


@dataclass(frozen=True, slots=True)
class SeenTrial:
    """A trial with the reports of its run.

    Attributes:
        number: Its number.
        run: The name of its run.
        state: Its state.
        reason: Why it was stopped or paused, or its error.
        parameters: What was chosen for it, "a/b" for nested ones.
        metrics: Its newest metrics.
        value: The value of the metric; None if the trial has no such number, or has failed.
        decided: The times of its reports at which the sweep decided about it.
        curve: The reports of its run; empty if they were not read.

    """

    number: int
    run: str
    state: TrialState
    reason: str | None
    parameters: Mapping[str, Value]
    metrics: Metrics
    value: float | None
    decided: tuple[float, ...] = ()
    curve: TrialCurve = field(default_factory=TrialCurve)

    @property
    def step(self) -> int | None:
        """The step of its newest report, as far as it is known."""
        return self.curve.step


class SweepView:
    """The trials of a sweep.

    Args:
        run: The sweep.
        definition: The space and the metrics of the sweep.
        clock: Returns seconds.
        max_curves: The number of trials with a curve; of more trials, only the best and the newest ones have one.
        longest_s: After how long a look reads no more runs, which the next one then reads.

    """

    def __init__(
        self,
        run: Run,
        definition: Definition,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_curves: int = _MAX_CURVES,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self.run = run
        self.definition = definition
        self._clock = clock
        self._max_curves = max_curves
        self._longest_s = longest_s
        self._records: History = {}
        self._curves: dict[int, TrialCurve] = {}
        self._earlier: dict[int, tuple[tuple[str, ...], TrialCurve]] = {}  # the runs that a trial has left, and their reports
        self._versions: dict[int, _Version] = {}

    @property
    def metric(self) -> str:
        """The metric that is optimized, the first of several."""
        return self.definition.metrics[0]

    @property
    def mode(self) -> str:
        """Whether a low ("min") or a high ("max") value of the metric is good."""
        return self.definition.modes[0]

    @property
    def num_running(self) -> int:
        """The number of trials that run."""
        return sum(record.state == "running" for record in self._records.values())

    def record(self, trials: History) -> None:
        """Record the trials as the journal has them by now."""
        self._records = dict(trials)

    def read(self) -> None:
        """Read the runs of trials that have changed; costs some requests for each, and ten seconds at most by default.

        Raises:
            StorageError: If the storage does not answer.

        """
        until_s = self._clock() + self._longest_s
        due = [record for record in self._wanted() if self._is_changed(record)]
        while due and self._clock() < until_s:
            batch, due = due[:AT_ONCE], due[AT_ONCE:]
            for record, curve in zip(batch, read_all(batch, self._read), strict=True):
                self._curves[record.number] = curve
                self._versions[record.number] = _version(record)
        kept = {record.number for record in self._wanted()}
        self._curves = {number: curve for number, curve in self._curves.items() if number in kept}
        self._earlier = {number: earlier for number, earlier in self._earlier.items() if number in kept}

    def trials(self) -> list[SeenTrial]:
        """Return the trials, by number."""
        return [self._seen(self._records[number]) for number in sorted(self._records)]

    def by_score(self) -> list[SeenTrial]:
        """Return the trials, the best first; those without a value last, the newest of them first."""
        sign = 1 if self.mode == "min" else -1
        return sorted(self.trials(), key=lambda it: (it.value is None, -it.number if it.value is None else sign * it.value))

    def best(self) -> SeenTrial | None:
        """Return the best trial, of equal ones the first; None while none has a value."""
        return next((trial for trial in self.by_score() if trial.value is not None), None)

    def _wanted(self) -> Sequence[TrialRecord]:
        """Return the trials whose curves are shown: all, or those that run, the best and the newest ones."""
        newest = sorted(self._records.values(), key=lambda it: (it.state != "running", -it.number))
        if len(newest) <= self._max_curves:
            return newest
        best = sorted(newest, key=self._order)[: self._max_curves // 2]
        return list({it.number: it for it in (*newest[: self._max_curves // 2], *best)}.values())

    def _order(self, record: TrialRecord) -> float:
        score = score_in(record.metrics, record.state, self.metric, self.mode)
        return math.inf if score is None else score

    def _is_changed(self, record: TrialRecord) -> bool:
        curve = self._curves.get(record.number)
        if record.state == "running" or curve is None or self._versions.get(record.number) != _version(record):
            return True
        # A decision is in the journal before the process of the trial has stored its last reports; a failure, after that.
        return record.state != "failed" and curve.attempts > 0 and not curve.is_over

    def _read(self, record: TrialRecord) -> TrialCurve:
        known, earlier = self._earlier.get(record.number, ((), TrialCurve()))
        if record.earlier_runs[: len(known)] != known:  # it has returned to one of them
            known, earlier = (), TrialCurve()
        for run in record.earlier_runs[len(known) :]:  # before it continued from another trial's checkpoint
            earlier = self._curve_of(run).after(earlier)
        curve = self._curve_of(record.run)
        if curve.attempts:  # the trial trains there: the runs before have stored their reports
            self._earlier[record.number] = (record.earlier_runs, earlier)
        return curve.after(earlier)

    def _curve_of(self, run: str) -> TrialCurve:
        return read_curve(self.run.beside(run), self.metric)

    def _seen(self, record: TrialRecord) -> SeenTrial:
        curve = self._curves.get(record.number, TrialCurve())
        read = self._versions.get(record.number)
        is_of_present_run = read is not None and read[0] == record.run
        trained = record.as_trained(has_metrics=is_of_present_run and bool(curve.metrics))
        metrics = curve.metrics if record.state == "running" and curve.metrics else record.metrics or curve.metrics
        return SeenTrial(
            record.number,
            trained.run,
            record.state,
            record.reason,
            parameters_of(trained.config),
            metrics,
            value_in(metrics, record.state, self.metric),
            tuple(report.time for report in record.reports),
            curve,
        )


def _version(record: TrialRecord) -> _Version:
    return record.run, record.state, len(record.reports)


def count_states(trials: Sequence[SeenTrial]) -> Iterator[tuple[TrialState, int]]:
    """Yield each state that trials have, with their number."""
    states: tuple[TrialState, ...] = ("running", "completed", "paused", "stopped", "failed")
    for state in states:
        count = sum(trial.state == state for trial in trials)
        if count:
            yield state, count
