"""A Lightning training that draws random numbers wherever trainings do; what it ends with is written down.

It is a process of its own: threads of others, such as those of Prefect's clients, draw from a process's generators as well.
"""

import random
from pathlib import Path

import numpy as np
import torch
from exact_ends import write_end
from lightning.pytorch.callbacks import EarlyStopping
from lightning_models import Regression, make_trainer
from prefect_torch.ckpt.lightning import ReportCallback, resume_path
from rank_processes import joined
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

BOOM = "boom from the training"
LOADERS = {"from the start": DataLoader, "where it was": StatefulDataLoader}


class Drawing(Regression):
    """Draws in every way that trainings do: dropout, an order, what a dataset or a transform draws, and once in an epoch."""

    def __init__(self, goes_on, schedule, **ends):
        super().__init__(dropout=0.5, **ends)
        self.goes_on = goes_on
        self.schedule = schedule

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.shift = torch.rand(()).item()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["shift"] = self.shift

    def on_load_checkpoint(self, checkpoint):
        self.shift = checkpoint["shift"]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        shift = self.shift + random.random() + np.random.random()  # noqa: NPY002 - the process's
        return super().training_step((inputs + shift, targets), batch_idx)

    def train_dataloader(self):
        return LOADERS[self.goes_on](super().train_dataloader().dataset, batch_size=8, shuffle=True)

    def configure_optimizers(self):
        if self.schedule == "by epoch":
            return super().configure_optimizers()
        optimizer = torch.optim.Adam(self.parameters())
        schedule = OneCycleLR(optimizer, max_lr=0.05, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the process's


def end():
    raise ValueError(BOOM)


def main(*arguments):
    """Train, and exit with 3 if the training raises its own error."""
    try:
        train(*arguments)
    except ValueError as exc:
        if str(exc) != BOOM:
            raise
        raise SystemExit(3) from exc


def train(chosen, length, goes_on, schedule, ends_at, *place):
    """Train with a callback of the arguments `chosen`; write the end down unless it raises early, at step `ends_at`."""
    with joined(*place) as session:
        seed(session.context.attempt)
        model = Drawing(goes_on, schedule, **({} if ends_at is None else {"at_step": ends_at, "then": end}))
        stopping = EarlyStopping("val_loss", patience=9, min_delta=1.0)  # it counts each validation that improves less
        trainer = make_trainer(callbacks=[stopping, ReportCallback(**chosen)], **length)
        with resume_path() as path:
            seed(session.context.attempt)
            trainer.fit(model, ckpt_path=path)
        root = Path(session.run.storage.url)
        write_end(trainer.optimizers[0], root / "end-0.pt")
        torch.save([model.state_dict(), stopping.state_dict(), trainer.callback_metrics["val_loss"]], root / "model.pt")
