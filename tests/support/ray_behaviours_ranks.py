"""What ranks do in the tests of Ray Train's behaviours: a module that they import faster than those tests."""

import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from prefect_torch.ckpt import get_checkpoint, get_context, report
from prefect_torch.tasks import get_device
from ranks import folder, read_files


def train_with_a_failure(config):
    """Report three epochs on two ranks; fail in the first attempt after the second."""
    context, checkpoint = get_context(), get_checkpoint()
    start = 0 if checkpoint is None else int(read_files(checkpoint)["epoch"]) + 1
    for epoch in range(start, 3):
        with tempfile.TemporaryDirectory() as directory:
            name = "epoch" if context.world_rank == 0 else "of-rank-1"
            report({"epoch": epoch, "loss": config["losses"][epoch]}, folder(Path(directory), **{name: str(epoch)}))
        if context.attempt == 1 and epoch == 1 and context.world_rank == 1:
            raise ValueError("boom from the training")
    report({"epoch": 3, "loss": 9.0})
    torch.distributed.barrier()
    told = [f"told by rank {context.world_rank}"]
    torch.distributed.broadcast_object_list(told)
    return {
        "rank": context.world_rank,
        "start": start,
        "attempt": context.attempt,
        "told": told[0],
        "folder": os.getcwd(),  # noqa: PTH109 - compared as text
        "logs_info": logging.getLogger("my_training").isEnabledFor(logging.INFO),
        "timeout_s": torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }


def tell_place():
    """Return how many ranks there are, and what this one computes on."""
    return get_context().world_size, get_device().type


def fail_after_the_checkpoint(config):
    raise ValueError(f"began after epoch {read_files(get_checkpoint())['epoch'].decode()}")


def leave():
    sys.exit()
