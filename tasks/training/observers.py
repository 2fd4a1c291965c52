"""Who looks on at a training is told in a thread of its own, so that no page, event or console can hold the training up."""

import math
import queue
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prefect import get_run_logger
from prefect_torch.ckpt import Plan
from prefect_torch.ckpt.attempts import Attempt, Outcome
from prefect_torch.ckpt.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.manifest import Manifest

REFRESH_S = 1.0
_LONGEST_CLOSE_S = 20.0


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An attempt begins; its ranks restore `resumed_from` (a path or URL), or start from zero where that is None."""

    attempt: Attempt
    resumed_from: str | None


@dataclass(frozen=True, slots=True)
class CheckpointsPruned:
    """Retention has deleted `plan.drop`, and keeps the others for the reasons in `plan.keep`."""

    plan: Plan[Manifest]


@dataclass(frozen=True, slots=True)
class CheckpointQuarantined:
    """A checkpoint was found damaged and set aside."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt is over."""

    outcome: Outcome


Happening: TypeAlias = AttemptStarted | ReportEvent | CommitEvent | CheckpointsPruned | CheckpointQuarantined | AttemptEnded


class Observer(Protocol):
    """Somebody who looks on; both methods are called from one thread, and what they raise is logged, once for each observer."""

    def observe(self, happening: Happening) -> None:
        """Take note of what happened, in order; nothing is left out."""
        ...

    def refresh(self, *, final: bool) -> float | None:
        """Show what was noted: called about every second while there is news, and last with `final` when all is over.

        Who leaves something for later, to show it less often, returns after how many seconds to be called again, though
        nothing happens meanwhile; None means with the next news.
        """
        ...


class Audience:
    """The observers of one flow run, over all attempts of its training.

    Args:
        observers: They observe in this order, in the run context of whoever makes this object.

    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._news: queue.SimpleQueue[Happening | None] = queue.SimpleQueue()
        self._failing: set[Observer] = set()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="audience", daemon=True)
        self._thread.start()

    def tell(self, happening: Happening) -> None:
        """Let all observers know; returns at once."""
        self._news.put(happening)

    def close(self, longest_s: float = _LONGEST_CLOSE_S) -> None:
        """Return once everything that was told has been shown, or after `longest_s`."""
        self._news.put(None)
        self._thread.join(longest_s)
        if self._thread.is_alive():
            get_run_logger().warning("what the UI shows of this training may lack its end: Prefect took over %g s", longest_s)

    def _run(self) -> None:
        shown_s, due_s = 0.0, math.inf
        while True:
            try:
                happening = self._news.get(timeout=None if due_s == math.inf else max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                wait_s = self._refresh(final=False)
                shown_s = time.monotonic()
                due_s = shown_s + max(wait_s, REFRESH_S)
                continue
            if happening is None:
                self._refresh(final=True)
                return
            due_s = min(due_s, shown_s + REFRESH_S)
            for observer in self._observers:
                try:
                    observer.observe(happening)
                except Exception as exc:  # noqa: BLE001 - whatever a looker-on does wrong, the training goes on
                    self._tell_once(observer, exc)

    def _refresh(self, *, final: bool) -> float:
        """Return in how many seconds an observer wants to be called again; without end if none does."""
        soonest_s = math.inf
        for observer in self._observers:
            try:
                wait_s = observer.refresh(final=final)
            except Exception as exc:  # noqa: BLE001 - as above
                self._tell_once(observer, exc)
            else:
                soonest_s = soonest_s if wait_s is None else min(soonest_s, wait_s)
        return soonest_s

    def _tell_once(self, observer: Observer, exc: Exception) -> None:
        if observer not in self._failing:
            self._failing.add(observer)
            get_run_logger().warning("%s cannot be shown: %r; the training goes on", type(observer).__name__, exc, exc_info=exc)
