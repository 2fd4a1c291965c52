"""Loaders whose position is stored with the state, so that a restart in the middle of an epoch repeats and misses nothing.

What is in flight when a report comes, in workers and on the way to the GPU, was not used: a position counts the batches that
were handed to the training's loop. Two kinds, because only data with a known order can be shared out anew:

- ResumableDataLoader: the order is ours, a position is a number that all ranks share, and it loads at any number of ranks.
- StatefulDataLoader of torchdata, or whatever loader has a state_dict of its own: data without an order (an IterableDataset),
  a position for each rank, which loads at the same number of ranks. It is taken as it comes, so torchdata is no dependency.

Imports torch, never prefect: ranks use it.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from prefect_torch.ckpt import RankLocal

from .loader_generators import generators_kept
from .prepared_loader import PreparedDataLoader
from .resumable_sampler import Position, ResumableSampler
from .sampling import distributed_sampler

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class ResumableDataLoader(PreparedDataLoader):
    """A prepared loader that yields every sample of an epoch exactly once, over all attempts and whatever ranks they have.

    What counts as used are the batches handed to the loop before the state was taken, the one at hand among them. A restored
    epoch has what is left of it, shared among the ranks there are now; `len()` is that of a whole epoch all the same, as
    schedulers count. In the last turn, ranks without a sample get one that another rank has, so that all have equally many
    batches of equal sizes; with `drop_last` those samples are left out instead, and none comes twice.

    - A state taken after the loop has ended is from the beginning of the next epoch; after a `break`, from the middle, unless
      no batch was left, or `set_epoch(epoch + 1)` was said since: that is for loops which leave every epoch early.
    - The position is the same on all ranks when they have used equally many batches. When they have not, each continues its
      own, and another number of ranks raises `RankLocalStateError`. Do not share it out with `rank_local`.
    - The seed is restored. A dataset of another length, or another order, in the middle of an epoch is a `StateMismatchError`.
    - With `num_workers=0` a dataset draws from the process's generators, which a state can hold as `RankLocal`: then a resumed
      epoch has the very items of an undisturbed one. Workers are seeded by the epoch, so they draw the same after a resume
      between epochs; in the middle of one they draw other numbers, as the generators of killed workers are lost, and so do
      `persistent_workers` after any resume. The process's own generators are exact in each of these cases.

    Args:
        loader: With a ResumableSampler, and batches of its items in order.
        device: Where batches go; None leaves them where they are.

    """

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        super().__init__(loader, device)
        vars(self)["_iteration"] = _Iteration(self._sampler(), 1)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Begin the next epoch, or what is left of the restored one."""
        batches = super().__iter__()
        iteration = vars(self)["_iteration"] = _Iteration(self._sampler(), self.batch_size or 1)
        if iteration.has_batch():
            return iteration.followed(batches)
        self._sampler().start = 0
        iteration.end()
        return iter(())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._position().epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; nothing needs it, as epochs are counted and restored.

        Raises:
            ValueError: If another one was restored, and some of its samples are still to be used.

        """
        super().set_epoch(epoch)
        vars(self)["_iteration"] = _Iteration(self._sampler(), 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position: a few numbers. Costs a shuffle of the data's numbers if it is restored and not yet iterated."""
        return self._sampler().tell(self._position())

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next iteration begin where `state_dict` was told.

        Raises:
            StateMismatchError: If the dataset has another length or order, and it was in the middle of an epoch.

        """
        self._sampler().restore(state_dict)
        vars(self)["_begun_epoch"] = None
        vars(self)["_iteration"] = _Iteration(self._sampler(), 1)

    def _may_look_ahead(self) -> bool:
        # Without workers the next batch is drawn in this process: its random numbers must not be in a state before it is.
        return super()._may_look_ahead() and self.num_workers > 0

    def _beginning(self) -> tuple[int, ...]:
        # The rest of an epoch must not have the random numbers of its beginning once more.
        return (*super()._beginning(), self._sampler().start)

    def _begin_epoch(self) -> None:
        if self._sampler().start:  # a restored epoch, also if an iteration over it was begun and took nothing
            vars(self)["_begun_epoch"] = None
        super()._begin_epoch()

    def _position(self) -> Position:
        iteration: _Iteration = vars(self)["_iteration"]
        return iteration.position

    def _sampler(self) -> ResumableSampler:
        assert isinstance(self.sampler, ResumableSampler)
        return self.sampler


class OwnPositionDataLoader(PreparedDataLoader):
    """A prepared loader whose state is the position that its loader keeps by itself, for each rank its own.

    It loads at the same number of ranks, which read the same parts then; at another, `RankLocalStateError`.

    Args:
        loader: With `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has them.
        device: Where batches go; None leaves them where they are.

    """

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        super().__init__(loader, device)
        vars(self).update(_epoch=0, _is_restored=False)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Begin the next epoch, or what is left of the restored one."""
        if vars(self)["_is_restored"]:
            vars(self)["_is_restored"] = False
            with generators_kept():  # what cannot go to its position reads up to it again, and draws again
                self._own_state()
        return self._followed(super().__iter__())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        epoch: int = vars(self)["_epoch"]
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state, marked as this rank's."""
        return {"epoch": self.epoch, "loader": RankLocal(self._own_state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the loader's own state was taken."""
        loader: Any = self._wrapped()
        own = state_dict["loader"]
        loader.load_state_dict(own.value if isinstance(own, RankLocal) else own)
        vars(self).update(_epoch=state_dict["epoch"], _is_restored=True)
        self.set_epoch(state_dict["epoch"])

    def _own_state(self) -> Any:
        loader: Any = self._wrapped()
        with self._own_generator():  # torchdata's begins an iteration for it
            return loader.state_dict()

    def _followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        sampler = distributed_sampler(self)
        epoch = vars(self)["_epoch"] = self.epoch if sampler is None else sampler.epoch
        yield from batches
        vars(self)["_epoch"] = epoch + 1


class _Iteration:
    """How far one iteration has come: the position from which its loop would continue."""

    def __init__(self, sampler: ResumableSampler, batch_size: int) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self.position = Position(sampler.epoch, sampler.start)

    def has_batch(self) -> bool:
        """Say whether any is left of this epoch."""
        return self._sampler.has_batch(self.position, self._batch_size)

    def followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, each of them used from the moment it is yielded."""
        begun = self.position
        try:
            for number, batch in enumerate(batches, 1):
                if number == 1:  # not later: another position may be restored meanwhile
                    self._sampler.start = 0
                self.position = self._sampler.after(begun, number * self._batch_size)
                yield batch
        except GeneratorExit:  # zip() tells only its shortest that it has ended
            if not self.has_batch():
                self.end()
            raise
        self.end()

    def end(self) -> None:
        """Let the position be the beginning of the next epoch."""
        self.position = Position(self.position.epoch + 1)
