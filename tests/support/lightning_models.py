"""A small LightningModule whose training is the same bit for bit whenever it is repeated."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 4


class Regression(LightningModule):
    def __init__(self, *, dropout=0.0, **ends) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        self.layers = torch.nn.Sequential(*layers[:2], *([torch.nn.Dropout(dropout)] if dropout else []), layers[2])
        self.ends = ends

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def on_train_epoch_start(self):
        if self.current_epoch == self.ends.get("raise_at"):
            raise ValueError("boom from the training")

    def on_train_epoch_end(self):
        self.log("late", float(self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == self.ends.get("at_step"):
            self.ends["then"]()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def train_dataloader(self):
        return self.loader(0)

    def val_dataloader(self):
        return self.loader(1)

    def loader(self, seed: int) -> DataLoader:
        data = torch.randn(8 * BATCHES, 5, generator=torch.Generator().manual_seed(seed))
        return DataLoader(TensorDataset(data[:, :4], data[:, 4:]), batch_size=8)


def make_trainer(**arguments) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{**quiet, "devices": 1, "max_epochs": 4, **arguments})
