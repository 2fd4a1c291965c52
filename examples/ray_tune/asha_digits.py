"""Ray Tune's ASHA on handwritten digits: three of four trials pause after the first epoch, and the best goes on.

python examples/ray_tune/asha_digits.py
"""

from typing import Any

import torch
from prefect_torch.ckpt import get_checkpoint, report
from sklearn.datasets import load_digits
from torch import nn


def train_fn(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    digits: Any = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    checkpoint = get_checkpoint()
    if checkpoint:
        checkpoint.load_state(state)
    for epoch in range(state["epoch"] + 1, config["epochs"] + 1):
        for batch in range(0, 1500, 100):
            loss = nn.functional.cross_entropy(model(images[batch : batch + 100]), labels[batch : batch + 100])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        state["epoch"] = epoch
        report({"accuracy": accuracy}, state=state, step=epoch)


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, RunConfig, SearchConfig, choice, loguniform, sweep

    found = sweep(
        f"{__file__}:train_fn",
        space={"lr": loguniform(1e-3, 1e-1), "width": choice([16, 64])},
        config={"epochs": 4},
        search=SearchConfig(
            metric="accuracy",
            mode="max",
            num_trials=4,
            max_concurrent=2,
            seed=0,
            scheduler="asha",
            max_t=4,
            grace_period=1,
            reduction_factor=4,
        ),
        checkpoint=CheckpointConfig(num_to_keep=1),
        run=RunConfig(name="digits-asha", storage="demo-checkpoints"),
    )
    print(f"best: accuracy {found.best.metrics['accuracy']:.3f} with {found.best.config}")
