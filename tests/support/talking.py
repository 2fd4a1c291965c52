"""A training that says and commits each tick until it is told to end; as a program: talking.py STORAGE CONFIG_JSON."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report


def talk(config: dict) -> dict:
    """Tick until the file `end` exists, and tell how long the slowest report took."""
    context = get_context()
    print(f"pid {os.getpid()}")
    first = get_checkpoint()
    tick, slowest_s = (0 if first is None else first.step + 1), 0.0
    while not everybody_sees(config["end"]):
        print(f"attempt {context.attempt} rank {context.world_rank} tick {tick}")
        time.sleep(config["pause_s"])
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank-{context.world_rank}.txt").write_text(str(tick))
            started_s = time.monotonic()
            report({"tick": tick}, Checkpoint.from_directory(directory))
            slowest_s = max(slowest_s, time.monotonic() - started_s)
        tick += 1
    return {"attempt": context.attempt, "slowest_s": slowest_s}


def everybody_sees(end: str) -> bool:
    sees = torch.tensor([Path(end).exists()], dtype=torch.uint8)
    dist.broadcast(sees, src=0)
    return bool(sees.item())


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, RunConfig, ScalingConfig, train

    storage, config = sys.argv[1], json.loads(sys.argv[2])
    result = train(
        "talking:talk",
        config,
        ScalingConfig(num_workers=config["ranks"]),
        RunConfig(name="run", storage=storage),
        CheckpointConfig(num_to_keep=10),
    )
    print(json.dumps(result.return_value))
