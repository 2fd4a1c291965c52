"""Ranks as real processes: started by a test, joined by the script that each of them runs."""

import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked_programs import Popen
from prefect_torch.ckpt import CheckpointStore, TrainContext
from prefect_torch.ckpt.context import never
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, connect
from ranks import Session, in_training
from servers import free_port

RUN = "run"


@contextmanager
def led_attempt(world_size, root):
    """Claim an attempt and serve its ranks; yield the words that `joined` takes behind the rank."""
    attempt = claim_attempt(CheckpointStore.open(root, RUN), Owner.current(), world_size=world_size).number
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    yield [str(it) for it in (world_size, root, attempt, rendezvous.address.port, free_port())]
    del served


def launch(script, arguments, world_size, root):
    """Run one attempt of `script` and return the ranks' exit codes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with led_attempt(world_size, root) as place:
        ranks = [
            Popen([sys.executable, str(script), *arguments, str(rank), *place], env=environment) for rank in range(world_size)
        ]
        return [rank.wait(150) for rank in ranks]


@contextmanager
def joined(rank, world_size, root, attempt, key_value_port, group_port, is_terminating=never):
    """Be the rank that `launch` started with these words, inside a training; yield its session."""
    with process_group(rank, world_size, group_port):
        key_value = connect(Address("127.0.0.1", int(key_value_port)))
        with training(CheckpointStore.open(root, RUN), int(attempt), key_value, is_terminating) as session:
            yield session


@contextmanager
def process_group(rank, world_size, port):
    """Have the environment of a rank, and gloo."""
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def training(store, attempt, key_value, is_terminating=never):
    """Be a rank of attempt `attempt`, that goes on from the latest checkpoint; yield its session."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest = choose_checkpoint(store, lineage=1, verify="digest")
    restored = None if manifest is None else store.checkpoint(manifest)
    context = TrainContext(rank, rank, 0, world_size, world_size, store.run, attempt)
    with in_training(Session(context, store, key_value, restored=restored, is_terminating=is_terminating)) as session:
        yield session
    dist.barrier()
