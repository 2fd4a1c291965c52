"""The events of a sweep, for automations: its trials, and each new best one."""

from typing import Any

from prefect.events import Event, RelatedResource, Resource
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.journal import events
from prefect_torch.flows.sweeps.journal.events import TrialEnded, TrialReported, TrialResumed, TrialStarted
from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, score_of

from .observer import LONGEST_CLOSE_S, finite, plain
from .outbox import EventOutbox

NEW_BEST = "prefect-torch.sweep.new-best"
_TRIAL = "prefect-torch.trial."


class SweepEvents:
    """Sends the events of a sweep that automations can trigger on; none delays the sweep.

    Their names are `prefect-torch.trial.` followed by `started`, `resumed`, `paused`, `cloned`, `stopped`, `completed` or
    `failed`, with the resource `prefect-torch.trial.<path or URL of the trial's run>`; and `prefect-torch.sweep.new-best`, with
    the resource `prefect-torch.sweep.<path or URL of the sweep>`. Labels are `sweep`, `storage`, `trial` (its number) and
    `run`.

    Args:
        run: The sweep.
        metric: The metric that is optimized, the first of several.
        mode: "min" or "max".
        known: The trials so far, whose best score a new best one must beat.

    """

    def __init__(self, run: Run, metric: str, mode: str, known: History) -> None:
        self._run = run
        self._metric = metric
        self._mode = mode
        scores = [score_of(trial, metric, mode) for trial in known.values()]
        self._best = min((score for score in scores if score is not None), default=None)
        self._outbox = EventOutbox()

    def observe(self, entry: events.Event, trials: History) -> None:
        """Send the events of an entry of the journal; `trials` are the trials after it."""
        if not isinstance(entry, TrialStarted | TrialResumed | TrialReported | TrialEnded):
            return
        trial = trials[entry.trial]
        if (name := _name_of(entry)) is not None:
            self._outbox.put(self._about_trial(name, trial))
        score = score_of(trial, self._metric, self._mode)
        if score is not None and (self._best is None or score < self._best):
            self._outbox.put(self._new_best(trial, score))
            self._best = score

    def close(self) -> None:
        """Send the remaining events."""
        self._outbox.close(LONGEST_CLOSE_S)

    def _about_trial(self, name: str, trial: TrialRecord) -> Event:
        labels = self._labels(trial)
        path = f"{self._run.storage.url}/{trial.run}"
        about = {"prefect.resource.id": f"{_TRIAL}{path}", "prefect.resource.name": trial.run}
        sweep = RelatedResource({**labels, **self._about_sweep(), "prefect.resource.role": "sweep"})
        payload = {"config": plain(trial.config), "metrics": plain(trial.metrics), "reason": trial.reason}
        return Event(event=_TRIAL + name, resource=Resource({**labels, **about}), related=[sweep], payload=payload)

    def _new_best(self, trial: TrialRecord, score: float) -> Event:
        sign = 1 if self._mode == "min" else -1
        payload: dict[str, Any] = {
            "metric": self._metric,
            "value": finite(score * sign),
            "previous": None if self._best is None else finite(self._best * sign),
            "config": plain(trial.config),
            "metrics": plain(trial.metrics),
        }
        resource = Resource({**self._labels(trial), **self._about_sweep()})
        return Event(event=NEW_BEST, resource=resource, payload=payload)

    def _about_sweep(self) -> dict[str, str]:
        return {"prefect.resource.id": f"prefect-torch.sweep.{self._run.path}", "prefect.resource.name": self._run.name}

    def _labels(self, trial: TrialRecord) -> dict[str, str]:
        return {
            "sweep": self._run.name,
            "storage": self._run.storage.url,
            "trial": str(trial.number),
            "run": trial.run,
        }


def _name_of(entry: TrialStarted | TrialResumed | TrialReported | TrialEnded) -> str | None:
    """Return the name of an entry's event; None if its trial only continues, which would be thousands of events."""
    if isinstance(entry, TrialStarted):
        return "started"
    if isinstance(entry, TrialResumed | TrialReported) and entry.cloned is not None:
        return "cloned"
    if isinstance(entry, TrialResumed):
        return "resumed"
    return None if entry.state == "running" else entry.state
