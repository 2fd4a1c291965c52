"""The interface of schedulers, and their decisions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from prefect_torch.flows.sweeps.journal.history import History

WITH_RUNGS = ("asha", "hyperband", "pbt")  # the schedulers that decide at rungs


@dataclass(frozen=True, slots=True)
class Clone:
    """A trial goes on from the checkpoint of another one.

    Attributes:
        source: The number of the other trial.
        config: The config that it goes on with.

    """

    source: int
    config: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a trial does after a report.

    Attributes:
        state: "running": it goes on. "paused": it ends, and may be resumed. "stopped" and "completed": it ends for good.
        milestone: The time from which the first report with a checkpoint of a continuing trial needs a decision; None if never.
        reason: Why it ends, or waits.
        clone: The trial whose checkpoint and config it takes over; it is paused until it is resumed with them.

    """

    state: Literal["running", "paused", "stopped", "completed"]
    milestone: float | None = None
    reason: str | None = None
    clone: Clone | None = None


@dataclass(frozen=True, slots=True)
class Promotion:
    """A paused trial that is to be resumed.

    Attributes:
        number: Its number.
        milestone: The time from which its first report with a checkpoint needs a decision.
        clone: The trial whose checkpoint and config it takes over; None if it goes on from its own.

    """

    number: int
    milestone: float | None
    clone: Clone | None = None


class Scheduler(Protocol):
    """Decides from the history alone; a lower value is better, and a value that is no score (see `is_score`) is the worst.

    Attributes:
        asks_always: Whether every report from the milestone on needs a decision; else only the first with a checkpoint does.
        promotes_first: Whether paused trials are resumed before new ones start.

    """

    asks_always: ClassVar[bool]
    promotes_first: ClassVar[bool]

    def first_milestone(self, number: int) -> float | None:
        """Return the milestone of a new trial."""
        ...

    def decide(self, history: History, number: int) -> Decision:
        """Return the decision on trial `number`, whose newest report is in the history."""
        ...

    def promote(self, history: History) -> Promotion | None:
        """Return the paused trial that is resumed next, if any may be."""
        ...

    def lost(self, history: History) -> frozenset[int]:
        """Return the paused trials that are never resumed, whatever the others report."""
        ...

    def compared(self, history: History, *, with_behind: bool) -> Mapping[int, float | None]:
        """Return the values by which a model of the trials compares them, instead of those at their ends.

        Args:
            history: The trials.
            with_behind: Whether trials that did not get as far as the compared ones count as the worst of these: a model that
                never saw them would suggest the same config again and again.

        Returns:
            The value of each trial that it compares, by number, and None for each that the model does not see.

        """
        ...


class ResumesAll:
    """Resumes every paused trial: the scheduler pauses none for good, and another one may have paused some before."""

    __slots__ = ()

    def promote(self, history: History) -> Promotion | None:
        """Return the first paused trial."""
        paused = [number for number, trial in sorted(history.items()) if trial.state == "paused"]
        return Promotion(paused[0], None) if paused else None

    def lost(self, history: History) -> frozenset[int]:  # noqa: ARG002 - the signature of Scheduler
        """Return an empty set: every paused trial is resumed."""
        return frozenset()

    def compared(self, history: History, *, with_behind: bool) -> Mapping[int, float | None]:  # noqa: ARG002 - as above
        """Return an empty mapping: the trials are compared at their ends."""
        return {}


class RunToTheEnd(ResumesAll):
    """Lets every trial run until its function returns."""

    asks_always: ClassVar[bool] = False
    promotes_first: ClassVar[bool] = True

    def first_milestone(self, number: int) -> float | None:  # noqa: ARG002 - the signature of Scheduler
        """Return None: no trial asks."""
        return None

    def decide(self, history: History, number: int) -> Decision:  # noqa: ARG002 - the signature of Scheduler
        """Return that the trial goes on."""
        return Decision("running")


def is_score(value: float) -> bool:
    """Return whether trials can be compared by a value: not by NaN, nor by an infinite one."""
    return math.isfinite(value)


def sort_key(value: float) -> tuple[bool, float]:
    """Return a key that sorts values, the best first, and values that are no score last."""
    return (False, value) if is_score(value) else (True, 0.0)
