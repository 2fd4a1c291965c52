"""A loader whose position is kept by itself and stored with the state, so that a restart in an epoch misses nothing.

It wraps torchdata's StatefulDataLoader, or any loader with a state_dict: data without an order (an IterableDataset), and a
position for each rank, which loads at the same number of ranks. torchdata is not a dependency.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from prefect_torch.ckpt import RankLocal, RankLocalStateError, StateMismatchError

from .device import get_rank_and_size
from .prepared_loader import PreparedDataLoader, generators_kept
from .resumable_sampler import restored_within
from .sampling import distributed_sampler, samplers

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class OwnPositionDataLoader(PreparedDataLoader):
    """A prepared loader whose state is the position that its loader keeps by itself, one for each rank.

    It loads at the same number of ranks, which then read the same parts; at another it raises `RankLocalStateError`. With a
    `rank_local`, whatever that does, another number of ranks begins an epoch between two of them, but goes on in none, and not
    with a dataset or a sampler that has a `state_dict`. The same holds for another `num_workers` of torchdata's loader, among
    which a stream is divided: it is a `StateMismatchError`.

    Each iteration begins with the `set_epoch(epoch)` of the samplers and the dataset, where they have one. A stream whose order
    depends on it then has the same orders in a resumed training; with `persistent_workers` it must pass the epoch on to them.

    A loop that leaves every epoch early calls `set_epoch(epoch + 1)` before its report. So does a loop over `zip()`, for those
    behind the first loader whose dataset has no length, as zip() does not tell them that an epoch has ended; of a zip that a
    variable still holds at the report, for all behind the first, as it tells them only when it is destroyed.

    Args:
        loader: A loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader.
        device: The device to move batches to; None to leave them where they are.

    """

    def __init__(self, loader: "DataLoader[Any]", device: torch.device | None) -> None:
        super().__init__(loader, device)
        self._at = _Place()
        self._restored: Any = None
        self._begun: tuple[_Place, Any] = (_Place(), None)  # where the newest iteration began, and what was restored for it

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        """Start the next epoch, or the rest of the restored one."""
        batches, place = self._begin(), self._at
        followed = self._followed(batches, place)
        # zip() asks none of the loaders behind the first that has no batch left.
        return chain(list(islice(followed, 1)), followed) if self._is_at_end(place) else followed

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; not needed, as epochs are counted and restored.

        Raises:
            ValueError: If another epoch was restored, and some of its batches are used.

        """
        if self._may_begin_again() and self._begun[1] is not None and epoch == self._at.epoch:
            self._begin_again()
        place, is_restored = self._at, self._restored is not None
        if is_restored and place.used and epoch != place.epoch:
            raise ValueError(restored_within(place.epoch, epoch))
        super().set_epoch(epoch)
        if not is_restored or epoch != place.epoch:
            self._at = _Place(epoch, is_left=place.is_left or place.is_begun)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, marked as that of this rank; the restored one until the next iteration starts."""
        # torchdata would read up to the restored position for its state, and count twice.
        own = RankLocal(self._own_state() if self._restored is None else self._restored)
        return {**self._at.state_dict(), "num_ranks": get_rank_and_size()[1], "num_workers": self.num_workers, "loader": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration start where the state of the loader was taken.

        Raises:
            RankLocalStateError: If another number of ranks stored the state, and its position is needed; nothing is changed.
            StateMismatchError: If a loader with another number of workers did, likewise.

        """
        own = self._position_in(state_dict)
        if own is not None:
            loader: Any = self._loader
            loader.load_state_dict(own)
        super().set_epoch(state_dict["epoch"])
        self._at, self._restored, self._is_after_look = _Place.of(state_dict), own, False

    def _position_in(self, state_dict: Mapping[str, Any]) -> Any:
        """Return the loader's own state in `state_dict`; None if it cannot go on, and need not, as a whole epoch is next."""
        own = state_dict["loader"]
        own = own.value if isinstance(own, RankLocal) else own
        if (mismatch := _mismatch(state_dict, own, self.num_workers)) is None:
            return own
        if _Place.of(state_dict).used or any(hasattr(part, "state_dict") for part in (self.dataset, *samplers(self))):
            raise mismatch
        return None

    def _begin_epoch(self) -> None:
        sampler = distributed_sampler(self)
        super()._begin_epoch()
        place, restored = self._at, self._restored
        epoch = place.epoch + place.is_begun if sampler is None else int(sampler.epoch)
        self._set_epoch_of_parts(epoch)  # in each epoch: a resumed training sets it, too
        if sampler is not None:
            assert self._begun_epoch is not None
            sampler.epoch = self._begun_epoch  # so that it counts on
        if restored is not None:
            with generators_kept():  # data without random access are read up to the position again, with draws
                self._restart(restored, place)
        begun = _Place(epoch, 0 if place.is_begun else place.used, is_left=place.is_left)
        self._at, self._restored, self._begun = replace(begun, is_left=False, is_begun=True), None, (begun, restored)

    def _is_look(self) -> bool:
        """Return whether at most one batch was taken of the newest iteration, and its epoch has not ended."""
        place, sampler = self._at, distributed_sampler(self)
        is_newest = place.is_begun and (sampler is None or sampler.epoch == place.epoch)
        return is_newest and place.used - self._begun[0].used <= 1

    def _begin_again(self) -> None:
        super()._begin_again()
        place, restored = self._begun
        if restored is not None:
            loader: Any = self._loader
            loader.load_state_dict(restored)
        self._at, self._restored = place, restored

    def _restart(self, restored: Any, place: "_Place") -> None:
        if place.is_left:  # as in the training before: this iteration was begun, and another one comes next
            with self._own_generator():
                iter(self._loader)
        else:
            self._own_state()
            _count_once(self._loader, restored)

    def _own_state(self) -> Any:
        loader: Any = self._loader
        with self._own_generator():  # torchdata starts an iteration for its state
            return loader.state_dict()

    def _followed(self, batches: Iterator[Any], place: "_Place") -> Iterator[Any]:
        try:
            for batch in batches:
                place.used += 1
                yield batch
        except GeneratorExit:  # zip() exhausts only its shortest argument
            if self._is_at_end(place):
                place.end(is_left=True)
            raise
        place.end()

    def _is_at_end(self, place: "_Place") -> bool:
        return place.used > 0 and self._has_used_all(place.used)


