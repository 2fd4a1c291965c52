"""What several ways need of local files."""

import os
from pathlib import Path

import torch


def sync(path):
    """Have the file or folder at `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder):
    for path in [*Path(folder).rglob("*"), Path(folder), Path(folder).parent]:
        sync(path)


def save_training(training, number, path):
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "epoch": number}, path)


def load_training(training, path):
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    training.model.load_state_dict(loaded["model"])
    training.optimizer.load_state_dict(loaded["optimizer"])
    return loaded["epoch"]
