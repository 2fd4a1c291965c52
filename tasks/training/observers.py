"""Observers of a training are notified in a thread of their own, so that no page, event or console can delay the training."""

import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from uuid import UUID

import httpx
from prefect_torch.ckpt import Plan
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.tasks.run_logs import get_run_logger

REFRESH_S = 1.0
_LONGEST_CLOSE_S = 20.0


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An attempt begins; its ranks restore `resumed_from` (a path or URL), or make a fresh start where that is None."""

    attempt: Attempt
    resumed_from: str | None


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """The ranks of an attempt are started; `task_runs` has the task run of each."""

    attempt: int
    task_runs: Mapping[int, UUID]


@dataclass(frozen=True, slots=True)
class CheckpointsPruned:
    """Retention has deleted `plan.drop`, and keeps the others for the reasons in `plan.keep`."""

    plan: Plan[Manifest]


@dataclass(frozen=True, slots=True)
class CheckpointQuarantined:
    """A checkpoint was found damaged and was quarantined."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt is over."""

    outcome: Outcome


TrainingEvent: TypeAlias = (
    AttemptStarted | RanksStarted | ReportEvent | CommitEvent | CheckpointsPruned | CheckpointQuarantined | AttemptEnded
)


class Observer(Protocol):
    """Shows a training; both methods are called from one thread, and the first exception of each observer is logged."""

    def observe(self, event: TrainingEvent, /) -> None:
        """Record an event; events come in order and none is left out."""
        ...

    def refresh(self, *, final: bool) -> float | None:
        """Show what was recorded; called about every second while there are events, and at the end with `final`.

        Returns:
            After how many seconds to be called again without an event, because something is left to show; None if nothing is.

        """
        ...


class Observers:
    """The observers of one flow run, over all attempts of its training.

    Args:
        observers: They are notified in this order, in the run context in which this object is made.

    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._events: queue.SimpleQueue[TrainingEvent | None] = queue.SimpleQueue()
        self._failing: set[Observer] = set()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="observers", daemon=True)
        self._thread.start()

    def notify(self, event: TrainingEvent) -> None:
        """Pass `event` to all observers; returns immediately."""
        self._events.put(event)

    def close(self, longest_s: float = _LONGEST_CLOSE_S) -> None:
        """Return once every event has been shown, or after `longest_s`."""
        self._events.put(None)
        self._thread.join(longest_s)
        if self._thread.is_alive():
            get_run_logger().warning("what the UI shows of this training may lack its end: Prefect took over %g s", longest_s)

    def _run(self) -> None:
        shown_s, due_s = 0.0, math.inf
        while True:
            try:
                event = self._events.get(timeout=None if due_s == math.inf else max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                wait_s = self._refresh(final=False)
                shown_s = time.monotonic()
                due_s = shown_s + max(wait_s, REFRESH_S)
                continue
            if event is None:
                self._refresh(final=True)
                return
            due_s = min(due_s, shown_s + REFRESH_S)
            for observer in self._observers:
                try:
                    observer.observe(event)
                except Exception as exc:  # noqa: BLE001 - whatever an observer does wrong, the training goes on
                    self._warn_once(observer, exc)

    def _refresh(self, *, final: bool) -> float:
        """Return in how many seconds an observer wants to be called again; infinity if none does."""
        soonest_s = math.inf
        for observer in self._observers:
            try:
                wait_s = observer.refresh(final=final)
            except Exception as exc:  # noqa: BLE001 - whatever an observer does wrong, the training goes on
                self._warn_once(observer, exc)
            else:
                soonest_s = soonest_s if wait_s is None else min(soonest_s, wait_s)
        return soonest_s

    def _warn_once(self, observer: Observer, exc: Exception) -> None:
        if observer not in self._failing:
            self._failing.add(observer)
            shown = None if isinstance(exc, httpx.HTTPError) else exc  # the frames of a request say nothing
            text = "what is shown of the training is not up to date: %r; the training goes on"
            get_run_logger().warning(text, exc, exc_info=shown)
