"""Asynchronous successive halving by promotion, and hyperband, which is made of it.

L. Li et al., A System for Massively Parallel Hyperparameter Tuning (ASHA), MLSys 2020, algorithm 2: a trial pauses at a rung,
and the best 1/eta of those that have reached it are resumed, the highest rung first. Hyperband: L. Li et al., JMLR 2018.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import ClassVar, TypeAlias

from prefect_torch.flows.sweeps.journal.history import History, RungReport, TrialRecord

from .scheduling import Decision, Promotion, is_score, sort_key

_ENOUGH = 10  # trials at a rung for a model; as many suggestions of tpe and gp are random before they fit one
_Reached: TypeAlias = list[tuple[TrialRecord, list[RungReport]]]  # trials, each with its report at each rung that it reached


@dataclass(frozen=True, slots=True)
class Asha:
    """Pauses every trial at each rung, and resumes the best.

    Attributes:
        grace_period: The time of the first rung.
        reduction_factor: Of the trials at a rung, one in this many is resumed; each rung is this many times the one before.
        max_t: The time at which a trial is complete.
        population: The number of trials. Once all have paused, the best is resumed though fewer than `reduction_factor` have.
        brackets: How many of as many trials as they have together each bracket gets; the number of a bracket is that of its
            trials' first rung.
        most_rungs: How many rungs before `max_t` the first bracket has, each next bracket one fewer; None for all that fit.

    """

    grace_period: float
    reduction_factor: float
    max_t: float
    population: int
    brackets: tuple[int, ...] = (1,)
    most_rungs: int | None = None
    asks_always: ClassVar[bool] = False
    promotes_first: ClassVar[bool] = True

    def first_milestone(self, number: int) -> float | None:
        """Return the first rung of the trial's bracket."""
        return self.rungs(self.bracket_of(number))[0]

    def rungs(self, bracket: int) -> list[float]:
        """Return the times of a bracket's rungs; the last is `max_t`."""
        times: list[float] = []
        time = self.grace_period * self.reduction_factor**bracket
        most = math.inf if self.most_rungs is None else self.most_rungs - bracket
        while time < self.max_t and len(times) < most:
            times.append(time)
            time *= self.reduction_factor
        return [*times, self.max_t]

    def bracket_of(self, number: int) -> int:
        """Return the bracket of a trial: of few trials in a row, each bracket has about its share."""
        place = number * _stride(sum(self.brackets)) % sum(self.brackets)
        for bracket, count in enumerate(self.brackets):
            if place < count:
                return bracket
            place -= count
        raise AssertionError(place)

    def sizes(self, num_trials: int) -> list[int]:
        """Return how many of the first `num_trials` trials each bracket gets; a search may have a billion of them."""
        total = sum(self.brackets)
        below = [_num_below(bound, num_trials, _stride(total), total) for bound in accumulate(self.brackets, initial=0)]
        return [high - low for low, high in pairwise(below)]

    def decide(self, history: History, number: int) -> Decision:
        """Return the decision: the trial completes at the last rung, continues if it is promoted now, and else pauses."""
        trial = history[number]
        rungs = self.rungs(self.bracket_of(number))
        rung = len(_at_rungs(trial, rungs)) - 1
        if rung < 0:
            return Decision("running", rungs[0])
        if rung >= len(rungs) - 1:
            return Decision("completed", reason=f"max_t={self.max_t:g}")
        promoted = self.promote({**history, number: replace(trial, state="paused")})
        if promoted is not None and promoted.number == number:
            return Decision("running", promoted.milestone)
        return Decision("paused", reason=f"waits at rung {rung + 1} (at {rungs[rung]:g})")

    def promote(self, history: History) -> Promotion | None:
        """Return a paused trial that is among the best 1/eta of those that have reached its rung; the highest rung first.

        If there is none, return one that another scheduler, or other rungs, paused before its first rung.
        """
        brackets = self._by_bracket(history)
        is_last_call = len(history) >= self.population and not any(it.state == "running" for it in history.values())
        for to_go in range(1, max(len(rungs) for rungs, _ in brackets)):  # from the rung before the last one down
            for rungs, members in brackets:
                if (rung := len(rungs) - 1 - to_go) < 0:
                    continue
                number = self._promotable(members, rung, is_last_call=is_last_call)
                if number is not None:
                    return Promotion(number, rungs[rung + 1])
        early = [
            Promotion(it.number, rungs[0])
            for rungs, members in brackets
            for it, reports in members
            if it.state == "paused" and not reports
        ]
        return min(early, key=lambda it: it.number, default=None)

    def lost(self, history: History) -> frozenset[int]:
        """Return the paused trials that so many others beat at their rung that they are never resumed, however many reach it.

        This holds while none of the better trials fails, and the number of trials does not change.
        """
        sizes = self.sizes(max(self.population, len(history)))
        lost = set()
        for bracket, (rungs, members) in enumerate(self._by_bracket(history)):
            for rung in range(len(rungs) - 1):
                lost |= self._lost_at(members, rung, sizes[bracket])
        return frozenset(lost)

    def _lost_at(self, members: _Reached, rung: int, size: int) -> set[int]:
        reached = _that_reached(members, rung)
        ended = ("completed", "stopped", "failed")
        never = sum(it.state in ended for it, _ in members) - sum(it.state in ended for it, _ in reached)
        most = max(1, math.floor((size - never) / self.reduction_factor))
        return {
            it.number
            for place, (it, reports) in enumerate(_best_first(reached, rung))
            if it.state == "paused" and len(reports) == rung + 1 and (place >= most or not is_score(reports[rung].value))
        }

    def compared(self, history: History, *, with_behind: bool) -> Mapping[int, float | None]:
        """Return the values at the highest rung that ten trials have reached; see `Scheduler`.

        S. Falkner et al., BOHB: Robust and Efficient Hyperparameter Optimization at Scale, ICML 2018, section 3.2. Values at
        different rungs do not compare: the early ones show which config is fast. A trial whose value is no score is as bad as
        the worst at the rung, and so is one that has stayed behind, `with_behind`.
        """
        values_of = {it.number: self._value_by_rung(it) for it in history.values() if it.state != "failed" and not it.is_cloned}
        counts = Counter(rung for values in values_of.values() for rung, value in values.items() if is_score(value))
        rung = max((rung for rung, count in counts.items() if count >= _ENOUGH), default=None)
        if rung is None:
            return {}
        worst = max(value for values in values_of.values() if is_score(value := values.get(rung, math.nan)))
        found: dict[int, float | None] = {}
        for number, values in values_of.items():
            is_behind = bool(values) and max(values) < rung
            if not values or (is_behind and history[number].state == "completed"):
                continue  # its function has returned before
            is_bad = not all(map(is_score, values.values())) or (is_behind and with_behind)
            found[number] = worst if is_bad else values.get(rung)
        return found

    def _value_by_rung(self, trial: TrialRecord) -> dict[int, float]:
        """Return a trial's value at each rung that it has reached, counted from the first rung of the first bracket."""
        bracket = self.bracket_of(trial.number)
        return {rung: report.value for rung, report in enumerate(_at_rungs(trial, self.rungs(bracket)), bracket)}

    def _by_bracket(self, history: History) -> list[tuple[list[float], _Reached]]:
        """Return the rungs of each bracket, and its trials; once for all rungs, since a sweep has hundreds of trials."""
        brackets: list[tuple[list[float], _Reached]] = [(self.rungs(bracket), []) for bracket in range(len(self.brackets))]
        for trial in history.values():
            rungs, members = brackets[self.bracket_of(trial.number)]
            members.append((trial, _at_rungs(trial, rungs)))
        return brackets

    def _promotable(self, members: _Reached, rung: int, *, is_last_call: bool) -> int | None:
        best = _best_first(_that_reached(members, rung), rung)
        count = math.floor(len(best) / self.reduction_factor)
        if is_last_call and not any(len(reports) > rung + 1 for _, reports in best):
            count = max(1, count)
        for trial, reports in best[:count]:
            if trial.state == "paused" and len(reports) == rung + 1 and is_score(reports[rung].value):
                return trial.number
        return None


