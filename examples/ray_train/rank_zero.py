"""A helper that saves on rank 0, in a temporary directory; and a run with a name and a storage of its own.

python examples/ray_train/rank_zero.py [STORAGE]
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from prefect_torch.tasks import prepare_model
from sklearn.datasets import load_diabetes
from torch import nn


@contextmanager
def temporary_checkpoint(model: nn.Module, epoch: int) -> Iterator[Checkpoint | None]:
    """Yield the checkpoint to report: rank 0's, and None on the others."""
    with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
        if get_context().get_world_rank() != 0:
            yield None
            return
        torch.save({"model": model.state_dict(), "epoch": epoch}, Path(temp_checkpoint_dir, "checkpoint.pt"))
        yield Checkpoint.from_directory(temp_checkpoint_dir)


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    patients: Any = load_diabetes()
    inputs = torch.tensor(patients.data).float()
    targets = torch.tensor(patients.target / patients.target.max()).float()
    model = prepare_model(nn.Sequential(nn.Linear(10, 1), nn.Flatten(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    start_epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            saved = torch.load(Path(checkpoint_dir, "checkpoint.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        start_epoch = saved["epoch"] + 1

    for epoch in range(start_epoch, config["num_epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with temporary_checkpoint(model, epoch) as checkpoint:
            report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)
    return start_epoch


if __name__ == "__main__":
    from prefect_torch.flows import RunConfig, ScalingConfig, train

    # Started again with the same name and storage and with more epochs, it continues.
    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 3},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(name="rank-zero", storage=sys.argv[1] if len(sys.argv) > 1 else "demo-checkpoints"),
    )
    print(f"began with epoch {result.return_value}; everything lies in {result.path}")
