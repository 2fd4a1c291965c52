"""The training of examples/lightning_digits.py: plain Lightning, except the names of prefect_torch.ckpt.lightning."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from prefect_torch.ckpt.lightning import PrefectDDPStrategy, PrefectEnvironment, ReportCallback, ReportLogger, resume_path
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(LightningModule):
    """A small classifier of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log loss and accuracy of a batch."""
        images, labels = batch
        scores = self.layers(images)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels), sync_dist=True)
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def load_data() -> tuple[Any, Any]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return training, validation


def train_digits(config: dict[str, Any]) -> float:
    """Train on this rank; Lightning shares the data among the ranks."""
    torch.manual_seed(0)
    training, validation = load_data()
    trainer = Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        strategy=PrefectDDPStrategy(),
        plugins=[PrefectEnvironment()],
        callbacks=[ReportCallback()],
        logger=ReportLogger(),
        enable_progress_bar=False,
    )
    model = Digits()
    with resume_path() as path:
        trainer.fit(model, DataLoader(training, 32, shuffle=True), DataLoader(validation, 64), ckpt_path=path)
    trainer.validate(model, DataLoader(validation, 64), verbose=False)
    return float(trainer.callback_metrics["val_accuracy"])
