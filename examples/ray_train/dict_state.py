"""A dict as the checkpoint, as Ray's Checkpoint.from_dict and to_dict once had it: live objects and plain values, no files.

python examples/ray_train/dict_state.py
"""

from typing import Any

import torch
from prefect_torch.ckpt import get_checkpoint, report
from prefect_torch.tasks import prepare_model
from sklearn.datasets import load_diabetes
from torch import nn


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    patients: Any = load_diabetes()
    inputs = torch.tensor(patients.data).float()
    targets = torch.tensor(patients.target / patients.target.max()).float()
    model = prepare_model(nn.Sequential(nn.Linear(10, 1), nn.Flatten(0)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": -1, "losses": []}
    checkpoint = get_checkpoint()
    if checkpoint:
        checkpoint.load_state(state)
    start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, config["num_epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.update(epoch=epoch, losses=[*state["losses"], loss.item()])
        report({"loss": loss.item()}, state=state)
        if epoch == 1 and start_epoch == 0:
            raise RuntimeError("Intentional error to showcase restoration!")
    assert len(state["losses"]) == config["num_epochs"]
    return int(start_epoch)


if __name__ == "__main__":
    from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 5},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage="demo-checkpoints"),
        failure=FailureConfig(max_failures=1),
    )
    print(f"continued at epoch {result.return_value} in attempt {result.attempts}")
