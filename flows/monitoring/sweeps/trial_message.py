"""The text about a completed trial in Prefect's list of runs."""

from collections.abc import Sequence

from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.metrics import Metrics, add_newest, find_score
from prefect_torch.flows.monitoring.text import show_number
from prefect_torch.flows.sweeps.journal.history import TrialState
from prefect_torch.flows.sweeps.trial_storage import metrics_in
from prefect_torch.tasks.training.observers import TrainingEvent


class TrialMessageObserver:
    """Records the newest step and values, from which the message of a trial's completed state is made.

    Args:
        metrics: The names of the metrics that the sweep optimizes.

    """

    def __init__(self, metrics: Sequence[str]) -> None:
        self._metrics = metrics
        self._step: int | None = None
        self._newest: Metrics = {}

    def observe(self, event: TrainingEvent) -> None:
        """Record an event."""
        if isinstance(event, ReportEvent):
            add_newest(self._newest, event.record.metrics)
            if not event.record.is_logged:
                self._step = event.record.step

    def refresh(self, *, final: bool) -> None:
        """Show nothing meanwhile."""

    def message(self, state: TrialState, value: object = None) -> str:
        """Return how a trial ended in one line, such as "step 9, loss 0.0013" or "paused at step 3, loss 0.9".

        Args:
            state: The decision of the sweep; "running" if it made none and the trial's function has returned.
            value: The return value of the trial's function: the metrics in a dict count as its last report.

        """
        said: list[str] = []
        if self._step is not None:
            said.append(f"{f'{state} at ' if state in ('paused', 'stopped') else ''}step {self._step}")
        metrics = dict(self._newest)
        add_newest(metrics, metrics_in(value))
        scores = [(name, find_score(metrics, name)) for name in self._metrics]
        said += [f"{name} {show_number(score)}" for name, score in scores if score is not None]
        return ", ".join(said) or "no report"
