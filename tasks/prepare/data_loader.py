"""Making a data loader a distributed one: `loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))`."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from .device import get_device, get_rank_and_size
from .own_position_loader import OwnPositionDataLoader
from .prepared_loader import PreparedDataLoader
from .resumable_loader import ResumableDataLoader
from .resumable_sampler import ResumableSampler
from .sampling import (
    EpochSampler,
    common_seed,
    distributed_sampler,
    reason_not_shareable,
    reason_order_is_lost,
    shuffles,
    with_sampler,
)


def prepare_data_loader(
    data_loader: "DataLoader[Any]",
    add_distributed_sampler: bool = True,
    move_to_device: bool = True,
    *,
    resumable: bool = False,
) -> PreparedDataLoader:
    """Return a loader that gives this rank its share of the data, in a new order each epoch, on this rank's device.

    All arguments of `data_loader` are kept, but for the sampler; do not iterate `data_loader` itself any more. If the number of
    ranks does not divide the data, some items are used twice, so that all ranks have equally many batches. A single rank keeps
    its sampler, unless the loader is resumable. The order depends on the epoch and the seed of the loader's `generator` (that
    of rank 0; 0 without one), so call this on every rank. A resumed training calls `set_epoch(epoch)` once, before its first
    epoch; where the dataset, or a sampler other than DistributedSampler, has a `set_epoch`, every training calls it before each
    epoch. A resumable loader does so itself.

    With `resumable=True` the loader goes into the state: `report(..., state={"model": model, "loader": loader})` and
    `checkpoint.load_state(state)`. Then the next iteration yields the samples of the epoch that no batch had before the report:
    each once and none missed, for any number of ranks and any batch size; see `ResumableDataLoader`.

    Args:
        data_loader: With a RandomSampler (`shuffle=True`), a SequentialSampler, or a DistributedSampler, which is kept.
        add_distributed_sampler: Whether to share the data among ranks; False if the loader does so by itself. Then its
            `set_epoch` also calls the `set_epoch` of its sampler and its dataset, if they have one.
        move_to_device: Whether to move tensors in batches, nested in lists, tuples and dicts too, to `get_device()`. With a
            GPU each batch is copied during the computation on the one before it, in the background with `pin_memory=True`;
            a resumable loader without workers, or one that keeps its own position, copies it when the loop asks for it.
        resumable: Whether the loader has a `state_dict`. The state of one that keeps its own position, as torchdata's
            StatefulDataLoader does for an IterableDataset, is that of each rank; it loads at the same number of ranks.

    Raises:
        ValueError: If the data cannot be shared without being changed: an IterableDataset, a batch sampler, a
            sampler of another kind. If a resumable loader has no position: none of these can be shared, and it has no
            `state_dict` itself, or its sampler draws again after a restart, or it yields batches in any order
            (`in_order=False` with workers).
        TypeError: If `data_loader` is not a DataLoader.

    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"a {type(data_loader).__name__} cannot be prepared: give a torch.utils.data.DataLoader")
    if isinstance(data_loader, PreparedDataLoader):
        return _checked_again(data_loader, resumable=resumable)
    device = get_device() if move_to_device else None
    if resumable:
        return _resumable(data_loader, device, add_distributed_sampler=add_distributed_sampler)
    rank, world_size = get_rank_and_size()
    if add_distributed_sampler and world_size > 1 and distributed_sampler(data_loader) is None:
        _check_shareable(data_loader)
        shuffle, seed = shuffles(data_loader), common_seed(data_loader, world_size)
        sampler = EpochSampler(data_loader.dataset, world_size, rank, shuffle=shuffle, seed=seed)
        data_loader = with_sampler(data_loader, sampler)
    return PreparedDataLoader(data_loader, device)


def _resumable(loader: "DataLoader[Any]", device: torch.device | None, *, add_distributed_sampler: bool) -> PreparedDataLoader:
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ValueError("resumable=True, but in_order=False yields batches in any order: leave it out")
    rank, world_size = get_rank_and_size()
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
        raise ValueError(f"{reason}; share the data by rank yourself and give add_distributed_sampler=False")


def _check_resumable(loader: "DataLoader[Any]", *, add_distributed_sampler: bool) -> None:
    reason = reason_not_shareable(loader)
    if not add_distributed_sampler:
        reason = "the order of a loader that shares its data by itself (add_distributed_sampler=False) is unknown"
    if reason is not None:
        raise ValueError(
            f"resumable=True, but {reason}; give a DataLoader without a sampler, with shuffle=True or False, or one that keeps "
            "its own position, as torchdata's StatefulDataLoader, with add_distributed_sampler=False"
        )
