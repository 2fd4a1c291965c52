"""What makes a plain training loop a distributed one: the model, the data and the device of this rank.

    model = prepare_model(Net())
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))

Imports torch, never prefect: ranks use it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

ParallelStrategy: TypeAlias = Literal["ddp", "fsdp"]


def get_device() -> torch.device:
    """Return the device that this rank computes on: the one its process group is bound to, else the CPU.

    Without a process group, in a script on its own, it is the current GPU where there is one.
    """
    if dist.is_initialized():
        # Not torch.cuda.is_available(): a training with use_gpu=False may run on a machine that has GPUs.
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        return torch.device("cpu") if bound is None else torch.device(bound)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: ParallelStrategy | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return `model` on this rank's device, its gradients averaged over all ranks; call it on every rank.

    A single rank gets the bare model: nothing to average. A model that is parallel already is only moved.

    Args:
        model: The module; it is moved in place, and sharded in place by "fsdp".
        move_to_device: Whether to move it to `get_device()`, or the device to move it to.
        parallel_strategy: "ddp" gives every rank the whole model (`DistributedDataParallel`), "fsdp" a part of it (FSDP2,
            `fully_shard` on the whole module; shard its blocks before for less memory), None neither.
        parallel_strategy_kwargs: More arguments of `DistributedDataParallel` or `fully_shard`.

    Raises:
        ValueError: If the strategy is none of these.

    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f"parallel_strategy={parallel_strategy!r}: give 'ddp', 'fsdp' or None")
    device = get_device() if move_to_device is True else move_to_device
    if isinstance(device, torch.device):
        model = model.to(device)
    is_parallel = isinstance(model, (DistributedDataParallel, FSDPModule))
    if parallel_strategy is None or is_parallel or _place()[1] == 1:
        return model
    arguments = dict(parallel_strategy_kwargs or {})
    return _replicated(model, arguments) if parallel_strategy == "ddp" else _sharded(model, arguments)


def prepare_data_loader(
    data_loader: "DataLoader[Any]", add_distributed_sampler: bool = True, move_to_device: bool = True
) -> "PreparedDataLoader":
    """Return a loader that gives this rank its share of the data, in a new order each epoch, on this rank's device.

    What `data_loader` was made with stays as it is, but for the sampler; it is not to be iterated itself any more. Where
    ranks do not divide the data, some items come twice, so that all have equally many batches. A single rank keeps its
    sampler. The order depends on the epoch and the seed of the loader's `generator` (rank 0's; 0 without one), so call this
    on every rank alike. A resumed training says `set_epoch(epoch)` once, before its first epoch.

    Args:
        data_loader: With a RandomSampler (`shuffle=True`), a SequentialSampler, or a DistributedSampler, which stays.
        add_distributed_sampler: Whether to share the data among ranks; False where the loader does so by itself.
        move_to_device: Whether to move tensors in batches, nested in lists, tuples and dicts too, to `get_device()`.

    Raises:
        ValueError: If the data cannot be shared without changing which they are: an IterableDataset, a batch sampler, a
            sampler of another kind.

    """
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    rank, world_size = _place()
    if add_distributed_sampler and world_size > 1 and not isinstance(data_loader.sampler, DistributedSampler):
        data_loader = _with_sampler(data_loader, _distributed_sampler(data_loader, rank, world_size))
    return PreparedDataLoader(data_loader, get_device() if move_to_device else None)


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that counts epochs for its DistributedSampler and moves its batches; see `prepare_data_loader`.

    Args:
        loader: What loads.
        device: Where batches go; None leaves them where they are.

    """

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        # Not super().__init__: it would make other samplers. Attributes are the loader's, for whoever asks.
        vars(self).update(vars(loader))
        vars(self).update(_loader=loader, _device=device, _used_epoch=None)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Begin the next epoch."""
        self._begin_epoch()
        device: torch.device | None = vars(self)["_device"]
        batches: Iterator[Any] = iter(self._wrapped())  # now: workers begin to load
        return batches if device is None or device.type == "cpu" else (_moved(batch, device) for batch in batches)

    def __len__(self) -> int:
        return len(self._wrapped())

    def __getattr__(self, name: str) -> Any:
        # What a subclass of DataLoader has besides, such as StatefulDataLoader.state_dict.
        if "_loader" not in vars(self):  # while copied or unpickled
            raise AttributeError(name)
        return getattr(self._wrapped(), name)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; those after it count on. Without a DistributedSampler nothing changes."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
            vars(self)["_used_epoch"] = None

    def _wrapped(self) -> "DataLoader[Any]":
        loader: DataLoader[Any] = vars(self)["_loader"]
        return loader

    def _begin_epoch(self) -> None:
        sampler = self.sampler
        if not isinstance(sampler, DistributedSampler):
            return
        if sampler.epoch == vars(self)["_used_epoch"]:  # else somebody has said which epoch it is
            sampler.set_epoch(sampler.epoch + 1)
        vars(self)["_used_epoch"] = sampler.epoch


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _replicated(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type != "cpu":  # one spread over devices must not name any
        arguments.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **arguments)


def _sharded(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    if "mesh" not in arguments:  # fully_shard's own takes a GPU wherever there is one
        arguments["mesh"] = init_device_mesh(get_device().type, (dist.get_world_size(),))
    fully_shard(model, **arguments)
    return model


def _distributed_sampler(loader: "DataLoader[Any]", rank: int, world_size: int) -> "DistributedSampler[Any]":
    _check_shareable(loader)
    return DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=_common_seed(loader),
    )


def _check_shareable(loader: "DataLoader[Any]") -> None:
    otherwise = "share the data by rank yourself and say add_distributed_sampler=False"
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__name__
        raise ValueError(f"an IterableDataset ({name}) has no items to share among ranks; {otherwise}")  # noqa: TRY004 - as below
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise ValueError(f"a batch sampler ({type(loader.batch_sampler).__name__}) cannot be shared among ranks; {otherwise}")
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(f"a {type(sampler).__name__} would be lost to a DistributedSampler; {otherwise}")
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise ValueError(f"a RandomSampler with replacement or num_samples draws what no DistributedSampler does; {otherwise}")


def _common_seed(loader: "DataLoader[Any]") -> int:
    if loader.generator is None:
        return 0
    seeds: list[int] = [loader.generator.initial_seed()]  # ranks may seed theirs differently, and would then draw items twice
    dist.broadcast_object_list(seeds, src=0)
    return seeds[0] % 2**32  # the sampler adds the epoch, and torch seeds with 64 bits


def _with_sampler(loader: "DataLoader[Any]", sampler: "Sampler[Any]") -> "DataLoader[Any]":
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


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)  # in the background where the loader pins memory
    to: Callable[..., Any] | None = getattr(batch, "to", None)  # a packed sequence, a tokenizer's batch
    if callable(to):
        return to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update({key: _moved(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
