"""Ranks as real processes on gloo, for what threads cannot be: sharded tensors, DDP, a kill.

python state_processes.py <job> <rank> <world size> <store> <key-value port> <group port>
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import CheckpointStore, TrainContext
from prefect_torch.ckpt.resume import choose_checkpoint
from prefect_torch.ckpt.session import RankSession
from prefect_torch.tasks.rendezvous import Address, connect
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


def main(job, rank, world_size, root, key_value_port, group_port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(group_port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = CheckpointStore.open(root, "run")
    kind, action = job.split("-")
    manifest = choose_checkpoint(store, lineage=1, verify="digest")
    restored = None if manifest is None else store.checkpoint(manifest)
    key_value = connect(Address("127.0.0.1", key_value_port))
    attempt = int(Path(root, "attempt").read_text())
    session = RankSession(TrainContext(rank, rank, 0, world_size, world_size, "run", attempt), store, key_value, restored)
    model, optimizer = make_training(kind, seed=0 if restored is None else 9)
    extra = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "extra": extra}
    if restored is not None:
        restored.load_state(state, rank=rank, world_size=world_size)
    for _ in range(STEPS):
        take_step(model, optimizer, extra["step"])
        extra["step"] += 1
        session.report({"step": extra["step"]}, state=state)
        if action == "kill" and extra["step"] == 2:
            session._background.wait()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    session.finish()
    write_whole(model, optimizer, Path(root, f"whole-{extra['step']}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *numbers = sys.argv[1:]
    main(name, int(numbers[0]), int(numbers[1]), numbers[2], int(numbers[3]), int(numbers[4]))
