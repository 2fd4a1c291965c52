"""The events and the trials of a sweep as its storage has them."""

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.history import Event, TrialRecord, decode_event, history_of
from prefect_torch.flows.sweeps.journal import read_journal


def read_events(run: Run) -> list[Event]:
    """Return the events of a sweep, from its beginning, without those that a newer version alone knows.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    where = f"the journal of sweep {run.name!r}"
    return [event for entry in read_journal(run) if (event := decode_event(entry, where)) is not None]


def read_trials(run: Run) -> dict[int, TrialRecord]:
    """Return the trials of a sweep, by number; costs reading its journal.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    return history_of(read_events(run))
