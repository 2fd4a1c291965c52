"""Ray Train's "save a checkpoint", native PyTorch: every rank reports, rank 0 saves; only the imports differ.

python examples/ray_train/pytorch_save.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_context, report
from prefect_torch.tasks import prepare_data_loader, prepare_model
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> None:
    patients: Any = load_diabetes()
    progression = patients.target / patients.target.max()
    data = TensorDataset(torch.tensor(patients.data).float(), torch.tensor(progression).float())
    loader = prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(10, 1), nn.Flatten(0)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    for _ in range(config["num_epochs"]):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if get_context().get_world_rank() == 0:
                unwrapped = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
                torch.save(unwrapped.state_dict(), Path(temp_checkpoint_dir, "model.pt"))
                checkpoint = Checkpoint.from_directory(temp_checkpoint_dir)
            report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 5},
        scaling=ScalingConfig(num_workers=2),
        checkpoint=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"),
    )
    print(result.metrics, [(checkpoint.path, metrics) for checkpoint, metrics in result.best_checkpoints])
