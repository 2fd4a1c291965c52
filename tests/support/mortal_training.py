"""Training functions that end with the process that leads them, the first times."""

import itertools
import json
import os
import tempfile
import time
from pathlib import Path

from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report


def train_until_killed(config: dict) -> int:
    """Report a step, and then, until a file says that it is enough, wait for whoever kills the leader."""
    checkpoint = get_checkpoint()
    step = 0 if checkpoint is None else checkpoint.step + 1
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "state.json").write_text(json.dumps({"step": step}))
        report({"loss": 1 / (step + 1)}, Checkpoint.from_directory(directory), step=step)
    folder = Path(config["folder"])
    (folder / f"reported-{get_context().attempt}").write_text(str(os.getpid()))
    while not (folder / f"end-{get_context().attempt}").exists():
        time.sleep(0.05)
    return step


def train_until_told(config: dict) -> int:
    """Report a step again and again, until a file says that it is enough, or a last one when told that the end is near."""
    checkpoint, context = get_checkpoint(), get_context()
    first = 0 if checkpoint is None else checkpoint.step + 1
    for step in itertools.count(first):
        last = context.should_checkpoint() or Path(config["folder"], f"end-{context.attempt}").exists()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "state.json").write_text(json.dumps({"step": step}))
            report({"told": float(last)}, Checkpoint.from_directory(directory), step=step)
        if last:
            return step
        time.sleep(0.5)
    raise AssertionError
