"""What a start of a sweep goes on from: what the sweep searches, and its journal so far."""

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_torch.ckpt.runs.attempts.attempt import Attempt
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.sweeps.definition import Definition, read_definition, settle_definition
from prefect_torch.flows.sweeps.journal.events import Event
from prefect_torch.flows.sweeps.journal.history import History, has_begun_again, history_of
from prefect_torch.flows.sweeps.journal.journal import Entry, Journal, JournalDamagedError, delete_journal, read_journal
from prefect_torch.flows.sweeps.journal.stored_trials import runs_without_entries, whole_events_of
from prefect_torch.tasks.run_logs import get_run_logger


@dataclass(frozen=True, slots=True)
class Beginning:
    """What one start of a sweep goes on from.

    Attributes:
        definition: What the sweep searches.
        journal: The journal, to which this start appends.
        events: The events so far; none if the sweep begins again.
        is_fresh: Whether it begins again.
        former: The trials of the sweep before, if it begins again.

    """

    definition: Definition
    journal: Journal
    events: list[Event]
    is_fresh: bool
    former: History


def begin(led: Run, claimed: Attempt, given: Definition, *, has_seed: bool, may_be_fresh: bool) -> Beginning:
    """Read the journal of a claimed sweep, and store what it searches if that is new or changed.

    A warning names runs that the journal does not know, since its last entries are lost.

    Args:
        led: The sweep.
        claimed: The attempt that leads it.
        given: What its caller asks for.
        has_seed: Whether the caller chose the seed.
        may_be_fresh: Whether the sweep begins again, unless this flow run has begun it again before; a damaged journal is
            replaced then.

    Raises:
        JournalDamagedError: If the journal is damaged.
        ValueError: If it searches something else than before.

    """
    entries, events = _read(led, may_be_new=may_be_fresh)
    is_fresh = may_be_fresh and not has_begun_again(events, claimed.lineage)
    _warn_of_lost_entries(led, events)
    definition = settle_definition(led, given, has_seed=has_seed, is_fresh=is_fresh)
    journal = Journal(led, claimed.number, len(entries))
    if is_fresh:
        return Beginning(definition, journal, [], is_fresh, history_of(events))
    return Beginning(definition, journal, events, is_fresh, {})


def _read(led: Run, *, may_be_new: bool) -> tuple[list[Entry], list[Event]]:
    """Return a sweep's journal so far, and its events; one that may begin again begins a new journal if its own is damaged."""
    try:
        entries = read_journal(led)
        return entries, whole_events_of(led, entries)
    except JournalDamagedError as exc:
        if not may_be_new:
            raise
        get_run_logger().warning("a new journal is begun: %s", exc)
        delete_journal(led)
        return [], []


def _warn_of_lost_entries(led: Run, events: Iterable[Event]) -> None:
    known = read_definition(led)
    lost = [] if known is None else runs_without_entries(led, events, known.created_at)
    if lost:
        get_run_logger().warning(
            "the storage has %s of trials that the journal of sweep %r does not know, such as %s: its last entries are lost, "
            "as after a restore of an older backup; what they had is searched anew, in new runs",
            show_count(len(lost), "run"),
            led.name,
            lost[-1],
        )
