"""Training functions for ranks with real GPUs."""

import atexit
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_states import GIB, SLEEP, Holder
from prefect_torch.ckpt import get_checkpoint, get_context, report
from prefect_torch.tasks import get_device, prepare_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KEPT = []
AT_IMPORT = torch.ones(1, device="cuda").device.index if torch.cuda.is_available() else None


def gathered(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def tell_devices(config):
    return gathered((AT_IMPORT, get_device().index, torch.cuda.current_device(), dist.get_backend()))


def return_tensors(config):
    model = nn.Linear(64, 64).cuda()
    return {"state": model.state_dict(), "parameters": list(model.parameters())}


def raise_with_tensors(config):
    raise ValueError("with a tensor", torch.ones(3, device="cuda"))


def fill_most_of_memory(config):
    """Take four fifths of the GPU and report, until a file appears."""
    held = torch.empty(torch.cuda.mem_get_info()[1] * 4 // 5, dtype=torch.uint8, device="cuda")
    Path(config["running"], f"{get_context().attempt}-{os.getpid()}").touch()
    while not Path(config["until"]).exists():
        report({}, state={"number": 1}, upload="sync")
        time.sleep(0.1)
    return held.numel()


def take_too_much(config):
    return torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")


def die_in_a_collective(config):
    """Kill rank 1 while rank 0 waits for it in an all_reduce; return when each attempt began, and when the rank was killed."""
    context = get_context()
    told = Path(config["told"])
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if context.world_rank == 0:
        (told / f"began-{context.attempt}").write_text(str(time.time()))
    if context.attempt == 1:
        if context.world_rank == 1:
            time.sleep(2)
            (told / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        torch.cuda.synchronize()


def hang_in_a_collective(config):
    """Wait on rank 0 for an all_reduce that the others do not begin, in the first attempt."""
    context = get_context()
    dist.all_reduce(torch.ones(1, device="cuda"))
    report({})
    Path(config["told"], f"hangs-{context.attempt}-{context.world_rank}").touch()
    if context.attempt == 1 or config.get("always"):
        if context.world_rank == 0:
            dist.all_reduce(torch.ones(1 << 20, device="cuda"))
            torch.cuda.synchronize()
        time.sleep(600)


def keep_a_graph_with_a_collective(config):
    """Return while a CUDA graph that holds an all_reduce exists, as one of a whole step does, and its replay still runs."""
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(total)
    KEPT.append((graph, total))
    atexit.register(Path(config["told"], f"atexit-{get_context().world_rank}").touch)
    report({}, state={"number": 1})
    graph.replay()
    return total


def shard_more_than_a_gpu_holds(config):
    """Shard, initialize and run a model of 1.2 times a GPU's memory that is made without data."""
    total = torch.cuda.mem_get_info()[1]
    width, blocks = 16384, max(2, int(1.2 * total) // (4 * 16384**2))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))
    model = prepare_model(model, parallel_strategy="fsdp2")
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.01)
    with torch.no_grad():
        output = model(torch.randn(4, width, device="cuda"))
    return {
        "share": sum(it.to_local().numel() for it in model.parameters()) * 4 / (blocks * width**2 * 4),
        "peak": torch.cuda.max_memory_allocated() / total,
        "is_finite": bool(output.isfinite().all()),
    }


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, batch):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch + self.bias


def train_sharded(config):
    """Train one step more than the checkpoint, sharded as `config` says, and return the whole weights."""
    torch.manual_seed(0)
    model, world_size = Mlp(), dist.get_world_size()
    if config.get("tensor_parallel"):
        mesh = init_device_mesh("cuda", (world_size // 2, 2), mesh_dim_names=("fsdp", "tp"))
        model = model.cuda()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    else:
        model = prepare_model(model, parallel_strategy="fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    if checkpoint := get_checkpoint():
        checkpoint.load_state(state)
    restored = whole(model)
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).cuda()
    model(batch).square().mean().backward()
    optimizer.step()
    trained = whole(model)
    report({}, state=state)
    return {"restored": restored, "trained": trained}


def whole(model):
    tensors = [it.full_tensor() if isinstance(it, DTensor) else it for it in model.parameters()]
    return torch.cat([it.detach().flatten().cpu() for it in tensors])


def ignore_a_parameter(config):
    model = Mlp()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = prepare_model(
        model, parallel_strategy="fsdp2", parallel_strategy_kwargs={"mesh": mesh, "ignored_params": {model.bias}}
    )
    return isinstance(model.bias, DTensor), str(model.bias.device)


def train_on_both_backends(config):
    """Exchange tensors of both kinds, report and, in the second attempt, load."""
    for device in ("cpu", "cuda"):
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    model = prepare_model(nn.Linear(8, 8))
    state = {"model": model, "epoch": -1}
    if checkpoint := get_checkpoint():
        checkpoint.load_state(state)
    if state["epoch"] < 0:
        state["epoch"] = 0
        report({}, state=state, upload="sync")
        raise ValueError("once")
    return state["epoch"]


def train_with_lightning(config):
    from lightning_models import Regression, make_trainer  # noqa: PLC0415 - seconds, for this training only
    from prefect_torch.ckpt.lightning import (  # noqa: PLC0415 - as above
        PrefectDDPStrategy,
        PrefectEnvironment,
        ReportCallback,
        resume_path,
    )

    trainer = make_trainer(
        accelerator="auto",
        devices="auto",
        max_epochs=get_context().attempt,
        strategy=PrefectDDPStrategy(),
        plugins=[PrefectEnvironment()],
        callbacks=[ReportCallback()],
    )
    model = Regression()
    with resume_path() as path:
        trainer.fit(model, ckpt_path=path)
    if get_context().attempt == 1:
        raise ValueError("once")
    return {"devices": gathered(str(trainer.strategy.root_device)), "resumed": path is not None}


def train_with_transformers(config):
    from prefect_torch.ckpt.transformers import ReportCallback, prepare_trainer, resume_path  # noqa: PLC0415 - seconds
    from transformers_models import make_trainer  # noqa: PLC0415 - as above

    trainer = make_trainer(config["output"], get_context().world_size, use_cpu=False)
    trainer.add_callback(ReportCallback())
    trainer = prepare_trainer(trainer)
    with resume_path() as path:
        trainer.train(resume_from_checkpoint=path)
    if get_context().attempt == 1:
        raise ValueError("once")
    return {"devices": gathered(str(trainer.args.device)), "resumed": path is not None}


def train_with_accelerate(config):
    from accelerate import Accelerator  # noqa: PLC0415 - seconds, for this training only
    from accelerate_loops import train  # noqa: PLC0415 - as above

    accelerator = Accelerator()
    _, loaded = train(accelerator, epochs=1 + get_context().attempt)
    if get_context().attempt == 1:
        raise ValueError("once")
    return {"devices": gathered(str(accelerator.device)), "resumed": loaded is not None}


def measure_all_at_once(config):
    """Return how long a load, a bare copy and a report take on each rank, all ranks at the same time, in the second attempt."""
    rank, checkpoint = dist.get_rank(), get_checkpoint()
    torch.manual_seed(rank)
    weight = torch.randn(GIB // 2, device="cuda")  # 2 GiB of each rank's own
    state = {f"rank {rank}": Holder(weight=weight)}
    if checkpoint is None:
        report({}, state=state, upload="sync")
        raise ValueError("once")
    pinned, into = torch.empty(GIB // 2, pin_memory=True), Holder(weight=torch.empty_like(weight))
    pinned.copy_(weight)

    def timed(work):
        dist.barrier()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - started_s

    seconds = {"load of 2 GiB": timed(lambda: checkpoint.load_state({f"rank {rank}": into}))}
    is_equal = torch.equal(into.weight, weight)
    report({}, state=state, upload="sync")  # makes the memory for the next
    seconds["bare pinned copy of 2 GiB"] = timed(lambda: pinned.copy_(weight, non_blocking=True))
    torch.cuda._sleep(SLEEP)
    seconds["report of 2 GiB"] = timed(lambda: report({}, state=state, upload="async"))
    weight.zero_()
    return {"is_equal": gathered(is_equal), "seconds": gathered(seconds)}
