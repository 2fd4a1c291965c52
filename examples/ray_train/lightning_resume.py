"""Ray Train's Lightning examples: the callback saves after every epoch, fit continues from its file; the imported names differ.

python examples/ray_train/lightning_resume.py
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from prefect_torch.ckpt import get_checkpoint
from prefect_torch.ckpt.lightning import (
    PrefectDDPStrategy,
    PrefectEnvironment,
    ReportCallback,
    prepare_trainer,
)
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FAILING_EPOCH = 2


class Progression(LightningModule):
    """A regression that fails once, after its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        """Fail in the first attempt."""
        if self.current_epoch == FAILING_EPOCH and get_checkpoint() is None:
            raise RuntimeError("Intentional error to showcase restoration!")


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt ended with."""
    patients: Any = load_diabetes()
    progression = patients.target / patients.target.max()
    data = TensorDataset(torch.tensor(patients.data).float(), torch.tensor(progression).float())
    model, loader = Progression(), DataLoader(data, batch_size=64)
    trainer = Trainer(
        max_epochs=config["num_epochs"],
        accelerator="cpu",
        devices="auto",
        strategy=PrefectDDPStrategy(),
        plugins=[PrefectEnvironment()],
        callbacks=[ReportCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = prepare_trainer(trainer)

    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            trainer.fit(model, loader, ckpt_path=str(Path(checkpoint_dir, ReportCallback.CHECKPOINT_NAME)))
    else:
        trainer.fit(model, loader)
    return trainer.current_epoch


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 4},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage="demo-checkpoints"),
        checkpoint=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"),
        failure=FailureConfig(max_failures=1),
    )
    print(f"ended after epoch {result.return_value} in attempt {result.attempts}; {result.best_checkpoints}")
