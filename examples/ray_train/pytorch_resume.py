"""Ray Train's "restore training state", native PyTorch: an intentional error, then a resume; the imports differ.

python examples/ray_train/pytorch_resume.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from prefect_torch.tasks import prepare_data_loader, prepare_model
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    patients: Any = load_diabetes()
    progression = patients.target / patients.target.max()
    data = TensorDataset(torch.tensor(patients.data).float(), torch.tensor(progression).float())
    loader = prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True))
    model = nn.Sequential(nn.Linear(10, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    start_epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model.load_state_dict(torch.load(Path(checkpoint_dir, "model.pt"), weights_only=True))
            optimizer.load_state_dict(torch.load(Path(checkpoint_dir, "optimizer.pt"), weights_only=True))
            start_epoch = torch.load(Path(checkpoint_dir, "extra_state.pt"), weights_only=True)["epoch"] + 1

    ddp_model = prepare_model(model)
    loss = torch.zeros(())
    for epoch in range(start_epoch, config["num_epochs"]):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(ddp_model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if get_context().get_world_rank() == 0:
                unwrapped = ddp_model.module if isinstance(ddp_model, DistributedDataParallel) else ddp_model
                torch.save(unwrapped.state_dict(), Path(temp_checkpoint_dir, "model.pt"))
                torch.save(optimizer.state_dict(), Path(temp_checkpoint_dir, "optimizer.pt"))
                torch.save({"epoch": epoch}, Path(temp_checkpoint_dir, "extra_state.pt"))
                checkpoint = Checkpoint.from_directory(temp_checkpoint_dir)
            report({"loss": loss.item()}, checkpoint=checkpoint)

        if epoch == 1 and start_epoch == 0:
            raise RuntimeError("Intentional error to showcase restoration!")
    return start_epoch


if __name__ == "__main__":
    from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 5},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(name="diabetes", storage="demo-checkpoints"),
        failure=FailureConfig(max_failures=1),
    )
    print(f"continued at epoch {result.return_value} in attempt {result.attempts}; {result.checkpoint}")
