"""The events and the trials of a sweep as its storage has them."""

from collections.abc import Iterable

from prefect_torch.ckpt.runs.run import Run

from .events import Event, decode_event
from .history import TrialRecord, history_of
from .journal import Entry, read_journal


def read_events(run: Run) -> list[Event]:
    """Return the events of a sweep, from its beginning, without those that a newer version alone knows.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    return events_of(run, read_journal(run))


def events_of(run: Run, entries: Iterable[Entry]) -> list[Event]:
    """Return the events in entries of a sweep's journal, without those that a newer version alone knows."""
    where = f"the journal of sweep {run.name!r}"
    return [event for entry in entries if (event := decode_event(entry, where)) is not None]


def read_trials(run: Run) -> dict[int, TrialRecord]:
    """Return the trials of a sweep, by number; costs reading its journal.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    return history_of(read_events(run))
