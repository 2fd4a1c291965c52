"""A loader whose position is stored with the state, so that a restart in the middle of an epoch repeats and misses nothing.

Batches that are in workers or on the way to the GPU during a report are not used: a position counts the batches that were
yielded to the training's loop. The order of the samples is known, so a position is a number that all ranks share, and it loads
at any number of ranks. Data without a known order need an OwnPositionDataLoader.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .prepared_loader import PreparedDataLoader, tell_epoch
from .resumable_sampler import Position, ResumableSampler

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class ResumableDataLoader(PreparedDataLoader):
    """A prepared loader that yields every sample of an epoch exactly once, over all attempts and whatever ranks they have.

    Batches that the loop had before the state was taken count as used, the current one among them. A restored epoch has the
    remaining samples, shared among the present ranks; `len()` is still that of a whole epoch, as schedulers expect. In the last
    turn, ranks without a sample get one that another rank has, so that all have equally many batches of equal sizes; with
    `drop_last` those samples are left out instead, and none is used twice.

    - A state taken after the loop has ended is that of the start of the next epoch; after a `break`, that of the middle, unless
      no batch was left, or `set_epoch(epoch + 1)` was called since: that call is for loops that leave every epoch early.
    - An iteration that is left after its first batch is a look at a batch, as for its shape: the next one begins where it
      began. A state taken in between is behind that batch: a rank that looks alone does so after the report, or it would have
      one batch less than the others when resumed. A second look in a row is followed by the next epoch. A report of ranks whose
      loaders are in different epochs logs a warning.
    - A state taken at the last batch of an epoch, before the loop has ended, is in that epoch: the first loop of a training
      that is resumed from it has no batch. Of a `zip()` that a variable still holds after the loop, only the first loader knows
      that the epoch has ended: call `set_epoch(epoch + 1)` of the others before the report.
    - The position is the same on all ranks when they have used equally many batches. When they have not, each continues its
      own, and another number of ranks raises `RankLocalStateError`. Do not share it out with `rank_local`.
    - The seed is restored. A dataset of another length, or another order, in the middle of an epoch is a `StateMismatchError`.
    - Each epoch has the samples that the dataset has at its beginning, which must be equal on all ranks. Workers that persist
      have the dataset as it was.
    - Each iteration begins with the `set_epoch(epoch)` of the dataset, if it has one; with `persistent_workers` the dataset
      must pass the epoch on to them.
    - With `num_workers=0` a dataset draws from the generators of the process, which a state can hold as `RankLocal`: then a
      resumed epoch has the same items as an undisturbed one. Workers are seeded by the epoch, so they draw the same numbers
      after a resume between epochs; in the middle of one they draw others, as the generators of killed workers are lost, and so
      do `persistent_workers` after any resume. The generators of the process are exact in each of these cases.

    Args:
        loader: A loader with a ResumableSampler, and batches of its items in order.
        device: The device to move batches to; None to leave them where they are.

    """

    has_epoch_of_all_ranks = True  # at a report, which warns if it differs

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        super().__init__(loader, device)
        self._iteration = _Iteration(self._sampler(), 1)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Start the next epoch, or the rest of the restored one."""
        batches = self._begin()
        iteration = self._iteration = _Iteration(self._sampler(), self.batch_size or 1)
        if iteration.has_batch():
            return iteration.followed(batches)
        self._sampler().start = 0
        iteration.end()
        return iter(())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._iteration.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; not needed, as epochs are counted and restored.

        Raises:
            ValueError: If another epoch was restored, and not all of its samples are used yet.

        """
        is_begun_again = self._may_begin_again() and epoch == self._iteration.begun.epoch
        super().set_epoch(epoch)
        if is_begun_again:
            self._sampler().start = self._iteration.begun.used
        self._iteration = _Iteration(self._sampler(), 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position: a few numbers. Costs a shuffle of the indices if it was restored and not iterated yet."""
        return self._sampler().state_at(self._iteration.position)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next iteration start at the position of `state_dict`.

        Raises:
            StateMismatchError: If the dataset has another length or order, and the position is in the middle of an epoch.

        """
        tell_epoch(self.dataset, state_dict["epoch"])  # on which its length may depend
        self._sampler().restore(state_dict)
        self._begun_epoch, self._iteration, self._is_after_look = None, _Iteration(self._sampler(), 1), False

    def _may_look_ahead(self) -> bool:
        # Without workers the next batch is drawn in this process: a state must not hold its random numbers before it is used.
        return self.num_workers > 0

    def _beginning(self) -> tuple[int, ...]:
        # The rest of an epoch must not have the random numbers of its start again.
        return (*super()._beginning(), self._sampler().start)

    def _begin_epoch(self) -> None:
        if self._sampler().start:  # a restored epoch, also if an iteration over it took nothing
            self._begun_epoch = None
        super()._begin_epoch()
        tell_epoch(self.dataset, int(self._sampler().epoch))
        self._sampler().follow_length()

    def _is_look(self) -> bool:
        return self._iteration.is_look and self._sampler().epoch == self._iteration.begun.epoch

    def _begin_again(self) -> None:
        super()._begin_again()
        self._sampler().start = self._iteration.begun.used

    def _sampler(self) -> ResumableSampler:
        assert isinstance(self.sampler, ResumableSampler)
        return self.sampler


class _Iteration:
    """The position of one iteration, from which its loop would continue."""

    def __init__(self, sampler: ResumableSampler, batch_size: int) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._num_batches = 0
        self.begun = self.position = Position(int(sampler.epoch), sampler.start)

    @property
    def is_look(self) -> bool:
        """Whether one batch was taken, as for its shape, and the epoch has not ended."""
        return self._num_batches == 1 and self.position.epoch == self.begun.epoch

    def has_batch(self) -> bool:
        """Return whether a batch is left of this epoch."""
        return self._sampler.has_batch(self.position, self._batch_size)

    def followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, each of them used from the moment it is yielded."""
        try:
            for batch in batches:
                self._num_batches += 1
                if self._num_batches == 1:  # not later: another position may be restored meanwhile
                    self._sampler.start = 0
                self.position = self._sampler.after(self.begun, self._num_batches * self._batch_size)
                yield batch
        except GeneratorExit:  # zip() exhausts only its shortest argument
            if not self.has_batch():
                self.end()
            raise
        self.end()

    def end(self) -> None:
        """Set the position to the start of the next epoch."""
        self.position = Position(self.position.epoch + 1)
