"""Ray Tune's population based training of a small net: bad trials go on from the checkpoints of good ones, with other rates.

python examples/ray_tune/pbt.py
"""

from typing import Any

import torch
from prefect_torch.ckpt import get_checkpoint, report
from torch import nn


def train_fn(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs.square().sum(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "iteration": 0}
    checkpoint = get_checkpoint()
    if checkpoint:
        checkpoint.load_state(state)
    for group in optimizer.param_groups:
        group["lr"] = config["lr"]  # the checkpoint of another trial has that trial's rate
    for iteration in range(state["iteration"] + 1, config["iterations"] + 1):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["iteration"] = iteration
        report({"loss": loss.item()}, state=state, step=iteration)


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, RunConfig, SearchConfig, loguniform, sweep

    found = sweep(
        f"{__file__}:train_fn",
        space={"lr": loguniform(1e-4, 1e-1)},
        config={"iterations": 4},
        search=SearchConfig(
            metric="loss",
            num_trials=3,
            seed=1,
            sampler="random",
            scheduler="pbt",
            perturbation_interval=2,
            max_t=4,
            keep_best_trials=1,
        ),
        checkpoint=CheckpointConfig(num_to_keep=1),
        run=RunConfig(name="population", storage="demo-checkpoints"),
    )
    for trial in found.trials:
        print(f"trial {trial.number}: lr {trial.config['lr']:.4f}, loss {trial.metrics['loss']:.3f}")
