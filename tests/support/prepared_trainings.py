"""Training functions that leave the distribution to prepare_model, prepare_data_loader and Lightning."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prefect_torch.ckpt import get_checkpoint, get_context, report
from prefect_torch.tasks import get_device, prepare_data_loader, prepare_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def gathered(value: object) -> list:
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def prepare_everything(config: dict) -> dict:
    """Train one epoch with DDP and one with FSDP2, and tell whether ranks end with what a single process would have."""
    data = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(get_context().world_rank)  # each its own: rank 0's counts
    loader = prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(16), data), batch_size=4, shuffle=True, generator=generator)
    )
    shares = gathered([number for numbers, _ in loader for number in numbers.tolist()])
    told = {"share": sorted(shares[0] + shares[1]) == list(range(16)), "device": str(get_device())}
    mesh = init_device_mesh("cpu", (2,))
    for name, strategy, arguments in [
        ("ddp", "ddp", {"gradient_as_bucket_view": True}),
        ("fsdp2", "fsdp2", None),
        ("given mesh", "fsdp2", {"mesh": mesh, "reshard_after_forward": False}),
        ("own blocks", "fsdp2", {"mesh": mesh}),
    ]:
        model = new_model()
        if name == "own blocks":
            fully_shard(model[2], mesh=mesh)
        model = prepare_model(model, parallel_strategy=strategy, parallel_strategy_kwargs=arguments)
        assert isinstance(model, FSDPModule if strategy == "fsdp2" else DistributedDataParallel)
        for parallel in (model, torch.compile(model)):
            assert prepare_model(parallel) is parallel
        model(data[get_context().world_rank :: 2]).square().mean().backward()
        alone = new_model()
        alone(data).square().mean().backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        told[name] = all(torch.allclose(whole(mine.grad), other.grad, atol=1e-6) for mine, other in pairs)
        told[f"blocks of {name}"] = [place for place, part in model.named_modules() if place and isinstance(part, FSDPModule)]
    refuse_what_is_sharded_in_part(mesh)
    return told


def refuse_what_is_sharded_in_part(mesh):
    partly, tensor_parallel = new_model(), parallelize_module(new_model(), mesh, {"0": ColwiseParallel()})
    fully_shard(partly[2], mesh=mesh)
    for model in (partly, tensor_parallel):
        with pytest.raises(ValueError, match="sharded already, which DDP does not take"):
            prepare_model(model)
    with pytest.raises(ValueError, match="the model is tensor parallel: give the mesh of the other ranks"):
        prepare_model(tensor_parallel, parallel_strategy="fsdp2")


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def use_samples(config: dict) -> dict:
    """Report every second batch, and write down which samples each report has; the first attempt is killed after two.

    What is used after the last report of an attempt is written nowhere: its weights are lost, too, and it is used again.
    """
    context = get_context()
    data = TensorDataset(torch.arange(config["samples"]), torch.randn(config["samples"], 5))
    loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(loader, resumable=True)
    model = prepare_model(torch.nn.Linear(5, 2))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}
    if checkpoint := get_checkpoint():
        checkpoint.load_state(state)
    begun, reports = loader.state_dict(), []

    def report_samples(epoch: int, used: list) -> None:
        report({"epoch": epoch}, state=state, upload="sync")
        reports.append([epoch, used])
        Path(config["told"], f"{context.attempt}-{context.world_rank}.json").write_text(json.dumps(reports))

    for epoch in range(loader.epoch, config["epochs"]):
        used: list = []
        for number, (samples, batch) in enumerate(loader, 1):
            state["optimizer"].zero_grad()
            model(batch).square().mean().backward()
            state["optimizer"].step()
            used += samples.tolist()
            if context.attempt == 1 and len(reports) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if number % 2 == 0:
                report_samples(epoch, used)
                used = []
                if len(reports) == config.get("stop_after"):
                    return begun
        report_samples(epoch, used)
    return begun


def train_with_lightning(config: dict) -> dict:
    """Train with two ranks as Lightning does; in the first attempt rank 1 is killed in the third epoch."""
    from lightning_models import Regression, make_trainer  # noqa: PLC0415 - seconds, for this training only
    from prefect_torch.ckpt.lightning import PrefectEnvironment, ReportCallback, resume_path  # noqa: PLC0415 - as above

    context = get_context()
    ends = {}
    if config["kill"] and context.attempt == 1 and context.world_rank == 1:
        ends = {"at_step": 5, "then": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    group = dist.group.WORLD
    trainer = make_trainer(
        strategy=config.get("strategy", "ddp"),
        devices=context.local_world_size,
        plugins=[PrefectEnvironment()],
        callbacks=[ReportCallback()],
    )
    model = Regression(dropout=0.5, **ends)
    torch.manual_seed(context.world_rank)  # each rank drops out on its own
    with resume_path() as path:
        trainer.fit(model, ckpt_path=path)
    assert dist.group.WORLD is group  # neither made anew nor ended
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    assert gathered(weights) == [weights, weights]
    return {"weights": weights, "resumed": path is not None, "ranks": (trainer.world_size, trainer.global_rank)}
