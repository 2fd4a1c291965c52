"""A training function that uses each framework on machines with different numbers of ranks."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning_models import make_trainer
from prefect_torch.ckpt import get_context, report
from prefect_torch.ckpt.lightning import PrefectDDPStrategy, PrefectEnvironment, prepare_trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

SAMPLES = 9


class SeenSamples(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen += batch.int().flatten().tolist()
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples() -> DataLoader:
    return DataLoader(torch.arange(float(SAMPLES)).reshape(-1, 1), batch_size=1)


def use_all() -> list:
    """Return what each rank was told of its place, and the samples that it got."""
    torch.set_num_threads(1)
    context = get_context()
    mine = {
        "place": [context.world_rank, context.node_rank, context.local_rank, context.local_world_size],
        "lightning": fit_with_lightning(),
        **use_accelerate(),
        "fsdp2": shard(),
    }
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def fit_with_lightning() -> list[int]:
    model = SeenSamples()
    strategy, plugins = PrefectDDPStrategy(), [PrefectEnvironment()]
    trainer = prepare_trainer(make_trainer(max_epochs=1, devices="auto", strategy=strategy, plugins=plugins))
    trainer.fit(model, samples())
    assert trainer.is_global_zero == (get_context().world_rank == 0)
    return sorted(model.seen)


def use_accelerate() -> dict:
    accelerator = Accelerator()
    loader = accelerator.prepare(samples())
    return {
        "accelerate": sorted(int(sample) for batch in loader for sample in batch.flatten()),
        "process": [accelerator.process_index, accelerator.num_processes, accelerator.local_process_index],
    }


def shard() -> list:
    """Return the rows of a sharded weight that this rank has, and its sum over all ranks after a step and a report."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 7, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    report({"loss": 1.0}, state={"model": model, "optimizer": optimizer})
    weight = model.weight
    assert torch.allclose(weight.full_tensor(), whole - 0.5)
    return list(weight.to_local().shape)
