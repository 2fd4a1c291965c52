"""Which samplers can make room for one that shares the data among ranks. Imports torch, never prefect: ranks use it."""

import copy
import sys
from typing import Any

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


def reason_not_shareable(loader: "DataLoader[Any]") -> str | None:
    """Return why ranks cannot share the data of `loader` without changing which they are; None where they can."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__}) has no items to share among ranks"
    if loader.batch_sampler is not None and (loader.batch_size is None or not _is_plain(loader.batch_sampler, BatchSampler)):
        return f"a batch sampler ({type(loader.batch_sampler).__name__}) cannot be shared among ranks"
    if type(sampler) is not SequentialSampler and not shuffles(loader):
        return f"a {type(sampler).__name__} would be lost to a DistributedSampler"
    if getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]  # a Sized
        return f"a {type(sampler).__name__} with replacement, num_samples or data of its own draws what no other does"
    return None


def reason_order_is_lost(loader: "DataLoader[Any]") -> str | None:
    """Return why `loader`, which keeps its position, goes on with other items all the same; None where that is not known."""
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    lost = [type(it).__name__ for it in samplers(loader) if isinstance(it, drawing) and not hasattr(it, "state_dict")]
    return f"a {lost[0]} draws anew after a restart, so that a position in its order means nothing" if lost else None


def shuffles(loader: "DataLoader[Any]") -> bool:
    """Say whether `loader` was made with shuffle=True, or with what that makes."""
    return _is_plain(loader.sampler, RandomSampler)


def samplers(loader: "DataLoader[Any]") -> list[Any]:
    """Return what chooses items for `loader`, each once: its sampler, its batch sampler and what that draws from."""
    drawn_from = getattr(loader.batch_sampler, "sampler", None)
    return [loader.sampler, loader.batch_sampler, *([] if drawn_from is loader.sampler else [drawn_from])]


def distributed_sampler(loader: "DataLoader[Any]") -> "DistributedSampler[Any] | None":
    """Return what shares the data of `loader` among ranks already, also below a batch sampler; None where nothing does."""
    return next((sampler for sampler in samplers(loader) if isinstance(sampler, DistributedSampler)), None)


def common_seed(loader: "DataLoader[Any]", world_size: int) -> int:
    """Return the seed of rank 0's generator, 0 without one: ranks may seed theirs differently, and would draw items twice."""
    generator = loader.generator
    if generator is None and isinstance(loader.sampler, RandomSampler):  # one that was made by hand has its own
        generator = loader.sampler.generator
    if generator is None:
        return 0
    seeds: list[int] = [generator.initial_seed()]
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


def _is_plain(sampler: object, kind: type) -> bool:
    """Say whether `sampler` is one of torch's own, and no subclass that draws differently."""
    theirs = sys.modules.get("torchdata.stateful_dataloader.sampler")  # StatefulDataLoader makes classes of its own
    return type(sampler) in {kind, getattr(theirs, kind.__name__, kind)}
