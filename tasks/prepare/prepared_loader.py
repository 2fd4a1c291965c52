"""The loader that `prepare_data_loader` returns, and random generators separate from those of the process."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from .batch_transfer import on_device
from .device import get_rank_and_size
from .sampling import distributed_sampler, samplers

_numbers = count()


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that counts epochs for its DistributedSampler and moves its batches; see `prepare_data_loader`.

    The start of an iteration draws nothing from the random generators of the process or the loader. The seed of its workers
    follows from the seed of that generator (`torch.initial_seed()` without one), the epoch, the rank, and the number of loaders
    that were prepared before in this process. A RandomSampler that a single rank keeps draws as usual.

    An iteration that is left after its first batch, as by `next(iter(loader))`, is a look at a batch: the next one begins where
    it began, so that a rank that looks stays in one epoch with the others. Only a second look in a row is followed by the next
    epoch, for a program that takes each batch in this way.

    Args:
        loader: The loader to wrap.
        device: The device to move batches to; None to leave them where they are.

    """

    _is_accelerate_prepared = True  # so that Accelerator.prepare does not share the data once more

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        # Not super().__init__, which makes other samplers. The attributes are those of the loader.
        vars(self).update(vars(loader))
        self._loader = loader
        self._device = device
        self._begun_epoch: int | None = None
        self._iterations = 0
        self._number = next(_numbers)
        self._newest = _Taken()
        self._is_after_look = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Start the next epoch, or once more that of which the newest iteration was a look."""
        batches, self._newest = self._begin(), _Taken()
        return _Counted(batches, self._newest)

    def _begin(self) -> Iterator[Any]:
        may_begin_again, self._is_after_look = self._may_begin_again(), self._is_look()
        if may_begin_again:
            self._begin_again()
        self._begin_epoch()
        with self._own_generator():
            batches: Iterator[Any] = iter(self._loader)  # now, so that workers start to load
        self._iterations += 1
        return on_device(batches, self._device, may_look_ahead=self._may_look_ahead())

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Further attributes of a subclass of DataLoader, such as StatefulDataLoader.state_dict.
        if "_loader" not in vars(self):  # while copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in samplers and the dataset where they have a `set_epoch`.

        A DistributedSampler counts on from there. Others keep that epoch until another one is set.
        """
        self._set_epoch_of_parts(epoch)
        self._begun_epoch, self._iterations, self._newest = None, epoch, _Taken()

    def _set_epoch_of_parts(self, epoch: int) -> None:
        for part in (*samplers(self), self.dataset):
            tell_epoch(part, epoch)

    def _may_look_ahead(self) -> bool:
        # A loader whose own position is stored must not be ahead of the training.
        return not hasattr(self._loader, "state_dict")

    def _own_generator(self) -> AbstractContextManager[None]:
        return own_generator(self._loader, *self._beginning(), get_rank_and_size()[0], self._number)

    def _beginning(self) -> tuple[int, ...]:
        """Return the numbers that identify the current iteration."""
        sampler = distributed_sampler(self)
        return (self._iterations if sampler is None else sampler.epoch,)

    def _may_begin_again(self) -> bool:
        return not self._is_after_look and self._is_look()

    def _is_look(self) -> bool:
        """Return whether only the first batch of the newest iteration was taken, and its epoch has not ended."""
        return self._newest.num_asked == 1 and not self._has_used_all(1)

    def _has_used_all(self, num_batches: int) -> bool:
        with suppress(Exception):  # without a length, for which datasets and samplers raise errors of many kinds
            return num_batches == len(self)
        return False

    def _begin_again(self) -> None:
        """Let the next iteration start where the newest one did."""
        self._begun_epoch = None
        self._iterations -= 1

    def _begin_epoch(self) -> None:
        sampler = distributed_sampler(self)
        if sampler is None:
            return
        if isinstance(sampler.epoch, _BegunEpoch) and sampler.epoch == self._begun_epoch:
            sampler.set_epoch(sampler.epoch + 1)
        self._begun_epoch = sampler.epoch = _BegunEpoch(sampler.epoch)


def tell_epoch(part: Any, epoch: int) -> None:
    """Call the `set_epoch` of a sampler or a dataset, if it has one."""
    if callable(set_epoch := getattr(part, "set_epoch", None)):
        set_epoch(epoch)


class _Taken:
    """What was taken of an iteration.

    Attributes:
        num_asked: How often a batch was asked for: after the last one, once more.

    """

    def __init__(self) -> None:
        self.num_asked = 0


class _Counted(Iterator[Any]):
    """Batches that are counted as they are asked for. No generator, which would end with the first item that cannot be read."""

    def __init__(self, batches: Iterator[Any], taken: _Taken) -> None:
        self._batches = batches
        self._taken = taken  # without the batches: their workers end with the loop

    def __next__(self) -> Any:
        self._taken.num_asked += 1
        return next(self._batches)


class _BegunEpoch(int):
    """The epoch of a sampler since an iteration began; `set_epoch`, also the sampler's own, replaces it by a plain number."""


@contextmanager
def own_generator(loader: "DataLoader[Any]", *identity: int) -> Iterator[None]:
    """Let an iterator that `loader` starts within the block draw the seed of its workers from a separate generator.

    torch draws that seed from the generator of the loader, or of the process: once in an undisturbed epoch, and once more if
    the epoch is resumed, which changes every number that the process draws afterwards. Here nothing is drawn from either. The
    seed follows from that of the generator and from `identity`, so it is the same in a resumed training, which restores both.

    Args:
        loader: The loader, which has its own generator again after the block.
        identity: The numbers that identify this iteration: its epoch, the rank, and so on.

    """
    given = loader.generator
    seed = torch.initial_seed() if given is None else given.initial_seed()
    own = torch.Generator(device=torch.get_default_device())  # where torch draws
    loader.generator = own.manual_seed(xxhash.xxh3_64_intdigest(repr((seed, *identity)).encode()))
    try:
        yield
    finally:
        loader.generator = given


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of the process (torch on the CPU, Python, and NumPy if it is loaded) after the block."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    of_python = random.getstate()
    of_numpy = None if numpy_random is None else numpy_random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        if numpy_random is not None:
            numpy_random.set_state(of_numpy)
