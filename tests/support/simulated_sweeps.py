"""Sweeps whose trials are a few numbers in this process: what a search decides, without any training."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.events import decode_event
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.trial_end import TrialEnd


@dataclass
class Simulation:
    """A sweep of simulated trials, one step of each running trial at a time.

    Args:
        config: Its configuration.
        space: Its space.
        advance: Returns the state of a trial after one more step, and the value that it reports; of a new trial it is None.
        epochs: After how many steps a trial is over.
        most_steps: The total number of steps of all trials; None for no limit.
        seed: The seed of all choices.
        keeps_left_runs: Whether runs that a trial has left for another one's checkpoint keep theirs.

    """

    config: SearchConfig
    space: dict[str, Any]
    advance: Callable[[Any, dict[str, Any], int], tuple[Any, float]]
    epochs: int
    most_steps: int | None = None
    seed: int = 0
    keeps_left_runs: bool = True
    entries: list[dict[str, Any]] = field(default_factory=list)
    states: dict[tuple[str, int], Any] = field(default_factory=dict)  # checkpoints: by run and step
    steps: dict[str, int] = field(default_factory=dict)  # the newest checkpoint of each run
    newest: dict[str, Metrics] = field(default_factory=dict)  # the newest report of each run
    total: int = 0
    pinned: set[tuple[str, str]] = field(default_factory=set)
    deleted: list[str] = field(default_factory=list)  # the runs whose checkpoints are gone

    def lead(self, stop_after: int | None = None) -> Search:
        """Run until the search has no more, or is killed after so many steps; started again it goes on."""
        events = [event for entry in self.entries if (event := decode_event(entry, "test")) is not None]
        search = Search(
            self.config,
            parse_space(self.space),
            self.seed,
            RecordedTrials(events, self.entries.append),
            "sweep",
            self._pin,
            keeps_left_runs=self.keeps_left_runs,
        )
        running = [trial.number for trial in search.running()]
        while stop_after is None or self.total < stop_after:
            while len(running) < self.config.max_concurrent and not self._is_spent:
                trial = search.next_trial()
                if trial is None:
                    break
                running.append(trial.number)
            self._delete_excess(search, is_over=not running)
            if not running or self._is_spent:
                break
            running = [number for number in running if self._step(search, number)]
        return search

    @property
    def _is_spent(self) -> bool:
        return self.most_steps is not None and self.total >= self.most_steps

    def _delete_excess(self, search: Search, *, is_over: bool) -> None:
        for number, run in search.take_excess(is_over=is_over):
            for known, step in list(self.states):
                if known == run:
                    del self.states[known, step]
            search.record_deleted(number, run)
            self.deleted.append(run)

    def _pin(self, source, run) -> tuple[str, int] | None:
        step = self.steps[source.run]
        self.pinned.add((source.run, str(step)))
        return str(step), step

    def _step(self, search: Search, number: int) -> bool:
        """Let a trial take a step, commit it and ask if it must; return whether it goes on."""
        trial = search.trials[number]
        if trial.run not in self.steps and trial.source is not None:
            step = int(trial.source.checkpoint)
            state = self.states[trial.source.run, step]
        else:
            step = self.steps.get(trial.run, 0)
            state = self.states[trial.run, step] if step else None
        if step >= self.epochs:  # nothing is left to train
            known = self.newest.get(trial.run)
            search.end(number, TrialEnd("completed", None, known or {}, has_reported=known is not None))
            return False
        state, value = self.advance(state, trial.config, step)
        step += 1
        self.total += 1
        self.states[trial.run, step], self.steps[trial.run] = state, step
        metrics = self.newest[trial.run] = {"loss": value}
        points = search.points(number, lambda: 0)
        asks = points is not None and (
            (points.milestone is not None and step >= points.milestone) or any(step >= it for it in points.stop.values())
        )
        if asks and not search.decide(number, DecisionRequest(0, step, step, metrics, f"{trial.run}/{step}")).goes_on:
            return False
        if step >= self.epochs:
            search.end(number, TrialEnd("completed", None, metrics))
            return False
        return True

    def best(self, search: Search) -> float:
        return min(trial.metrics["loss"] for trial in search.trials.values() if "loss" in trial.metrics)


def follow_schedule(state, config, step):
    """The best rate falls with the steps, so that no fixed one is good all the time."""
    distance = 1.0 if state is None else state
    decades_off = math.log10(config["rate"]) - math.log10(0.5 * 0.9**step)
    distance *= 1 - 0.3 * math.exp(-((3 * decades_off) ** 2))
    return distance, distance
