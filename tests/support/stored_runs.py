"""Runs as trainings leave them, made in this process."""

import os
from dataclasses import asdict
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter
from ranks import Attempt, folder


def store_run(storage, scratch: Path, *, name="run", steps=3, ending="completed", flow_run_id=None):
    """Store a run that reported `steps` times, each with a checkpoint of two files; return it."""
    store = CheckpointStore.open(storage, name)
    attempt = Attempt(store)

    def report(session, rank):
        for step in range(steps):
            files = folder(scratch / name / str(step), model=bytes([step]) * 5000, same=b"same")
            session.report({"loss": 1 / (step + 1), "nested": {"text": "x"}}, files)

    assert attempt.run(report) == [None]
    history = HistoryWriter(store, attempt.number)
    for event in attempt.events():
        if isinstance(event, ReportEvent):
            history.append(event.record)
    history.flush()
    settings = asdict(RetentionPolicy(2, "loss", "min"))
    last = claim_attempt(store, Owner.current(flow_run_id), world_size=2, settings=settings)
    if ending is not None:
        write_outcome(store, Outcome(last.number, ending, flow_run_id, None, None))
    return store


def begun_long_ago(store: CheckpointStore) -> CheckpointStore:
    """Make the claims of a run in a local directory older than anything else in it, as they are."""
    for key in store.keys(store.layout.attempts):
        os.utime(store.storage.local_path(key), (0, 0))
    return store