def _that_reached(members: _Reached, rung: int) -> _Reached:
    """Return the trials that have reached a rung."""
    return [(it, reports) for it, reports in members if len(reports) > rung]


def _at_rungs(trial: TrialRecord, rungs: Sequence[float]) -> list[RungReport]:
    """Return a trial's report at each rung that it has reached: the first at or after the rung's time.

    A report counts at every rung that it has passed, as in Optuna's SuccessiveHalvingPruner. If it counted at the lowest only,
    trials that report each 500 steps would be at rungs 1, 3 and 9 after 500, 1000 and 1500 steps, and a third of them left each
    time.
    """
    found: list[RungReport] = []
    for report in trial.reports:
        while len(found) < len(rungs) and report.time >= rungs[len(found)]:
            found.append(report)
    return found


def _best_first(reached: _Reached, rung: int) -> _Reached:
    """Return the trials that have reached a rung and not failed, the best there first; of equal ones, the older first."""
    alive = [(it, reports) for it, reports in reached if it.state != "failed"]
    return sorted(alive, key=lambda one: (*sort_key(one[1][rung].value), one[0].number))


@cache
def _stride(total: int) -> int:
    """Return the step with which trials take the places of all brackets: each once, and any few in a row evenly spread.

    A Kronecker sequence of the golden ratio, as integers (D. Knuth, The Art of Computer Programming 3, section 6.4, theorem S).
    """
    return next(it for it in range(round(total * (math.sqrt(5) - 1) / 2), total + 1) if math.gcd(it, total) == 1)


