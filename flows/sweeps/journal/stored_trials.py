"""The events and the trials of a sweep as its storage has them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts
from prefect_torch.ckpt.runs.layout import TRIAL_NAME
from prefect_torch.ckpt.runs.run import Run

from .events import Event, SweepLed, TrialReported, TrialResumed, TrialStarted, decode_event
from .history import TrialRecord, history_of
from .journal import Entry, LostEntries, damaged, place_of, read_journal, read_known_entries


def read_events(run: Run) -> list[Event]:
    """Return the events of a sweep, from its beginning, without those that only a newer version knows.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    return whole_events_of(run, read_journal(run))


def events_of(run: Run, entries: Mapping[int, Entry]) -> tuple[list[Event], LostEntries | None]:
    """Return the events in entries of a sweep's journal, without those that only a newer version knows, and the malformed ones.

    The names of runs in them are those below `run`, even if its directory has been renamed since.
    """
    events: list[Event] = []
    malformed: dict[int, str] = {}
    for number, entry in entries.items():
        try:
            event = decode_event(_below(run.name, entry), f"entry {number} of the journal of sweep {run.name!r}")
        except MalformedRecordError as exc:
            malformed[number] = str(exc)
        else:
            events += [] if event is None else [event]
    if not malformed:
        return events, None
    first, problem = next(iter(malformed.items()))
    return events, LostEntries(len(malformed), f"{problem} (in {place_of(run, first)})")


def whole_events_of(run: Run, entries: Iterable[Entry]) -> list[Event]:
    """Return the events in all entries of a sweep's journal, as `events_of` does.

    Raises:
        JournalDamagedError: If one is malformed, or an event of a trial precedes its start, such as an event of another sweep.

    """
    events, malformed = events_of(run, dict(enumerate(entries)))
    if malformed is not None:
        raise damaged(malformed.first, "the object")
    have_start = set(map(id, _with_their_start(events)))
    if lost := next((event for event in events if id(event) not in have_start), None):
        assert not isinstance(lost, SweepLed)
        raise damaged(
            f"the journal of sweep {run.name!r} in {run.storage.url} mentions trial {lost.trial} before its start, so entries "
            "of another sweep or of a newer version are among its own"
        )
    return events


def read_trials(run: Run) -> dict[int, TrialRecord]:
    """Return the trials of a sweep, by number; costs reading its journal.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    return history_of(read_events(run))


def read_known_trials(run: Run) -> tuple[dict[int, TrialRecord], str | None]:
    """Return the trials of a sweep as far as its journal can be read, and a text on its lost entries; None if none is lost.

    A trial whose start is lost is left out; one whose end is lost keeps its state before the end.
    """
    entries, lost = read_known_entries(run)
    events, malformed = events_of(run, entries)
    trials, unknown = history_of(_with_their_start(events)), [it for it in (lost, malformed) if it is not None]
    return trials, None if not unknown else (
        f"{sum(it.count for it in unknown)} of the journal's entries cannot be read, so trials may be missing, or be as they "
        f"were before; the first: {unknown[0].first}"
    )


def runs_without_entries(run: Run, events: Iterable[Event], since: str) -> list[str]:
    """Return the names of trials' runs that have begun since a time and are in no event: the journal's last entries are lost.

    Costs a listing of names, and a read or two for each such run.

    Args:
        run: The sweep.
        events: All events in its journal, also those before it began again.
        since: When the journal began (UTC, ISO 8601).

    """
    known = {name for event in events if (name := _begun_by(event)) is not None}
    found = (f"{run.name}/{leaf}" for leaf in run.storage.folders(f"{run.name}/") if re.fullmatch(TRIAL_NAME, leaf))
    unknown = [name for name in found if name not in known]
    begun = {name: next(list_attempts(run.beside(name)), None) for name in unknown}
    return sorted(name for name, attempt in begun.items() if attempt is not None and attempt.claimed_at > since)


def _begun_by(event: Event) -> str | None:
    """Return the run that an event begins."""
    if isinstance(event, TrialReported | TrialResumed):
        return None if event.cloned is None else event.cloned.run
    return event.run if isinstance(event, TrialStarted) else None


def _with_their_start(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events without those of trials whose start is not among them."""
    started: set[int] = set()
    for event in events:
        if isinstance(event, SweepLed):
            started = set() if event.is_fresh else started
        elif isinstance(event, TrialStarted):
            started.add(event.trial)
        elif event.trial not in started:
            continue
        yield event


def _below(sweep: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the names of its runs as they are below `sweep`."""
    placed = dict(entry)
    if isinstance(entry.get("run"), str):
        placed["run"] = f"{sweep}/{entry['run'].rpartition('/')[2]}"
    for part in ("cloned", "source"):
        if isinstance(entry.get(part), Mapping):
            placed[part] = _below(sweep, entry[part])
    return placed
