"""A sweep as commands read it from its storage."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.deployments.command_line.terminal import show_metric
from prefect_torch.flows.monitoring.sweeps.page import show_rung
from prefect_torch.flows.monitoring.sweeps.trial_table import TRIAL_STYLES
from prefect_torch.flows.monitoring.sweeps.view import SeenTrial, SweepView, count_states
from prefect_torch.flows.sweeps.definition import Definition, require_definition
from prefect_torch.flows.sweeps.journal.journal import JournalDamagedError
from prefect_torch.flows.sweeps.journal.stored_trials import read_known_trials
from prefect_torch.flows.sweeps.schedulers.scheduling import WITH_RUNGS


@dataclass(frozen=True, slots=True)
class SweepRecords:
    """A sweep as its storage has it.

    Attributes:
        definition: Its definition.
        view: Its trials and their curves.
        lost: A text on the entries of its journal that cannot be read; None if all can be.

    """

    definition: Definition
    view: SweepView
    lost: str | None

    @classmethod
    def read(cls, store: CheckpointStore) -> "SweepRecords":
        """Read the sweep; costs its journal, and some requests for each trial.

        Raises:
            FileNotFoundError: If it has no definition.
            MalformedRecordError: If its definition cannot be read.

        """
        definition = require_definition(store)
        view = SweepView(store, definition, max_curves=sys.maxsize, longest_s=math.inf)  # there is no next look
        trials, lost = read_known_trials(store)
        view.record(trials)
        view.read()
        return cls(definition, view, lost)

    def raise_if_damaged(self) -> None:
        """Raise if a part of its journal is lost; what is known has been printed before.

        Raises:
            JournalDamagedError: Naming the first entry that is lost.

        """
        if self.lost is not None:
            raise JournalDamagedError(self.lost)

    @property
    def has_rungs(self) -> bool:
        """Whether its scheduler decides at rungs."""
        return self.definition.search.get("scheduler") in WITH_RUNGS

    def headline(self) -> str:
        """Return how many trials there are, in which states, and the best one."""
        trials, best, metric = self.view.trials(), self.view.best(), self.view.metric
        wanted = self.definition.search.get("num_trials")
        of = f" of {wanted}" if isinstance(wanted, int) and wanted > len(trials) else ""
        states = ", ".join(f"{count} {state}" for state, count in count_states(trials))
        found = "" if best is None else f"; best {metric} {show_metric(best.value)} in trial {best.number}"
        return (
            f"{len(trials)}{of} trial{'' if len(trials) == 1 and not of else 's'}" + (f": {states}" if states else "") + found
        )

    def columns(self) -> list[str]:
        """Return the names of a table's columns."""
        return ["trial", "config", "state", self.view.metric, "step", *(["rung"] if self.has_rungs else [])]

    def row(self, trial: SeenTrial) -> Iterator[object]:
        """Yield the cells of a trial."""
        yield trial.number
        yield ", ".join(f"{name}={show_metric(value)}" for name, value in trial.parameters.items())
        yield trial.state, TRIAL_STYLES[trial.state]
        yield None if trial.value is None else show_metric(trial.value)
        yield trial.step
        if self.has_rungs:
            yield show_rung(trial) or None


def describe_trials(records: SweepRecords, trials: Sequence[SeenTrial]) -> list[dict[str, Any]]:
    """Return trials as JSON: see the help of `ls`."""
    return [
        {
            "number": trial.number,
            "run": trial.run,
            "state": trial.state,
            "reason": trial.reason,
            "config": dict(trial.parameters),
            "metrics": trial.metrics,
            "value": trial.value,
            "metric": records.view.metric,
            "mode": records.view.mode,
            "step": trial.step,
            "attempts": trial.curve.attempts,
        }
        for trial in trials
    ]
