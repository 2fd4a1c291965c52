"""Ray Tune's manual restore: one trial of a sweep goes on by hand, from its checkpoint, with its config.

python examples/ray_tune/manual_restore.py
"""

from typing import Any

import torch
from prefect_torch.ckpt import get_checkpoint, report


def train_fn(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=config["lr"])
    state: dict[str, Any] = {"weight": weight, "optimizer": optimizer, "epoch": -1}
    checkpoint = get_checkpoint()
    if checkpoint:
        checkpoint.load_state(state)
    start = int(state["epoch"]) + 1
    for epoch in range(start, config["epochs"]):
        loss = (weight - 3).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["epoch"] = epoch
        report({"loss": loss.item()}, state=state)
    return start


if __name__ == "__main__":
    from prefect_torch.flows import RunConfig, SearchConfig, loguniform, sweep, train

    found = sweep(
        f"{__file__}:train_fn",
        space={"lr": loguniform(1e-2, 1e-1)},
        config={"epochs": 3},
        search=SearchConfig(metric="loss", num_trials=1, seed=0),
        run=RunConfig(name="first-look", storage="demo-checkpoints"),
    )
    # Instead of restore="PATH" of tune.run.
    result = train(
        f"{__file__}:train_fn",
        config={**found.best.config, "epochs": 6},
        run=RunConfig(name="best-goes-on", storage="demo-checkpoints"),
        resume_from=found.best.checkpoint,
    )
    print(f"continued at epoch {result.return_value}, loss {result.metrics['loss']:.3f}")
