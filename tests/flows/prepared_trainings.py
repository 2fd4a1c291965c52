"""Training functions that leave the distribution to prepare_model, prepare_data_loader and Lightning."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from prefect_torch.ckpt import get_context
from prefect_torch.tasks import get_device, prepare_data_loader, prepare_model
from torch.distributed.fsdp import FSDPModule
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
    for strategy, kind in [("ddp", DistributedDataParallel), ("fsdp", FSDPModule)]:
        torch.manual_seed(0)
        model = prepare_model(torch.nn.Linear(5, 2), parallel_strategy=strategy)
        assert isinstance(model, kind)
        assert prepare_model(model) is model
        model(data[get_context().world_rank :: 2]).square().mean().backward()
        torch.manual_seed(0)
        alone = torch.nn.Linear(5, 2)
        alone(data).square().mean().backward()
        gradient = next(model.parameters()).grad
        whole = gradient.full_tensor() if strategy == "fsdp" else gradient
        told[strategy] = torch.allclose(whole, alone.weight.grad, atol=1e-6)
    return {**told, "prefect": "prefect" in sys.modules}


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
    model = Regression(**ends)
    with resume_path() as path:
        trainer.fit(model, ckpt_path=path)
    assert dist.group.WORLD is group  # neither made anew nor ended
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    assert gathered(weights) == [weights, weights]
    return {"weights": weights, "resumed": path is not None, "ranks": (trainer.world_size, trainer.global_rank)}
