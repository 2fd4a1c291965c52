"""What makes a data loader a distributed one: `loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))`.

Imports torch, never prefect: ranks use it.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from .device import get_device, get_place
from .prepared_loader import PreparedDataLoader
from .resumable_loader import OwnPositionDataLoader, ResumableDataLoader
from .resumable_sampler import ResumableSampler
from .sampling import common_seed, distributed_sampler, reason_not_shareable, reason_order_is_lost, shuffles, with_sampler


def prepare_data_loader(
    data_loader: "DataLoader[Any]",
    add_distributed_sampler: bool = True,
    move_to_device: bool = True,
    *,
    resumable: bool = False,
) -> PreparedDataLoader:
    """Return a loader that gives this rank its share of the data, in a new order each epoch, on this rank's device.

    What `data_loader` was made with stays as it is, but for the sampler; it is not to be iterated itself any more. Where
    ranks do not divide the data, some items come twice, so that all have equally many batches. A single rank keeps its
    sampler, unless the loader is resumable. The order depends on the epoch and the seed of the loader's `generator` (rank 0's;
    0 without one), so call this on every rank alike. A resumed training says `set_epoch(epoch)` once, before its first epoch;
    a resumable loader does that itself.

    With `resumable=True` the loader goes into the state: `report(..., state={"model": model, "loader": loader})` and
    `checkpoint.load_state(state)`. Then the next iteration yields the samples of the epoch that no batch handed out before the
    report had: each once and none missed, for any number of ranks and any batch size; see `ResumableDataLoader`.

    Args:
        data_loader: With a RandomSampler (`shuffle=True`), a SequentialSampler, or a DistributedSampler, which stays.
        add_distributed_sampler: Whether to share the data among ranks; False where the loader does so by itself. Then a
            sampler or a dataset with a `set_epoch` of its own is told what the prepared loader's `set_epoch` is told.
        move_to_device: Whether to move tensors in batches, nested in lists, tuples and dicts too, to `get_device()`. With a
            GPU each batch is copied while the one before is computed on, in the background if the loader has `pin_memory=True`.
        resumable: Whether the loader has a `state_dict`. One that has its own position, as torchdata's StatefulDataLoader for
            an IterableDataset, is asked for that, which each rank stores for itself; it loads at the same number of ranks.

    Raises:
        ValueError: If the data cannot be shared without changing which they are: an IterableDataset, a batch sampler, a
            sampler of another kind. If a resumable loader has no position: none of these can be shared, and it has no
            `state_dict` itself, or its sampler draws anew after a restart, or it hands batches out as they come
            (`in_order=False`).
        TypeError: If it is no DataLoader.

    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"a {type(data_loader).__name__} cannot be prepared: give a torch.utils.data.DataLoader")
    if isinstance(data_loader, PreparedDataLoader):
        return _checked_again(data_loader, resumable=resumable)
    device = get_device() if move_to_device else None
    if resumable:
        return _resumable(data_loader, device, add_distributed_sampler=add_distributed_sampler)
    rank, world_size = get_place()
    if add_distributed_sampler and world_size > 1 and distributed_sampler(data_loader) is None:
        _check_shareable(data_loader)
        shuffle, seed = shuffles(data_loader), common_seed(data_loader, world_size)
        sampler: DistributedSampler[Any] = DistributedSampler(data_loader.dataset, world_size, rank, shuffle=shuffle, seed=seed)
        data_loader = with_sampler(data_loader, sampler)
    return PreparedDataLoader(data_loader, device)


def _resumable(loader: "DataLoader[Any]", device: torch.device | None, *, add_distributed_sampler: bool) -> PreparedDataLoader:
    rank, world_size = get_place()
    keeps_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if keeps_position and not (add_distributed_sampler and (world_size > 1 or reason_not_shareable(loader) is None)):
        if reason := reason_order_is_lost(loader):
            raise ValueError(f"resumable=True, but {reason}; give shuffle=True, or a sampler with a state_dict")
        return OwnPositionDataLoader(loader, device)
    _check_resumable(loader, add_distributed_sampler=add_distributed_sampler)
    shuffle, seed = shuffles(loader), common_seed(loader, world_size)
    sampler = ResumableSampler(loader.dataset, rank, world_size, shuffle=shuffle, seed=seed, drop_last=loader.drop_last)
    return ResumableDataLoader(with_sampler(loader, sampler), device)


def _checked_again(loader: PreparedDataLoader, *, resumable: bool) -> PreparedDataLoader:
    if resumable and not isinstance(loader, (ResumableDataLoader, OwnPositionDataLoader)):
        raise ValueError("the loader was prepared without resumable=True: prepare it once, with it")
    return loader


def _check_shareable(loader: "DataLoader[Any]") -> None:
    if reason := reason_not_shareable(loader):
        raise ValueError(f"{reason}; share the data by rank yourself and say add_distributed_sampler=False")


def _check_resumable(loader: "DataLoader[Any]", *, add_distributed_sampler: bool) -> None:
    reason = reason_not_shareable(loader)
    if not add_distributed_sampler:
        reason = "the order of a loader that shares its data by itself (add_distributed_sampler=False) is unknown"
    elif reason is None and not getattr(loader, "in_order", True):
        reason = "in_order=False hands out batches as they come"
    if reason is not None:
        raise ValueError(
            f"resumable=True, but {reason}; give a DataLoader without a sampler, with shuffle=True or False, or one that keeps "
            "its own position, as torchdata's StatefulDataLoader, with add_distributed_sampler=False"
        )
