"""A Lightning training as one of several ranks."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning_models import Regression, make_trainer
from prefect_torch.ckpt.lightning import (
    PrefectDDPStrategy,
    PrefectEnvironment,
    PrefectModelParallelStrategy,
    ReportCallback,
    ReportLogger,
    prepare_trainer,
    resume_path,
)
from rank_processes import joined
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, WeightedRandomSampler


class Scheduled(Regression):
    def train_dataloader(self):
        data = super().train_dataloader().dataset
        generator = torch.Generator().manual_seed(0)  # on all ranks, of whose batches Lightning gives each its share
        return DataLoader(data, batch_size=8, sampler=WeightedRandomSampler([1.0] * len(data), len(data), generator=generator))

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches  # makes the dataloader early
        return super().configure_optimizers()


class Sharded(Scheduled):
    def configure_model(self):
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Validations(Callback):
    """Counts the batches of validations; if `is_told`, the training is about to be ended from the first one on."""

    def __init__(self, is_told):
        self.is_told = is_told
        self.num_batches = 0

    def on_validation_batch_start(self, trainer, *_):
        self.num_batches += trainer.validating

    def is_terminating(self):
        return self.is_told and self.num_batches > 0


def fit(strategy, model, epochs, callback):
    trainer = prepare_trainer(
        make_trainer(
            max_epochs=epochs,
            devices="auto",
            strategy=strategy,
            plugins=[PrefectEnvironment()],
            callbacks=[callback, ReportCallback()],
            logger=ReportLogger(),
            log_every_n_steps=1,
        )
    )
    with resume_path() as path:
        trainer.fit(model, ckpt_path=path)
    return trainer


def main(kind, epochs, ends, *place):
    """Train for `epochs`, or until the first batch of a validation."""
    validations = Validations(is_told=ends == "in a validation")
    with joined(*place, is_terminating=validations.is_terminating) as session:
        if kind == "ddp":
            strategy, model = PrefectDDPStrategy(), Scheduled(dropout=0.5)
        else:
            strategy, model = PrefectModelParallelStrategy(), Sharded(dropout=0.5)
        trainer = fit(strategy, model, int(epochs), validations)
        assert trainer.world_size == 2
        assert (validations.num_batches == 1) == validations.is_told
        weights = [it.full_tensor() if isinstance(it, DTensor) else it for it in map(torch.Tensor.detach, model.parameters())]
        if session.context.world_rank == 0:
            torch.save(weights, Path(session.run.storage.url, f"weights-{kind}-{session.context.attempt}.pt"))
