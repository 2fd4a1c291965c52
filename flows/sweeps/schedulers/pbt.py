"""Population based training (M. Jaderberg et al., 2017): bad trials go on from good ones' checkpoints and changed configs."""

import math
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from prefect_torch.flows.sweeps.journal.history import History, RungReport, TrialRecord
from prefect_torch.flows.sweeps.space import Choice, Constant, Integer, Nested, Node, Real

from .scheduling import Clone, Decision, Promotion, ResumesAll, is_score, sort_key

_FACTORS = (0.8, 1.2)


@dataclass(frozen=True, slots=True)
class PopulationBased(ResumesAll):
    """Compares the trials at each interval; the worst take over checkpoint and config of the best, and change the config.

    As in Ray Tune, a trial that takes over another's checkpoint is decided on one interval after the other's last decision, so
    that it has trained with its config by then, and trials that have come to an end are not compared. Ray compares the last
    score of each trial, whatever its time; here trials are compared in the same interval, however late in it each reports: of
    trials that run at the same time, the one that decides would else always have come the farthest, if times are seconds.

    Attributes:
        space: The space.
        interval: The time between two decisions on a trial.
        population: The number of trials.
        seed: The seed of the random choices.
        quantile: The share of the trials that counts as the best, and as the worst.
        resample_probability: The probability that a parameter is drawn anew instead of perturbed.

    """

    space: Nested
    interval: float
    population: int
    seed: int
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
        random = Random(f"{self.seed}/{number}/{len(trial.reports) - 1}")  # noqa: S311 - no secret
        source = self._source(history, trial, random)
        if source is not None:
            config = self.space_perturbed(source.config, random)
            reason = f"goes on from trial {source.number} at {time:g}"
            return Decision("paused", self._next(source), reason, Clone(source.number, config))
        behind = any(it.state == "paused" and self._due(it) <= following for it in history.values())
        if behind or len(history) < self.population:
            return Decision("paused", following, f"waits for the others at {time:g}")
        return Decision("running", following)

    def promote(self, history: History) -> Promotion | None:
        """Return the paused trial whose next decision is due first."""
        paused = [trial for trial in history.values() if trial.state == "paused"]
        if not paused:
            return None
        trial = min(paused, key=lambda it: (self._due(it), it.number))
        return Promotion(trial.number, self._due(trial))

    def space_perturbed(self, config: dict[str, Any], random: Random) -> dict[str, Any]:
        """Return `config` with every chosen value perturbed or drawn anew."""
        changed = _perturbed(self.space, config, random, self.resample_probability)
        assert isinstance(changed, dict)
        return changed

    def _source(self, history: History, trial: TrialRecord, random: Random) -> TrialRecord | None:
        now = self._interval_of(trial.reports[-1])
        reached = [
            it
            for it in history.values()
            if it.state in ("running", "paused") and it.reports and self._interval_of(it.reports[-1]) >= now
        ]
        values = {it.number: self._value_in(it, now) for it in reached}
        best_first = sorted(reached, key=lambda it: (*sort_key(values[it.number]), it.number))
        count = min(math.ceil(len(reached) * self.quantile), len(reached) // 2)
        if count == 0 or trial.number not in [it.number for it in best_first[-count:]]:
            return None
        # One that has just taken over a checkpoint itself has none of its own yet, and its config is untried.
        best = [
            it
            for it in best_first[:count]
            if it.source is None and it.reports[-1].checkpoint is not None and is_score(values[it.number])
        ]
        return random.choice(best) if best else None

    def _due(self, trial: TrialRecord) -> float:
        """Return the time of a paused trial's next decision; its own reports do not show it once it takes over a checkpoint."""
        return self._next(trial) if trial.milestone is None else trial.milestone

    def _next(self, trial: TrialRecord) -> float:
        """Return the end of the interval after a trial's newest report with a finite time."""
        time = next((report.time for report in reversed(trial.reports) if not math.isnan(report.time)), 0.0)
        return (math.floor(time / self.interval + 1e-9) + 1) * self.interval

    def _interval_of(self, report: RungReport) -> float:
        """Return the number of the interval after whose end a report is decided on; NaN without a time."""
        return (report.time / self.interval + 1e-9) // 1

    def _value_in(self, trial: TrialRecord, interval: float) -> float:
        """Return the value of a trial's last report up to an interval of that number; NaN if it has none."""
        return next((it.value for it in reversed(trial.reports) if self._interval_of(it) <= interval), math.nan)


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
