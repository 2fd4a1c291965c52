"""A training that depends on all of its state: resumed anywhere, it ends with the same bits, or something was lost.

A CNN on real scans of digits, with dropout, momentum, and batches drawn at random: weights, momentum and every rank's random
numbers must come back. One thread and deterministic algorithms. Momentum and the mean of gradients are written out, since
torch.optim and DistributedDataParallel import torch's compiler, which takes longer than this whole training. For the same
reason the digits are read from a file, which the program that starts the training has made.
"""

import hashlib
import tempfile
import time
from pathlib import Path

import torch
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from torch import distributed as dist
from torch import nn

BATCH = 16


def write_digits(path: str) -> None:
    """Write 512 scans for training and 128 for validation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:640], dtype=torch.float32).unsqueeze(1) / 16
    torch.save({"images": images, "labels": torch.tensor(digits.target[:640])}, path)


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(8 * 4 * 4, 10)),
    )


def train_exactly(config: dict) -> str:
    """Train `epochs` epochs of `batches` steps, reporting a checkpoint after each, and return a digest of the final state."""
    torch.set_deterministic_debug_mode("error")  # what use_deterministic_algorithms does, less its import of the compiler
    torch.set_num_threads(1)
    rank = get_context().world_rank
    data = torch.load(config["data"], weights_only=True)
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(1 + rank)
    momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for epoch in range(_restore(model, momentum, rank), config["epochs"]):
        _train_epoch(model, momentum, data, config["batches"])
        _save(model, momentum, rank, epoch, _validate(model, data))
        _acknowledge(config, rank, epoch)
        _wait_for(config, epoch)
        time.sleep(config.get("pause_s", 0.0))
    return _digest([*model.state_dict().values(), *momentum])


def _restore(model, momentum, rank) -> int:
    """Take up the checkpoint, if there is one, and return the next epoch."""
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(f"{folder}/state.pt", weights_only=True)
        random_state = torch.load(f"{folder}/random-{rank}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    for buffer, stored in zip(momentum, state["momentum"], strict=True):
        buffer.copy_(stored)
    torch.set_rng_state(random_state)
    return state["epoch"] + 1


def _train_epoch(model, momentum, data, batches) -> None:
    model.train()
    for _ in range(batches):
        chosen = torch.randint(512, (BATCH,))
        model.zero_grad()
        nn.functional.cross_entropy(model(data["images"][chosen]), data["labels"][chosen]).backward()
        with torch.no_grad():
            for parameter, buffer in zip(model.parameters(), momentum, strict=True):
                dist.all_reduce(parameter.grad)
                buffer.mul_(0.9).add_(parameter.grad / dist.get_world_size())
                parameter.sub_(0.02 * buffer)


def _validate(model, data) -> float:
    model.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(data["images"][512:]), data["labels"][512:]).item()


def _save(model, momentum, rank, epoch, loss) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.get_rng_state(), f"{folder}/random-{rank}.pt")
        if rank == 0:
            torch.save({"model": model.state_dict(), "momentum": momentum, "epoch": epoch}, f"{folder}/state.pt")
        report({"val_loss": loss, "epoch": epoch}, Checkpoint.from_directory(folder))


def _acknowledge(config, rank, epoch) -> None:
    """Tell, outside of the storage, that the report of this step has returned."""
    if rank == 0 and "acknowledged" in config:
        with open(config["acknowledged"], "a") as file:
            file.write(f"{epoch}\n")


def _wait_for(config, epoch) -> None:
    """Go on when the leader has pruned after this epoch, if that is wanted: then every run has the same events."""
    while "pruned" in config and not Path(config["pruned"], str(epoch)).exists():
        time.sleep(0.005)


def _digest(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