def _num_below(bound: int, count: int, step: int, total: int) -> int:
    """Return how many of the first `count` multiples of `step` have a remainder below `bound` when divided by `total`."""
    return count + _floor_sum(count, step, 0, total) - _floor_sum(count, step, total - bound, total)


def _floor_sum(count: int, step: int, first: int, divisor: int) -> int:
    """Return the sum of (first + step * n) // divisor for n from 0 to count - 1, in as many steps as Euclid's algorithm.

    R. Graham, D. Knuth, O. Patashnik, Concrete Mathematics, section 3.5: the points below a line are counted by rows instead of
    columns, which exchanges the step and the divisor.
    """
    whole = count * (count - 1) // 2 * (step // divisor) + count * (first // divisor)
    rows, rest = divmod(step % divisor * count + first % divisor, divisor)
    return whole + (_floor_sum(rows, divisor, rest, step % divisor) if rows else 0)


def hyperband(grace_period: float, reduction_factor: float, max_t: float, population: int) -> Asha:
    """Return brackets of successive halving, from one with many trials and an early first rung to one without rungs.

    The brackets have as many trials and rungs as in the paper, also if `max_t` is no power of the factor. The paper counts the
    rungs from `max_t` down; here they are those of `Asha`, from `grace_period` up. The paper fills one bracket after the other,
    the first with 81 trials for `max_t=81`; here, as in Optuna's HyperbandPruner, which draws the bracket of each trial with
    probabilities of these sizes, few trials have all brackets, too: a slow starter survives in those with late first rungs.
    """
    most = max(0, math.floor(math.log(max_t / grace_period, reduction_factor) + 1e-9))
    counts = tuple(
        math.ceil((most + 1) / (left + 1) * reduction_factor**left) for left in range(most, -1, -1)
    )  # of the bracket with `left` rungs before max_t
    return Asha(grace_period, reduction_factor, max_t, population, counts, most)
