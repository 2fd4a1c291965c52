"""Ranks as real processes on gloo, for what threads cannot be: sharded tensors, DDP, a kill."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import joined
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def make_model():
    torch.manual_seed(0)
    # 7 rows and a bias of 5: no number of ranks here divides them evenly, and one rank may get nothing
    return torch.nn.Sequential(
        torch.nn.Linear(13, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    )


def make_training(kind, seed=0):
    model = make_model()
    if seed:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float(seed))
    if kind == "fsdp":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model, optimizer, number):
    # The same batch on every rank: then the gradients' mean over the ranks is bit by bit the same for 1 and 2 ranks.
    batch = torch.randn(8, 13, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def write_whole(model, optimizer, path):
    """Write the whole state, wherever it is sharded, for comparison."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(whole, path)


def main(job, *place):
    kind, action = job.split("-")
    with joined(*place) as session:
        model, optimizer = make_training(kind, seed=0 if session.restored is None else 9)
        extra = {"step": 0}
        state = {"model": model, "optimizer": optimizer, "extra": extra}
        if session.restored is not None:
            session.restored.load_state(state)
        for _ in range(STEPS):
            take_step(model, optimizer, extra["step"])
            extra["step"] += 1
            session.report({"step": extra["step"]}, state=state)
            if action == "kill" and extra["step"] == 2:
                session.wait_for_commits()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        session.finish()
        write_whole(model, optimizer, Path(session.run.storage.url, f"whole-{extra['step']}.pt"))
