"""The decisions of a sweep: which trial runs next, and how one has ended; each is recorded before it takes effect."""

import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect_torch.ckpt.reporting.decisions import TRAINING_ITERATION, DecisionPoints, Verdict, time_of
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.metrics import Metrics, as_float, find_score
from prefect_torch.flows.sweeps.failures import Failures
from prefect_torch.flows.sweeps.journal.events import (
    CheckpointsDeleted,
    Cloned,
    Source,
    SweepLed,
    TrialEnded,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from prefect_torch.flows.sweeps.journal.history import History, RungReport, TrialRecord
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.limits import limits_of, reached_limit
from prefect_torch.flows.sweeps.optuna_study.comparison import compared_values
from prefect_torch.flows.sweeps.optuna_study.samplers import check_sampler
from prefect_torch.flows.sweeps.optuna_study.study import Observation, Study, grid_points
from prefect_torch.flows.sweeps.schedulers.choosing import make_scheduler
from prefect_torch.flows.sweeps.schedulers.scheduling import Clone, Decision, Promotion
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested
from prefect_torch.flows.sweeps.time_budget import TimeBudget
from prefect_torch.flows.sweeps.trial_end import TrialEnd, judge
from prefect_torch.flows.sweeps.trial_retention import find_excess

_DEFAULT_TRIALS = 10


class Search:
    """The search of one sweep; safe to share between threads.

    Args:
        search_config: The configuration.
        space: The space.
        seed: The seed.
        recorded: The record of the trials so far, to which events are added.
        sweep: The sweep's name.
        pin: Pins a checkpoint of a trial for the run of the given name, and returns its id and the number of reports up to it,
            as far as the storage has them; None if there is none.
        clock: Returns the time in seconds.
        keeps_left_runs: Whether runs that a trial has left for another one's checkpoint keep theirs, unless `keep_best_trials`.

    Attributes:
        search_config: The configuration.
        metrics: The names of the metrics that are optimized.
        recorded: The record of the trials.
        trials: Every trial, by number.
        budget: The time that the sweep may take, and has taken.
        num_trials: How many trials there will be; fewer once the sampler has nothing more to suggest.

    """

    def __init__(
        self,
        search_config: SearchConfig,
        space: Nested,
        seed: int,
        recorded: RecordedTrials,
        sweep: str,
        pin: Callable[[TrialRecord, str], tuple[str, int] | None] = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_left_runs: bool = True,
    ) -> None:
        self.search_config = search_config
        self.metrics = search_config.metrics
        self.recorded = recorded
        self.trials: History = recorded.by_number
        self._sweep = sweep
        self._pin = pin
        self._keeps_left_runs = keeps_left_runs
        self.budget = TimeBudget(search_config.time_budget_s, recorded, clock)
        points = grid_points(search_config, space)
        self._study = Study(recorded.operations, search_config, space, seed, points)
        self._sampler = check_sampler(search_config, space)
        default = len(points) if self._sampler == "grid" else max(_DEFAULT_TRIALS, len(points))
        self.num_trials = search_config.num_trials or default
        self._make_scheduler = partial(make_scheduler, search_config, space, seed)
        self._scheduler = self._make_scheduler(self.num_trials)
        self._error: Exception | None = None
        self._led: tuple[int, dict[str, Any] | None] = (0, None)
        self._restarts = sorted(recorded.in_state("failed")) if search_config.restart_errored else []

    def lead(self, attempt: int, config: dict[str, Any] | None = None, *, is_fresh: bool = False) -> None:
        """Record that this process leads the sweep, with the config of all trials so far; `use_config` sets another one."""
        known = None if is_fresh else self.recorded.common
        self.recorded.record(SweepLed(attempt, is_fresh, config if known is None else known))
        self._led = attempt, config

    def use_config(self) -> None:
        """Record that all trials that start or resume from here on have the config with which this process leads the sweep.

        Trials that ended before, even if their end was not recorded, had the previous config.
        """
        attempt, config = self._led
        if config != self.recorded.common:
            self.recorded.record(SweepLed(attempt, config=config))

    def record_time(self) -> None:
        """Record now and then how much of a time budget is used, since no event of a trial may record it for hours."""
        self.budget.record(self._led[0])

    def running(self) -> list[TrialRecord]:
        """Return the trials that run, or ran when the process that led the sweep before was killed."""
        with self.recorded.lock:
            return [self.trials[number] for number in sorted(self.recorded.in_state("running"))]

    def next_trial(self) -> TrialRecord | None:
        """Return a trial that is to be started now; None while there is none.

        Raises:
            SweepFailedError: If too many trials have failed.

        """
        with self.recorded.lock:
            self.raise_if_failed()
            if self.budget.is_used_up:
                return None
            if self._restarts:
                number = self._restarts.pop(0)
                return self._resume(Promotion(number, self.trials[number].milestone))
            self._take_end_of_suggestions()
            promoted = self._scheduler.promote(self.trials)
            if promoted is not None and self._scheduler.promotes_first:
                return self._resume(promoted)
            number = len(self.trials)
            if number < self.num_trials:
                return self._start(number)
            return None if promoted is None else self._resume(promoted)

    def _take_end_of_suggestions(self) -> None:
        """Let the scheduler know that there will be no more trials than now, or it would wait for the others."""
        if len(self.trials) < self.num_trials and self._study.is_over:
            self.num_trials = len(self.trials)
            self._scheduler = self._make_scheduler(self.num_trials)

    def points(self, number: int, count_reports: Callable[[], int]) -> DecisionPoints | None:
        """Return the reports at which a trial needs a decision; None if it needs none.

        Args:
            number: The trial.
            count_reports: Returns how often its present run has reported up to the checkpoint that it begins from.

        """
        trial, stop, time_attr = self.trials[number], limits_of(self.search_config), self.search_config.time_attr
        milestone = self._milestone_of(trial)
        if milestone is None and not stop:
            return None
        before = trial.reports_before + count_reports() if TRAINING_ITERATION in (time_attr, *stop) else 0
        return DecisionPoints(time_attr, milestone, self._scheduler.asks_always, stop, before)

    def _milestone_of(self, trial: TrialRecord) -> float | None:
        """Return the time from which a trial needs a decision; a running one may have begun with another scheduler, or none."""
        is_unknown = trial.state == "running" and trial.milestone is None
        return self._scheduler.first_milestone(trial.number) if is_unknown else trial.milestone

    def first_decision(self, number: int) -> float | None:
        """Return the time from which a trial's first checkpoint needs a decision; None if checkpoints need none.

        At `max_t` a trial is complete without one, as are those in the bracket of hyperband that has no rungs before it.
        """
        first = None if self._scheduler.asks_always else self._scheduler.first_milestone(number)
        return None if first == self.search_config.max_t else first

    def give_up(self, error: Exception) -> None:
        """End the sweep with `error`: a decision could not be recorded."""
        self._error = error

    def decide(self, number: int, request: DecisionRequest) -> Verdict:
        """Return whether a trial goes on after a report; the decision is recorded, and returned again for the same report."""
        with self.recorded.lock:
            trial, metrics = self.trials[number], request.metrics
            score = find_score(metrics, self.search_config.metrics[0])
            value = math.nan if score is None else as_float(score) * self._sign
            at = time_of(self.search_config.time_attr, request.step, request.num_reports, metrics)
            at = at if at is not None and math.isfinite(at) else math.nan
            report = RungReport(at, value, request.checkpoint, request.num_reports, trial.run)
            if trial.reports and _is_same(trial.reports[-1], report):  # asked again after a restart of this process
                return Verdict(trial.state == "running", self._milestone_of(trial))
            if score is None or len(self.metrics) > 1:  # of several, no scheduler decides, and Optuna takes no reports
                return self._decide_by_limit(trial, request)
            reported = trial.with_report(report)
            decision = self._decide({**self.trials, number: reported}, trial, request)
            cloned = None if decision.clone is None else self._clone(number, decision.clone)
            if decision.state != "running":
                self._tell(reported, decision.state, request.newest)
            self.recorded.record(
                TrialReported(
                    number,
                    report.time,
                    value,
                    request.checkpoint,
                    request.newest,
                    decision.state,
                    decision.milestone,
                    decision.reason,
                    cloned,
                    self._study.take_operations(),
                    num_reports=request.num_reports,
                    used_s=self.budget.used_s,
                )
            )
            return Verdict(decision.state == "running", decision.milestone)

    def _decide_by_limit(self, trial: TrialRecord, request: DecisionRequest) -> Verdict:
        """Return that a trial continues, unless it has reached a limit: then it ends, and has failed if it lacks a metric."""
        limit = reached_limit(self.search_config, request)
        if limit is None:
            return Verdict(True, self._milestone_of(trial))
        end = TrialEnd("completed", limit, request.newest)
        if all(math.isnan(report.value) for report in trial.reports):
            end = judge(end, self.metrics)
        self.end(trial.number, end, is_judged=True)
        return Verdict(False)

    @property
    def _sign(self) -> int:
        return 1 if self.search_config.modes[0] == "min" else -1

    def _decide(self, history: History, trial: TrialRecord, request: DecisionRequest) -> Decision:
        limit = reached_limit(self.search_config, request)
        return self._scheduler.decide(history, trial.number) if limit is None else Decision("completed", reason=limit)

    def _clone(self, number: int, clone: Clone) -> Cloned | None:
        """Pin another trial's checkpoint, and return the run in which a trial continues from it; None if there is none."""
        source, run = self.trials[clone.source], self._new_run(number)
        pinned = self._pin(source, run)
        if pinned is None:
            return None
        checkpoint, counted = pinned
        # The storage may lack a running source's latest records, and has newer ones if the decision's checkpoint was pruned.
        before = max(counted, source.reports[-1].num_reports if source.reports else 0)
        return Cloned(run, dict(clone.config), Source(source.number, source.run, checkpoint), before)

    def _tell(self, trial: TrialRecord, state: str, metrics: Metrics) -> None:
        """Add a trial that has paused or ended to the study."""
        if trial.is_cloned:  # its values are not those of the config that was suggested
            return
        known = (it for it in trial.reports if _is_told(it.value) and it.time >= 0)  # Optuna refuses a negative step
        on_the_way = tuple({int(it.time): it.value * self._sign for it in known}.items())
        if state in ("paused", "stopped"):
            self._study.observe(trial.study_number, Observation("pruned", intermediate=on_the_way))
            return
        values = [as_float(math.nan if (it := find_score(metrics, metric)) is None else it) for metric in self.metrics]
        signs = [1 if mode == "min" else -1 for mode in self.search_config.modes]
        numbers = tuple(value for value, sign in zip(values, signs, strict=True) if _is_told(value * sign))
        is_complete = state == "completed" and len(numbers) == len(values)
        observed = Observation("complete", numbers, on_the_way) if is_complete else Observation("failed")
        self._study.observe(trial.study_number, observed)

    def end(self, number: int, end: TrialEnd, *, is_judged: bool = False) -> TrialRecord:
        """Record that the run of a trial has ended; a completed one has failed if it lacks a metric, unless `is_judged`.

        A trial that has not reported since it went on from another one's checkpoint, which may have left nothing to train, has
        completed as it was before: its score is not that of its new config.
        """
        with self.recorded.lock:
            trial, former = self.trials[number], None
            if end.outcome == "completed" and not is_judged:
                judged = judge(end, self._needed_by(trial))
                if judged.outcome == "failed" or not end.has_reported:
                    former = trial.former
                end = judged if former is None else TrialEnd("completed", self._undone(trial), former.metrics)
            self._tell(former or trial, end.outcome, end.metrics)
            self.recorded.record(
                TrialEnded(
                    number,
                    end.outcome,
                    end.reason,
                    end.metrics,
                    self._study.take_operations(),
                    undoes_clone=former is not None,
                    used_s=self.budget.used_s,
                )
            )
            return self.trials[number]

    def _undone(self, trial: TrialRecord) -> str:
        """Return why a trial is again as it was before it went on from another one's checkpoint."""
        assert trial.source is not None
        return f"no report has {self.metrics[0]!r} since it went on from trial {trial.source.trial}, which is undone"

    def _needed_by(self, trial: TrialRecord) -> list[str]:
        """Return the metrics without which a trial has failed: also the scheduler's time, unless a report had it."""
        has_time = not self.search_config.is_timed_by_metric or any(not math.isnan(report.time) for report in trial.reports)
        return self.metrics if has_time or trial.milestone is None else [*self.metrics, self.search_config.time_attr]

    def raise_if_failed(self) -> None:
        """Raise if too many trials have failed, or a decision could not be recorded.

        Raises:
            SweepFailedError: With the first error.

        """
        if self._error is not None:
            raise self._error
        with self.recorded.lock:
            self._failures().raise_if_too_many(self.search_config.max_failed_trials)

    def raise_if_all_failed(self) -> None:
        """Raise if every trial has failed.

        Raises:
            SweepFailedError: With the first error.

        """
        with self.recorded.lock:
            self._failures().raise_if_all()

    def _failures(self) -> Failures:
        failed = self.recorded.in_state("failed") - set(self._restarts)  # those get another chance
        return Failures(self._sweep, self.trials, failed, has_completed=bool(self.recorded.in_state("completed")))

    def _start(self, number: int) -> TrialRecord:
        compared = compared_values(self.trials, self._scheduler, self.search_config, self._sampler)
        suggestion = self._study.suggest(number, compared)
        self.recorded.record(
            TrialStarted(
                number,
                self._new_run(number),
                suggestion.chosen,
                suggestion.study_number,
                self._scheduler.first_milestone(number),
                self._study.take_operations(),
                used_s=self.budget.used_s,
            )
        )
        return self.trials[number]

    def _new_run(self, number: int) -> str:
        return f"{self._sweep}/trial-{number:04d}-{secrets.token_hex(4)}"

    def _resume(self, promotion: Promotion) -> TrialRecord:
        cloned = None if promotion.clone is None else self._clone(promotion.number, promotion.clone)
        self.recorded.record(TrialResumed(promotion.number, promotion.milestone, cloned, used_s=self.budget.used_s))
        return self.trials[promotion.number]

    def take_excess(self, *, is_over: bool) -> tuple[tuple[int, str], ...]:
        """Return the runs whose checkpoints are to be deleted, with their trials' numbers; those trials cannot go on any more.

        Args:
            is_over: Whether the search has no more trials, so that none that is paused is resumed.

        """
        keep = self.search_config.keep_best_trials
        if keep is None and self._keeps_left_runs:
            return ()
        with self.recorded.lock:
            lost = frozenset() if keep is None else self._scheduler.lost(self.trials)
            if is_over and not self.budget.is_used_up:
                lost = frozenset(self.recorded.in_state("paused"))
            excess = find_excess(self.trials, lost, keep, self.metrics, self.search_config.modes)
            for number in excess.stopped:
                reason = f"{keep} better trials keep their checkpoints"
                metrics = self.trials[number].metrics
                self.recorded.record(TrialEnded(number, "stopped", reason, metrics, used_s=self.budget.used_s))
            return excess.runs

    def record_deleted(self, number: int, run: str) -> None:
        """Record that the checkpoints of a run of trial `number` have been deleted."""
        self.recorded.record(CheckpointsDeleted(number, run))


def _is_told(value: float) -> bool:
    """Return whether Optuna's study gets a value, where lower is better; minus infinity would be the best of all."""
    return value > -math.inf


def _is_same(known: RungReport, report: RungReport) -> bool:
    """Return whether two reports are one: by its checkpoint, or else by its number, which a kill may leave uncertain."""
    if (known.time, known.checkpoint) != (report.time, report.checkpoint):
        return False
    return known.checkpoint is not None or known.num_reports == report.num_reports
