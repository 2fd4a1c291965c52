"""Ray Tune's guide to cloud checkpointing: a storage that outlives the machine, the 5 best checkpoints by a score, resume AUTO.

    python examples/ray_tune/cloud_checkpoints.py s3://bucket/sweeps

Started again, also on another machine and after a kill, it continues. Without an argument it stores in ./demo-checkpoints.
"""

import sys
from typing import Any

import torch
from prefect_torch.ckpt import get_checkpoint, report
from torch import nn


def train_fn(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(1)
    model = nn.Sequential(nn.Linear(4, config["width"]), nn.Tanh(), nn.Linear(config["width"], 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": -1}
    checkpoint = get_checkpoint()
    if checkpoint:
        checkpoint.load_state(state)
    for epoch in range(state["epoch"] + 1, config["epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["epoch"] = epoch
        report({"val-loss": loss.item()}, state=state)


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, RunConfig, SearchConfig, choice, loguniform, sweep

    found = sweep(
        f"{__file__}:train_fn",
        space={"lr": loguniform(1e-3, 1e-1), "width": choice([4, 8])},
        config={"epochs": 8},
        search=SearchConfig(metric="val-loss", mode="min", num_trials=2, max_concurrent=2, seed=0),
        # Instead of keep_checkpoints_num=5, checkpoint_score_attr="min-val-loss" and resume="AUTO" of tune.run.
        checkpoint=CheckpointConfig(num_to_keep=5, checkpoint_score_attribute="val-loss", checkpoint_score_order="min"),
        run=RunConfig(name="cloud", storage=sys.argv[1] if len(sys.argv) > 1 else "demo-checkpoints", resume="auto"),
    )
    print(f"best config: {found.best.config}, its checkpoint: {found.best.checkpoint}")
