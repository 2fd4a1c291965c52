"""Which samplers can make room for one that shares the data among ranks. Imports torch, never prefect: ranks use it."""

import copy
import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler


def reason_not_shareable(loader: "DataLoader[Any]") -> str | None:
    """Return why ranks cannot share the data of `loader` without changing which they are; None where they can."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__}) has no items to share among ranks"
    if loader.batch_size is None and loader.batch_sampler is not None:
        return f"a batch sampler ({type(loader.batch_sampler).__name__}) cannot be shared among ranks"
    if type(sampler) is SequentialSampler:
        return None
    if not shuffles(loader):
        return f"a {type(sampler).__name__} would be lost to a DistributedSampler"
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return "a RandomSampler with replacement or num_samples draws what no DistributedSampler does"
    return None


def shuffles(loader: "DataLoader[Any]") -> bool:
    """Say whether `loader` was made with shuffle=True, or with what that makes."""
    theirs = sys.modules.get("torchdata.stateful_dataloader.sampler")  # StatefulDataLoader makes a class of its own
    return type(loader.sampler) in {RandomSampler, getattr(theirs, "RandomSampler", RandomSampler)}


def common_seed(loader: "DataLoader[Any]", world_size: int) -> int:
    """Return the seed of rank 0's generator, 0 without one: ranks may seed theirs differently, and would draw items twice."""
    if loader.generator is None:
        return 0
    seeds: list[int] = [loader.generator.initial_seed()]
    if world_size > 1:
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0] % 2**32  # the sampler adds the epoch, and torch seeds with 64 bits


def with_sampler(loader: "DataLoader[Any]", sampler: "Sampler[Any]") -> "DataLoader[Any]":
    """Return a copy with another sampler.

    A copy and not a new one: a subclass, and arguments that torch adds some day, stay. torch refuses to set these attributes
    lest the two kinds of samplers come apart; here they are set together.
    """
    copied = copy.copy(loader)
    changed: dict[str, Any] = {"sampler": sampler, "_iterator": None}
    if loader.batch_sampler is not None:
        assert loader.batch_size is not None
        changed["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    vars(copied).update(changed)
    return copied
