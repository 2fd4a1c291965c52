"""What a training ends with, for comparison bit by bit."""

import random

import numpy as np
import torch


def weights(model):
    """Return all weights of a model as one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def write_end(optimizer, path):
    """Write the optimizer's state and what the process's generators would draw next."""
    drawn = [torch.rand(4), torch.tensor([random.random(), np.random.random()], dtype=torch.float64)]  # noqa: NPY002 - its own
    torch.save({"optimizer": optimizer.state_dict(), "drawn": drawn}, path)


def same(first, second):
    """Say whether two structures of tensors and values are equal in every bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def same_ends(whole, resumed, num_ranks):
    """Say whether all ranks wrote the same below two folders."""
    return all(same(*(torch.load(root / f"end-{rank}.pt") for root in (whole, resumed))) for rank in range(num_ranks))
