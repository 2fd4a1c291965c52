"""Sweeps as their flows leave them, made in this process."""

from datetime import datetime, timedelta, timezone
from uuid import UUID

from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.definition import Definition, define, store_definition
from prefect_torch.flows.sweeps.journal.events import Event, SweepLed, TrialEnded, TrialReported, TrialStarted, encode_event
from prefect_torch.flows.sweeps.journal.history import history_of
from prefect_torch.flows.sweeps.journal.journal import Journal
from prefect_torch.flows.sweeps.search_config import SearchConfig

FLOW_RUN = UUID("0b1c2d3e-0000-4000-8000-000000000001")
SEARCH = SearchConfig(metric="loss", mode="min", num_trials=5, scheduler="asha", max_t=9)
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def trial_run(number: int) -> str:
    return f"digits/trial-{number:04d}-{number:08x}"


def events_of_a_sweep() -> list[Event]:
    """Return five trials: completed, paused at a rung, failed, completed and the best, running."""
    started = [TrialStarted(it, trial_run(it), {"lr": 0.1 / 10**it, "net": {"width": 16 * (it + 1)}}, it, 1) for it in range(5)]
    paused = TrialReported(1, 1, 2.0, "an-id", {"loss": 2.0}, "paused", reason="rung 1: 1 of 3 trials go on")
    return [
        SweepLed(1),
        *started,
        TrialEnded(0, "completed", None, {"loss": 1.0}),
        paused,
        TrialEnded(2, "failed", "ValueError: the loss | is NaN", {"loss": 0.1}),
        TrialReported(3, 1, 0.7, "another-id", {"loss": 0.7}, "running", milestone=3),
        TrialEnded(3, "completed", None, {"loss": 0.5}),
    ]


def losses_of(number: int) -> list[float]:
    return {0: [3.0, 2.0, 1.0], 1: [3.0, 2.0], 2: [0.1], 3: [1.0, 0.7, 0.5], 4: [4.0, 0.9]}[number]


def store_sweep(storage, *, search: SearchConfig = SEARCH, ending: str | None = None) -> tuple[Run, Definition]:
    """Store the sweep "digits" with these trials; return it."""
    run = Run.open(storage, "digits")
    attempt = claim_attempt(run, Owner.current(str(FLOW_RUN)), world_size=0)
    space = {"lr": {"kind": "loguniform", "low": 1e-6, "high": 0.1}}
    definition = define("train_digits:train_fn", space, {"epochs": 9}, search)
    store_definition(run, definition)
    journal = Journal(run, claim_key(run, attempt), 0)
    events = events_of_a_sweep()
    for event in events:
        journal.append(encode_event(event))
    for number in history_of(events):
        store_trial(run, number)
    for number, ended in enumerate(["completed", "stopped", "failed", "completed"]):
        write_outcome(Run.open(storage, trial_run(number)), Outcome(1, ended, str(FLOW_RUN)))
    if ending is not None:
        write_outcome(run, Outcome(attempt.number, ending, str(FLOW_RUN)))
    return run, definition


def store_trial(sweep: Run, number: int) -> None:
    """Store what a trial has reported, a step each ten seconds; trial n began n minutes after the sweep."""
    run = Run.open(sweep.storage, trial_run(number))
    attempt = claim_attempt(run, Owner.current(str(FLOW_RUN)), world_size=1)
    history = HistoryWriter(run, attempt.number)
    for step, loss in enumerate(losses_of(number)):
        at = BEGIN + timedelta(minutes=number, seconds=10 * step)
        history.append(MetricRecord(attempt.number, step, {"loss": loss}, None, at.isoformat()))
    history.flush()
