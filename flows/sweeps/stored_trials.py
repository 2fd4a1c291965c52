"""The trials of a sweep as its storage has them."""

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.history import TrialRecord, decode_event, history_of
from prefect_torch.flows.sweeps.journal import read_journal


def read_trials(run: Run) -> dict[int, TrialRecord]:
    """Return the trials of a sweep, by number; costs reading its journal.

    Raises:
        JournalDamagedError: If the journal is damaged.

    """
    where = f"the journal of sweep {run.name!r}"
    return history_of([event for entry in read_journal(run) if (event := decode_event(entry, where)) is not None])
