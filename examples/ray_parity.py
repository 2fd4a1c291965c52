"""Ray Train's example of saving and resuming, with only the imports changed.

A linear regression that raises on purpose at epoch 1 and continues at epoch 2: once with rank 0 writing the files, once
with every rank writing its own into the one checkpoint.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    n, rank = 100, get_context().world_rank
    torch.manual_seed(0)
    inputs = torch.linspace(0, 1, n).reshape(n, 1)
    targets = 2 * inputs + 1
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own_file = f"model-rank={rank}.pt" if config["every_rank"] else "model.pt"

    start_epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model.load_state_dict(torch.load(Path(checkpoint_dir, own_file), weights_only=True))
            optimizer.load_state_dict(torch.load(Path(checkpoint_dir, "optimizer.pt"), weights_only=True))
            start_epoch = torch.load(Path(checkpoint_dir, "extra_state.pt"), weights_only=True)["epoch"] + 1

    ddp_model = DistributedDataParallel(model)
    for epoch in range(start_epoch, config["num_epochs"]):
        loss = nn.functional.mse_loss(ddp_model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if config["every_rank"] or rank == 0:
                torch.save(model.state_dict(), Path(temp_checkpoint_dir, own_file))
                if rank == 0:
                    torch.save(optimizer.state_dict(), Path(temp_checkpoint_dir, "optimizer.pt"))
                    torch.save({"epoch": epoch}, Path(temp_checkpoint_dir, "extra_state.pt"))
                checkpoint = Checkpoint.from_directory(temp_checkpoint_dir)
            report({"loss": loss.item()}, checkpoint=checkpoint)
        if epoch == 1 and start_epoch == 0:
            raise RuntimeError("Intentional error to showcase restoration!")
    return start_epoch


def main() -> int:
    # Here, so that the ranks, which import this file for train_func, do not wait for Prefect.
    from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train  # noqa: PLC0415

    for every_rank in (False, True):
        result = train(
            f"{__file__}:train_func",
            config={"num_epochs": 5, "every_rank": every_rank},
            scaling=ScalingConfig(num_workers=2),
            run=RunConfig(storage="demo-checkpoints"),
            checkpoint=CheckpointConfig(num_to_keep=1),
            failure=FailureConfig(max_failures=1),
        )
        assert result.checkpoint is not None
        files = [entry.path for entry in result.checkpoint.manifest.files]
        print(f"continued at epoch {result.return_value} in attempt {result.attempts}; the checkpoint holds {files}")
        if (result.return_value, result.attempts) != (2, 2):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
