"""Trainings for the browser to look at: in pictures slow enough to be seen, else quick enough to wait for."""

import json
import os
import tempfile
import time
from pathlib import Path

from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report

EPOCHS = 8
EPOCH_S = 1.0 if "PREFECT_TORCH_SCREENSHOTS" in os.environ else 0.2


def train_once_more():
    """Report a loss and a checkpoint per epoch; without a checkpoint to begin from, stop in the middle until a rank is lost."""
    context = get_context()
    start, checkpoint = 0, get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = json.loads((Path(directory) / "state.json").read_text())["epoch"] + 1
    for epoch in range(start, EPOCHS):
        while start == 0 and epoch == EPOCHS // 2:
            time.sleep(EPOCH_S)
        time.sleep(EPOCH_S)
        with tempfile.TemporaryDirectory() as directory:
            made = None
            if context.world_rank == 0:
                (Path(directory) / "state.json").write_text(json.dumps({"epoch": epoch}))
                made = Checkpoint.from_directory(directory)
            metrics = {"val_loss": 1.0 / (epoch + 1), "val_accuracy": 1.0 - 0.5 / (epoch + 1)}
            report(metrics, checkpoint=made, progress=(epoch + 1) / EPOCHS)


def train_long():
    """Train until somebody ends it."""
    epoch = 0
    while not get_context().should_checkpoint():
        report({"epoch": epoch})
        time.sleep(0.2)
        epoch += 1
