"""Ray Train's "save checkpoints from multiple workers": each rank saves its part of a sharded model.

python examples/ray_train/sharded.py
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from prefect_torch.tasks import prepare_model
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def own_part(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of each parameter."""
    for name, parameter in model.named_parameters():
        whole: Any = parameter.detach()
        yield name, whole.to_local() if isinstance(whole, DTensor) else whole


def train_func(config: dict[str, Any]) -> int:
    """Return the epoch that this attempt began with."""
    rank = get_context().get_world_rank()
    patients: Any = load_diabetes()
    inputs = torch.tensor(patients.data).float()
    targets = torch.tensor(patients.target / patients.target.max()).float()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)), parallel_strategy="fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    start_epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory(include=[f"model-rank={rank}.pt"]) as checkpoint_dir:
            saved = torch.load(Path(checkpoint_dir, f"model-rank={rank}.pt"), weights_only=True)
        for name, part in own_part(model):
            part.copy_(saved["model"][name])
        start_epoch = saved["epoch"] + 1

    for epoch in range(start_epoch, config["num_epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            torch.save({"model": dict(own_part(model)), "epoch": epoch}, Path(temp_checkpoint_dir, f"model-rank={rank}.pt"))
            report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(temp_checkpoint_dir))
        if epoch == 1 and start_epoch == 0:
            raise RuntimeError("Intentional error to showcase restoration!")
    return start_epoch


if __name__ == "__main__":
    from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 5},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage="demo-checkpoints"),
        failure=FailureConfig(max_failures=1),
    )
    assert result.checkpoint is not None
    print(f"continued at epoch {result.return_value}; {[entry.path for entry in result.checkpoint.manifest.files]}")
