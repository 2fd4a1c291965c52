"""The loader that `prepare_data_loader` returns. Imports torch, never prefect: ranks use it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader

from .batch_transfer import on_device
from .device import get_place
from .loader_generators import own_generator
from .sampling import distributed_sampler, samplers

_numbers = count()


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that counts epochs for its DistributedSampler and moves its batches; see `prepare_data_loader`.

    To begin an iteration draws nothing from the process's random generators, nor from the loader's own. What seeds its workers
    follows from the seed of that generator (`torch.initial_seed()` without one), the epoch, the rank, and how many loaders were
    prepared before in this process. A RandomSampler that a single rank keeps draws as ever.

    Args:
        loader: What loads.
        device: Where batches go; None leaves them where they are.

    """

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        # Not super().__init__: it would make other samplers. Attributes are the loader's, for whoever asks.
        vars(self).update(vars(loader))
        vars(self).update(_loader=loader, _device=device, _begun_epoch=None, _iterations=0, _number=next(_numbers))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Begin the next epoch."""
        self._begin_epoch()
        with self._own_generator():
            batches: Iterator[Any] = iter(self._wrapped())  # now: workers begin to load
        vars(self)["_iterations"] += 1
        return on_device(batches, vars(self)["_device"], may_look_ahead=self._may_look_ahead())

    def __len__(self) -> int:
        return len(self._wrapped())

    def __getattr__(self, name: str) -> Any:
        # What a subclass of DataLoader has besides, such as StatefulDataLoader.state_dict.
        if "_loader" not in vars(self):  # while copied or unpickled
            raise AttributeError(name)
        return getattr(self._wrapped(), name)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, to the samplers and the dataset; those with no `set_epoch` need not know.

        A DistributedSampler counts on from there. Others keep that epoch until they are told another one.
        """
        for part in (*samplers(self), self.dataset):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        vars(self).update(_begun_epoch=None, _iterations=epoch)

    def _wrapped(self) -> "DataLoader[Any]":
        loader: DataLoader[Any] = vars(self)["_loader"]
        return loader

    def _may_look_ahead(self) -> bool:
        # A loader that is asked for its own position must not be ahead of the training.
        return not hasattr(self._wrapped(), "state_dict")

    def _own_generator(self) -> AbstractContextManager[None]:
        return own_generator(self._wrapped(), *self._beginning(), get_place()[0], vars(self)["_number"])

    def _beginning(self) -> tuple[int, ...]:
        """Return where the iteration at hand begins."""
        sampler = distributed_sampler(self)
        return (vars(self)["_iterations"] if sampler is None else sampler.epoch,)

    def _begin_epoch(self) -> None:
        sampler = distributed_sampler(self)
        if sampler is None:
            return
        if sampler.epoch == vars(self)["_begun_epoch"]:  # else somebody has said which epoch it is
            sampler.set_epoch(sampler.epoch + 1)
        vars(self)["_begun_epoch"] = sampler.epoch
