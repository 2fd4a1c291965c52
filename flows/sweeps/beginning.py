"""The state from which a start of a sweep continues: its definition, and its journal so far."""

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_torch.ckpt.runs.attempts.attempt import Attempt, claim_key
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.sweeps.definition import (
    Definition,
    find_definition,
    read_definition,
    settle_definition,
    store_definition,
)
from prefect_torch.flows.sweeps.journal.events import Event
from prefect_torch.flows.sweeps.journal.history import History, has_begun_again, history_of
from prefect_torch.flows.sweeps.journal.journal import Entry, Journal, JournalDamagedError, delete_journal, read_journal
from prefect_torch.flows.sweeps.journal.stored_trials import read_known_trials, runs_without_entries, whole_events_of
from prefect_torch.tasks.run_logs import get_run_logger


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state from which one start of a sweep continues.

    Attributes:
        definition: The definition of the sweep.
        journal: The journal, to which this start appends.
        events: The events so far; none if the sweep begins again.
        is_fresh: Whether it begins again.
        former: If it begins again, the trials before; else none.

    """

    definition: Definition
    journal: Journal
    events: list[Event]
    is_fresh: bool
    former: History


def begin(led: Run, claimed: Attempt, given: Definition, *, has_seed: bool, may_be_fresh: bool) -> Beginning:
    """Read the journal of a claimed sweep, and store its definition if that is new or changed.

    The definition of a sweep that begins again is stored by its caller, once the journal says so: the trials in it are of the
    former one.

    A warning names runs that are missing in the journal, whose last entries are lost then.

    Args:
        led: The sweep.
        claimed: The attempt that leads it.
        given: The definition that its caller gives.
        has_seed: Whether the caller chose the seed.
        may_be_fresh: Whether the sweep begins again, unless this flow run has begun it again before; a damaged journal is
            replaced then.

    Raises:
        FencedError: If another process leads the sweep by now; nothing is stored or deleted then.
        JournalDamagedError: If the journal is damaged.
        ValueError: If the space, the metrics or the modes differ from the stored ones.

    """
    entries, events, former = _read(led, claimed, may_be_new=may_be_fresh)
    is_fresh = may_be_fresh and not has_begun_again(events, claimed.lineage)
    if not is_fresh:
        _warn_of_lost_entries(led, events)
    # It may differ though the journal has begun again: a kill came before it was stored.
    known = None if is_fresh else find_definition(led, given, may_differ=may_be_fresh)
    definition = settle_definition(given, known, has_seed=has_seed)
    journal = Journal(led, claim_key(led, claimed), len(entries))
    if definition != known and not (is_fresh and events):
        check_fence(led, claim_key(led, claimed))
        store_definition(led, definition)
    if is_fresh:
        return Beginning(definition, journal, [], is_fresh, former)
    return Beginning(definition, journal, events, is_fresh, {})


def _read(led: Run, claimed: Attempt, *, may_be_new: bool) -> tuple[list[Entry], list[Event], History]:
    """Return a sweep's journal so far, its events, and its trials.

    A damaged journal is replaced if the sweep may begin again: then it is empty, and the trials are those that were known.
    """
    try:
        entries = read_journal(led)
        events = whole_events_of(led, entries)
    except JournalDamagedError as exc:
        if not may_be_new:
            raise
        get_run_logger().warning("a new journal replaces the damaged one: %s", exc)
        former, _ = read_known_trials(led)
        check_fence(led, claim_key(led, claimed))  # the next leader may be replacing it
        delete_journal(led)
        return [], [], former
    return entries, events, history_of(events)


def _warn_of_lost_entries(led: Run, events: Iterable[Event]) -> None:
    known = read_definition(led)
    lost = [] if known is None else runs_without_entries(led, events, known.created_at)
    if lost:
        get_run_logger().warning(
            "the storage has %s of trials that the journal of sweep %r does not know, such as %s: its last entries are lost, "
            "as after a restore of an older backup; their work is repeated, in new runs",
            show_count(len(lost), "run"),
            led.name,
            lost[-1],
        )
