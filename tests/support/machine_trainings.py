"""Training functions for ranks on several machines."""

import os
import socket

import torch
import torch.distributed as dist
from prefect_torch.ckpt import get_context


def tell_places(config: dict) -> list:
    """Return what each rank was told of its place, and two sums over the ranks: the second by a group of the user's own."""
    context = get_context()
    mine = torch.tensor([float(context.world_rank)])
    dist.all_reduce(mine)
    told = {
        "host": socket.gethostname(),
        "variables": dict(os.environ),
        "context": [context.node_rank, context.local_rank, context.local_world_size],
        "sum": mine.item(),
    }
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    again = torch.tensor([float(context.world_rank)])
    dist.all_reduce(again)
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {**told, "sum of my own group": again.item()})
    return everybody
