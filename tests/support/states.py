"""States to report, and how to compare them bit by bit."""

import numpy as np
import torch
from prefect_torch.ckpt import RankLocal


def make_training(seed: int, steps: int = 1, optimizer=torch.optim.AdamW):
    """Return a model with buffers, its optimizer with a state after `steps` steps, and a scheduler."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    chosen = optimizer(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(chosen, [3, 5])
    for _ in range(steps):
        take_step(model, chosen, torch.randn(8, 30, generator=generator))
        scheduler.step()
    return model, chosen, scheduler


def take_step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def make_state(seed: int, rank: int = 0, steps: int = 1, **more):
    """Return a state that holds one of everything; what differs between ranks tells the rank."""
    model, optimizer, scheduler = make_training(seed, steps)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra": {"epoch": seed, "losses": [0.5, float("inf")], "position": {"sample": 100 * seed + rank}, "none": None},
        "rng": RankLocal(torch.arange(5000) + rank + seed),
        "small": torch.arange(5) + seed,
        "large": torch.arange(100_000, dtype=torch.float64).reshape(1000, 100) + seed,
        **more,
    }


def plain(value):
    """Return a state as nested dicts and lists of tensors and values."""
    if isinstance(value, RankLocal):
        return plain(value.value)
    if hasattr(value, "state_dict"):
        return plain(value.state_dict())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def check_equal(one, other, path="state"):
    """Compare two states to the last bit."""
    one, other = plain(one), plain(other)
    assert type(one) is type(other), path
    if isinstance(one, np.ndarray):
        one, other = torch.from_numpy(one), torch.from_numpy(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            check_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            check_equal(a, b, f"{path}.{number}")
    else:
        assert one == other, path
