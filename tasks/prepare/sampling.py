"""Replacing the sampler of a data loader by one that shares the data among ranks, where that is possible."""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that draws on the CPU, as its generator does, whatever torch's default device is."""

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):
            return super().__iter__()


def reason_not_shareable(loader: "DataLoader[Any]") -> str | None:
    """Return why ranks cannot share the data of `loader` without changing them; None if they can."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__}) has no items to share among ranks"
    if loader.batch_sampler is not None and (loader.batch_size is None or not _is_plain(loader.batch_sampler, BatchSampler)):
        return f"a batch sampler ({type(loader.batch_sampler).__name__}) cannot be shared among ranks"
    if type(sampler) is not SequentialSampler and not shuffles(loader):
        return f"a {type(sampler).__name__} would be lost to a DistributedSampler"
    if getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]  # a Sized
        return f"a {type(sampler).__name__} with replacement, num_samples or data of its own is not replaceable"
    return None


def reason_order_is_lost(loader: "DataLoader[Any]") -> str | None:
    """Return why `loader`, which keeps its position, continues with other items nevertheless; None if no reason is known."""
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    lost = [type(it).__name__ for it in samplers(loader) if isinstance(it, drawing) and not hasattr(it, "state_dict")]
    return f"a {lost[0]} draws again after a restart, so that a position in its order means nothing" if lost else None


def shuffles(loader: "DataLoader[Any]") -> bool:
    """Return whether `loader` was made with shuffle=True, or with the sampler that this creates."""
    return _is_plain(loader.sampler, RandomSampler)


def samplers(loader: "DataLoader[Any]") -> list[Any]:
    """Return the samplers of `loader`, each once: its sampler, its batch sampler and the sampler of that."""
    drawn_from = getattr(loader.batch_sampler, "sampler", None)
    return [loader.sampler, loader.batch_sampler, *([] if drawn_from is loader.sampler else [drawn_from])]


def distributed_sampler(loader: "DataLoader[Any]") -> "DistributedSampler[Any] | None":
    """Return the sampler that shares the data of `loader` among ranks, also below a batch sampler; None if there is none."""
    return next((sampler for sampler in samplers(loader) if isinstance(sampler, DistributedSampler)), None)


def common_seed(loader: "DataLoader[Any]", world_size: int) -> int:
    """Return the seed of rank 0's generator, 0 without one: ranks with different seeds would draw items twice."""
    generator = loader.generator
    if generator is None and isinstance(loader.sampler, RandomSampler):  # a sampler made by the user has its own
        generator = loader.sampler.generator
    if generator is None:
        return 0
    seeds: list[int] = [generator.initial_seed()]
    if world_size > 1:
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0] % 2**32  # the sampler adds the epoch, and torch seeds with 64 bits


def with_sampler(loader: "DataLoader[Any]", sampler: "Sampler[Any]") -> "DataLoader[Any]":
    """Return a copy with another sampler.

    A copy, not a new one, keeps a subclass, and arguments that torch adds in the future. torch refuses to set these attributes
    lest the two kinds of samplers diverge; here they are set together.
    """
    copied = copy.copy(loader)
    changed: dict[str, Any] = {"sampler": sampler, "_iterator": None}
    if loader.batch_sampler is not None:
        assert loader.batch_size is not None
        changed["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    vars(copied).update(changed)
    return copied


def _is_plain(sampler: object, kind: type) -> bool:
    """Return whether `sampler` is one of torch, not a subclass that draws differently."""
    theirs = sys.modules.get("torchdata.stateful_dataloader.sampler")  # StatefulDataLoader has classes of its own
    return type(sampler) in {kind, getattr(theirs, kind.__name__, kind)}
