"""Ranks as real processes whose models are sharded in several ways, each stored, and loaded into each other."""

import itertools
from pathlib import Path

import torch
import torch._dynamo  # FSDP2 imports it when it is used, in each process for seconds
import torch.distributed as dist
from rank_processes import joined
from states import check_equal
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAST_ATTEMPT = 3
KINDS = ("fsdp", "tp", "fsdp x tp")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 6)  # no number of ranks here divides it
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def make_training(kind="plain", seed=0, *, on_meta=False):
    torch.manual_seed(seed)
    with torch.device("meta" if on_meta else "cpu"):
        model = Model()
    if kind in ("tp", "fsdp x tp"):
        num_ranks = dist.get_world_size()
        shape = {"tp": num_ranks} if kind == "tp" else {"fsdp": 2, "tp": num_ranks // 2}
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        plan = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "embedding": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    if kind in ("fsdp", "fsdp x tp"):
        of_ranks = {} if kind == "fsdp" else {"mesh": mesh["fsdp"]}
        for block in model.blocks:
            fully_shard(block, **of_ranks)
        fully_shard(model, **of_ranks)
    if on_meta:
        model.to_empty(device="cpu")
    # One tensor after the other: the fast ways take no tensors of several meshes.
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def take_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(12).reshape(3, 4)).square().mean().backward()
    optimizer.step()


def whole(model, optimizer):
    """Return the whole state, gathered by torch; only rank 0 gets it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load(checkpoint, kind):
    """Load into a training that has not even begun, and compare the whole of it with what it was when it was stored."""
    model, optimizer = make_training(kind, on_meta=True)
    checkpoint.load_state({"model": model, "optimizer": optimizer})
    loaded, name = whole(model, optimizer), str(checkpoint.metrics["whole"])
    if dist.get_rank() == 0:
        check_equal(loaded, torch.load(Path(checkpoint.store.storage.url, name)), f"{name} as {kind}")


def store(session, kind, name):
    model, optimizer = make_training(kind)
    take_step(model, optimizer)
    told = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(told, Path(session.run.storage.url, name))
    with torch.no_grad():  # as a validation: the parts of the root stay gathered
        model(torch.arange(12).reshape(3, 4))
    session.report({"whole": name}, state={"model": model, "optimizer": optimizer}, upload="sync")


def main(rank, world_size, *place):
    """Load what another number of ranks stored, in every way; then store, and load each in another way."""
    kinds = KINDS if world_size == "4" else KINDS[:2]
    with joined(rank, world_size, *place) as session:
        others = [it for it in session.run.list() if it.world_size != int(world_size)]
        for manifest, kind in itertools.product(others, kinds):
            load(session.run.checkpoint(manifest), kind)
        if session.context.attempt < LAST_ATTEMPT:
            for kind in kinds:
                store(session, kind, f"{kind} on {world_size}.pt")
                load(session.run.checkpoint(session.run.latest()), kinds[kinds.index(kind) - 1])
