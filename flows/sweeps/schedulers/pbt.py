"""Population based training (M. Jaderberg et al., 2017): bad trials go on from good ones' checkpoints and changed configs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, ClassVar

from prefect_torch.flows.sweeps.journal.history import History, RungReport, TrialRecord
from prefect_torch.flows.sweeps.space import Choice, Constant, Integer, Nested, Node, Real

from .scheduling import Clone, Decision, Promotion, ResumesAll, is_score, sort_key

_FACTORS = (0.8, 1.2)
_GOING_ON = ("running", "paused")


@dataclass(frozen=True, slots=True)
class PopulationBased(ResumesAll):
    """Compares the trials at each interval; the worst take over checkpoint and config of the best, and change the config.

    A trial is judged before it goes on after an interval: at its report, or, if it waits there for others, when it is resumed.
    It is compared with each other one in the newest interval that both have finished, however late in it each reports, and by
    what it has reported since it last took over a checkpoint. It is among the worst once so many are known to be better, of all
    trials, also those that have not begun: so it does not matter which trials finish an interval first. In Ray Tune a trial is
    compared with the last score of each other one, whatever its time, and the one that has come the farthest seems the best.

    A trial that has completed is compared with those that have not come farther, and not taken over.
    A trial waits only while others that have come less far need its place: trials with a place each do not end and begin again
    in each interval.

    What is taken over is the newest checkpoint of another trial, which must be no worse than the trial that takes it over.

    Attributes:
        space: The space.
        interval: The time between two decisions on a trial.
        population: The number of trials.
        seed: The seed of the random choices.
        places: How many trials run at once.
        quantile: The share of the trials that counts as the best, and as the worst.
        resample_probability: The probability that a parameter is drawn anew instead of perturbed.

    """

    space: Nested
    interval: float
    population: int
    seed: int
    places: int = 1
    quantile: float = 0.25
    resample_probability: float = 0.25
    asks_always: ClassVar[bool] = False
    promotes_first: ClassVar[bool] = False

    def first_milestone(self, number: int) -> float | None:  # noqa: ARG002 - the signature of Scheduler
        """Return the first interval's end."""
        return self.interval

    def decide(self, history: History, number: int) -> Decision:
        """Return whether the trial goes on, waits for the others, or takes over another's checkpoint."""
        trial = history[number]
        time, following = trial.reports[-1].time, self._next(trial)
        if self._must_wait(history, following):
            return Decision("paused", following, f"waits for the others at {time:g}")
        taken = self._takeover(history, trial)
        if taken is None:
            return Decision("running", following)
        milestone, clone = taken
        return Decision("paused", milestone, f"goes on from trial {clone.source} at {time:g}", clone)

    def promote(self, history: History) -> Promotion | None:
        """Return a paused trial whose next decision is due first: one of the worst first, while the best still wait there."""
        paused = sorted(
            (trial for trial in history.values() if trial.state == "paused"), key=lambda it: (self._due(it), it.number)
        )
        if not paused:
            return None
        due = self._due(paused[0])
        for trial in paused:
            if self._due(trial) == due and (taken := self._takeover(history, trial)) is not None:
                return Promotion(trial.number, *taken)
        return Promotion(paused[0].number, due)

    def space_perturbed(self, config: dict[str, Any], random: Random) -> dict[str, Any]:
        """Return `config` with every chosen value perturbed or drawn anew."""
        changed = _perturbed(self.space, config, random, self.resample_probability)
        assert isinstance(changed, dict)
        return changed

    def _must_wait(self, history: History, following: float) -> bool:
        """Return whether trials that have come less far than one that is due next at `following` need its place."""
        behind = sum(it.state == "paused" and self._due(it) < following for it in history.values())
        free = self.places - sum(it.state == "running" for it in history.values())
        return behind + max(0, self.population - len(history)) > max(0, free)

    def _takeover(self, history: History, trial: TrialRecord) -> tuple[float, Clone] | None:
        """Return what a trial takes over, and when it is decided on then; None if it goes on from its own checkpoint."""
        random = Random(f"{self.seed}/{trial.number}/{len(trial.reports) - 1}")  # noqa: S311 - no secret
        best = self._best_for(history, trial)
        if not best:
            return None
        source = random.choice(best)
        return self._next(source), Clone(source.number, self.space_perturbed(source.config, random))

    def _best_for(self, history: History, trial: TrialRecord) -> list[TrialRecord]:
        """Return the best trials of those whose checkpoint a trial can take over; none if it is not among the worst."""
        rivals = self._rivals(history, trial)
        size = 1 + len(rivals) + max(0, self.population - len(history))
        count = min(math.ceil(size * self.quantile), size // 2)
        better = [it for it in rivals if self._is_better(it, trial)]
        if len(better) < size - count:
            return []
        usable = [it for it in better if self._is_usable(it, trial)]
        return sorted(usable, key=lambda it: (-self._lead(it, rivals), it.number))[:count]

    def _rivals(self, history: History, trial: TrialRecord) -> list[TrialRecord]:
        """Return the trials that another one is compared with: those that go on, and those that have completed no earlier."""
        others, finished = [it for it in history.values() if it.number != trial.number], self._finished(trial)
        return [it for it in others if it.state in _GOING_ON or (it.state == "completed" and self._finished(it) >= finished)]

    def _is_better(self, one: TrialRecord, other: TrialRecord) -> bool:
        """Return whether `one` is known to be better in the newest interval that both have finished, or as good and older."""
        common = min(self._finished(one), self._finished(other))
        first, second = self._value_in(one, common), self._value_in(other, common)
        if common == 0 or first is None or second is None:
            return False
        return (*sort_key(first), one.number) < (*sort_key(second), other.number)

    def _is_usable(self, source: TrialRecord, trial: TrialRecord) -> bool:
        """Return whether a trial can take over the newest checkpoint of a better one; that one may have diverged since then."""
        newest, own = source.reports[-1], self._value_in(trial, self._finished(source))
        assert own is not None
        is_no_worse = is_score(newest.value) and sort_key(newest.value) <= sort_key(own)
        return is_no_worse and source.state in _GOING_ON and newest.checkpoint is not None

    def _lead(self, trial: TrialRecord, rivals: list[TrialRecord]) -> int:
        """Return how many more trials one is better than are better than it (A. Copeland, 1951): some pairs do not compare."""
        return sum(self._is_better(trial, it) - self._is_better(it, trial) for it in rivals)

    def _due(self, trial: TrialRecord) -> float:
        """Return the time of a paused trial's next decision; its own reports do not show it once it takes over a checkpoint."""
        return self._next(trial) if trial.milestone is None else trial.milestone

    def _next(self, trial: TrialRecord) -> float:
        """Return the end of the interval after those that a trial has finished."""
        return (self._finished(trial) + 1) * self.interval

    def _finished(self, trial: TrialRecord) -> int:
        """Return how many intervals a trial has finished, by its newest report with a finite time."""
        time = next((report.time for report in reversed(trial.reports) if not math.isnan(report.time)), 0.0)
        return self._interval_of(time)

    def _interval_of(self, time: float) -> int:
        """Return the number of the interval that has ended last at a time."""
        return math.floor(time / self.interval + 1e-9)

    def _value_in(self, trial: TrialRecord, interval: int) -> float | None:
        """Return the value of a trial at the end of that interval, or else of the newest one before it; None without one."""
        return next((it.value for it in _compared_reports(trial) if self._interval_of(it.time) <= interval), None)


def _compared_reports(trial: TrialRecord) -> Iterator[RungReport]:
    """Yield the reports of a trial's present run by which it is compared: not the one that completed it in mid-interval.

    The newest first: hardly any comparison needs the others.
    """
    own = (report for report in reversed(trial.reports) if report.run == trial.run)
    is_ended_by_last = trial.state == "completed" and trial.milestone is None
    return (report for report in islice(own, int(is_ended_by_last), None) if not math.isnan(report.time))


class RandomDraw:
    """Draws the values of parameters from a generator of random numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def real(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float:  # noqa: ARG002 - the signature of Draw
        """Return a float."""
        if log:
            return min(high, max(low, math.exp(self._random.uniform(math.log(low), math.log(high)))))
        value = self._random.uniform(low, high)
        return value if step is None else _on_step(value, low, high, step)

    def integer(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        """Return an integer."""
        if log:  # as Optuna's samplers do, a half beyond each bound, else these would be drawn half as often
            return min(high, max(low, round(self.real(name, low - 0.5, high + 0.5, step=None, log=True))))
        return self._random.randrange(low, high + 1, step)

    def category(self, name: str, labels: Any) -> Any:  # noqa: ARG002 - the signature of Draw
        """Return one of `labels`."""
        return self._random.choice(labels)


def _perturbed(node: Node, value: Any, random: Random, resample: float) -> Any:
    if isinstance(node, Nested):
        return {key: _perturbed(inner, value[key], random, resample) for key, inner in node.items}
    if isinstance(node, Constant):
        return value
    if random.random() < resample:
        return node.suggest("", RandomDraw(random))
    if isinstance(node, Choice):
        return _perturbed_choice(node, value, random, resample)
    return _scaled(node, value, random.choice(_FACTORS))


def _scaled(node: Real | Integer, value: Any, factor: float) -> Any:
    """Return `value * factor` within the bounds; of a domain with steps, the next step to it, and another one than before."""
    scaled = min(node.high, max(node.low, value * factor))
    if node.step is None:
        return scaled
    before, after = (round((it - node.low) / node.step) for it in (value, scaled))
    if after == before:  # a fifth of a small value is less than half a step
        after += 1 if (factor > 1) == (value >= 0) else -1
    return min(node.high, max(node.low, node.low + after * node.step))


def _on_step(value: float, low: float, high: float, step: float) -> float:
    """Return the multiple of `step` from `low` that is next to `value`; in binary, 0.1 + 3 * 0.2 is above 0.7."""
    return min(high, low + round((value - low) / step) * step)


def _perturbed_choice(node: Choice, value: Any, random: Random, resample: float) -> Any:
    """Return the neighbour of a plain option; an option with domains of its own stays, and they are perturbed."""
    label = node.parameters("", value)[""]
    number = node.labels.index(label)
    if isinstance(node.options[number], Nested):
        return _perturbed(node.options[number], value, random, resample)
    neighbour = min(len(node.options) - 1, max(0, number + random.choice((-1, 1))))
    option = node.options[neighbour]
    return option.suggest("", RandomDraw(random))
