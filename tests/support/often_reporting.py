"""A training that reports very often; no Prefect in sight, so that ranks start fast."""

import json
import math
import os
import signal
import tempfile
from pathlib import Path

from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report


def report_often(config: dict) -> None:
    """Report `reports` times, each hundredth time with a checkpoint; in the first attempt, rank 1 dies at step `dies_at`."""
    context, restored = get_context(), get_checkpoint()
    for step in range(0 if restored is None else restored.step + 1, config["reports"]):
        if (step, context.attempt, context.world_rank) == (config["dies_at"], 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        metrics = {"accuracy": step / 1000, "deep": {"loss": math.exp(-step / 100)}, "odd": math.nan if step == 7 else 1.0}
        progress = (step + 1) / config["reports"]
        if step % 100 != 99:
            report(metrics, step=step, progress=progress)
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank-{context.world_rank}.json").write_text(json.dumps(step))
            report(metrics, Checkpoint.from_directory(directory), step=step, progress=progress)
