"""The training of examples/digits.py: plain PyTorch that does not import Prefect, so that a rank starts fast."""

import os
import signal
import tempfile
from typing import Any

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

KILLED_EPOCH = 3


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data() -> tuple[Any, Any]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return training, validation


def validate(model: nn.Module, data: Any) -> dict[str, float]:
    images, labels = next(iter(DataLoader(data, batch_size=len(data))))
    with torch.no_grad():
        scores = model(images)
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    return {"val_loss": nn.functional.cross_entropy(scores, labels).item(), "val_accuracy": accuracy}


def train_digits(config: dict[str, Any]) -> float:
    """Train on this rank; randomness depends only on the epoch, so a resumed training takes the same course."""
    context = get_context()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    training, validation = load_data()
    sampler: Any = DistributedSampler(training, seed=0)
    loader = DataLoader(training, batch_size=32, sampler=sampler)

    start = 0
    resumed = get_checkpoint()
    if resumed is not None:
        with resumed.as_directory() as directory:
            state = torch.load(f"{directory}/state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
        if context.world_rank == 0:
            print(f"resuming from {resumed.id}, epoch {start} next")

    metrics = dict.fromkeys(["val_loss", "val_accuracy"], 0.0) if resumed is None else resumed.metrics
    for epoch in range(start, config["epochs"]):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            if config["kill"] and resumed is None and epoch == KILLED_EPOCH and step == 5 and context.world_rank == 1:  # noqa: PLR2004
                print("rank 1 kills itself, as a lost machine would")
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        metrics = validate(model.module, validation)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if context.world_rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, f"{directory}/state.pt")
                checkpoint = Checkpoint.from_directory(directory)
                print(f"epoch {epoch}: loss {metrics['val_loss']:.4f}, accuracy {metrics['val_accuracy']:.1%}")
            report(metrics, checkpoint=checkpoint, progress=(epoch + 1) / config["epochs"])
    return float(metrics["val_accuracy"])  # type: ignore[arg-type]  # reported as a float