@dataclass(slots=True)
class _Place:
    """The progress of one iteration over a loader that keeps its own position.

    Attributes:
        epoch: Counted from 0.
        used: The number of used batches of the epoch.
        is_left: Whether the epoch is still to begin, and the loader's own position is in an iteration that was left.
        is_begun: Whether this process has begun the epoch.

    """

    epoch: int = 0
    used: int = 0
    is_left: bool = False
    is_begun: bool = False

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Place":
        """Return the place of a state of `state_dict`; that of a former version has only the epoch."""
        return cls(state["epoch"], state.get("used", 0), state.get("is_left", False))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, which may differ between ranks."""
        return {"epoch": self.epoch, "used": self.used, "is_left": self.is_left}

    def end(self, *, is_left: bool = False) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.used, self.is_left, self.is_begun = self.epoch + 1, 0, is_left, False


def _mismatch(stored: Mapping[str, Any], own: Any, num_workers: int) -> StateMismatchError | None:
    """Return why a loader does not go on at the position that is `stored`; None if it does."""
    num_ranks = get_rank_and_size()[1]
    if (before := stored.get("num_ranks", num_ranks)) != num_ranks:  # not in the states of former versions
        return RankLocalStateError(
            f"the checkpoint has a loader's position for each of {before} ranks, and now there are {num_ranks}: they would use "
            "samples twice or never; run on as many ranks, or leave the loader out of the state to load into"
        )
    is_of_torchdata = isinstance(own, Mapping) and not own.keys().isdisjoint(["_snapshot", "_num_yielded"])
    if is_of_torchdata and (before := stored.get("num_workers", num_workers)) != num_workers:
        return StateMismatchError(
            f"the checkpoint has a loader's position among num_workers={before}, and the loader has num_workers={num_workers}: "
            "give it as many workers, or leave it out of the state to load into"
        )
    return None


def _count_once(loader: Any, restored: Any) -> None:
    """Correct the position of a loader of torchdata 0.11 that has read data without a state up to the `restored` position.

    Such a loader begins with the stored number of batches and counts those that it skips again; the next resume would skip as
    many too many.
    """
    iterator: Any = getattr(loader, "_iterator", None)
    if not isinstance(restored, Mapping) or not hasattr(iterator, "_num_yielded"):
        return
    of_workers = restored.get("_snapshot")
    if of_workers is None:
        stored = restored.get("_num_yielded", iterator._num_yielded)  # noqa: SLF001 - torchdata gives no access to it
    else:
        stored = of_workers["_snapshot_step"] + restored["_steps_since_snapshot"]
    if (twice := iterator._num_yielded - stored) > 0:  # noqa: SLF001 - no access in torchdata
        iterator._num_yielded -= twice  # noqa: SLF001 - no access in torchdata
        if of_workers is not None:
            iterator._snapshot["_snapshot_step"] -= twice  # noqa: SLF001 - no access in torchdata
