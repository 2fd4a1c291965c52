"""The trials that result from a sweep's events; each event is recorded before it takes effect."""

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, get_args

from .events import Event, Source, SweepLed, TrialEnded, TrialReported, encode_event
from .history import History, TrialRecord, TrialState, apply, operations_of, used_time_s


class RecordedTrials:
    """The trials of a sweep; safe to share between threads that hold `lock` while they decide.

    Args:
        events: The events so far.
        append: Records an entry in the journal; durable when it returns.
        observe: Receives each event once it is recorded, with the trials after it; it must not block.

    Attributes:
        lock: Is held while an event is recorded.
        by_number: Every trial, by number.
        operations: The operations of the study in the events so far.
        used_s: The time of the sweep in the events so far that counts against its budget.
        common: The config of all trials that start or resume now; None if an older version did not record it.

    """

    def __init__(
        self,
        events: Sequence[Event],
        append: Callable[[dict[str, Any]], None],
        observe: Callable[[Event, History], None] = lambda _, __: None,
    ) -> None:
        self._append = append
        self._observe = observe
        self.lock = threading.RLock()
        self.operations = operations_of(events)
        self.used_s = used_time_s(events)
        self.by_number: dict[int, TrialRecord] = {}
        self._numbers: dict[TrialState, set[int]] = {state: set() for state in get_args(TrialState)}
        self._released: list[tuple[Source, str]] = []
        self.common: dict[str, Any] | None = None
        for event in events:
            self._apply(event)

    def record(self, event: Event) -> None:
        """Record an event, and apply it to the trials."""
        with self.lock:
            self._append(encode_event(event))
            self._apply(event)
            self._observe(event, self.by_number)

    def in_state(self, state: TrialState) -> AbstractSet[int]:
        """Return the numbers of the trials in a state."""
        return self._numbers[state]

    def take_released(self) -> list[tuple[Source, str]]:
        """Return the sources that are no longer needed, each with the run that began from it, once."""
        with self.lock:
            released, self._released = self._released, []
            return released

    def _apply(self, event: Event) -> None:
        if isinstance(event, TrialReported | TrialEnded) and event.state != "failed":
            trial = self.by_number[event.trial]
            if trial.source is not None:  # the copy is committed: the trial has reported in its own run
                self._released.append((trial.source, trial.run))
                self.by_number[event.trial] = replace(trial, source=None)
        self.common = apply(self.by_number, event, self.common)
        self._count(event)

    def _count(self, event: Event) -> None:
        """Update the numbers of the trials in each state, so that no decision searches all trials for them."""
        if isinstance(event, SweepLed):
            if event.is_fresh:
                for numbers in self._numbers.values():
                    numbers.clear()
            return
        for numbers in self._numbers.values():
            numbers.discard(event.trial)
        self._numbers[self.by_number[event.trial].state].add(event.trial)
