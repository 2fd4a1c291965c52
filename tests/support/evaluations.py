"""Evaluation functions for the tests; no Prefect in sight, as in a training."""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import get_checkpoint, get_context, report


def measure(config: dict) -> dict | None:
    """Return metrics of every checkpoint; what `config` names for its epoch goes wrong on the way."""
    checkpoint, context = get_checkpoint(), get_context()
    with checkpoint.as_directory() as directory:
        epoch = json.loads((Path(directory) / "state.json").read_text())["epoch"]
    print(f"rank {context.world_rank} evaluates epoch {epoch}")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    how = config.get(str(epoch))
    if how == "report":
        report({"accuracy": 1})
    if how == "prune" and context.world_rank == 0:  # as a prune would: the manifest first
        (Path(directory).parents[1] / "manifests" / f"{checkpoint.id}.json").unlink()
        shutil.rmtree(directory)
    if how == "prune":
        raise FileNotFoundError("its files are gone")
    if context.world_rank != 0:
        return None
    return {
        "accuracy": torch.tensor(1 - epoch / 10),
        "ranks": ranks.item(),
        "place": f"{context.run_name}/{context.attempt}/{context.world_size}",
        "reported": ", ".join(sorted(checkpoint.metrics)),
        "prefect": "prefect" in sys.modules,
    }
