"""A sampler whose order is a function of the epoch and the seed alone, so that a restart does not change it.

The ranks take the samples of an epoch in turns, so that after equally many batches the used samples are the first ones of that
order. A position is therefore the number of used samples, the same on all ranks. Any number of ranks can share the rest, with
any batch size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from prefect_torch.ckpt import StateMismatchError
from torch.utils.data import DistributedSampler


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a training in its data.

    Attributes:
        epoch: Counted from 0.
        used: The number of samples of the epoch that all ranks together have used.

    """

    epoch: int = 0
    used: int = 0


def epoch_order(num_samples: int, seed: int | None) -> torch.Tensor:
    """Return the order of all samples in one epoch, that of DistributedSampler for the seed; None for the sorted order.

    On the CPU, as all of the sampler, whatever torch's default device is.
    """
    if seed is None:
        return torch.arange(num_samples, device="cpu")
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed), device="cpu")


def rank_share(rest: torch.Tensor, rank: int, num_ranks: int, *, drop_last: bool = False) -> torch.Tensor:
    """Return this rank's part of `rest`, every num_ranks-th sample of it; all ranks get equally many.

    Args:
        rest: The samples to share, in their order.
        rank: This rank.
        num_ranks: The number of ranks.
        drop_last: Whether samples that do not make a whole turn are left out. If not, ranks without one in the last turn get
            one that another rank has in that turn: then no sample used before is used again, and the ranks get the same
            samples whether or not they were interrupted before.

    """
    over = len(rest) % num_ranks
    if over and drop_last:
        rest = rest[: len(rest) - over]
    elif over:
        last_turn = rest[len(rest) - over :]
        rest = torch.cat([rest, last_turn[torch.arange(over, num_ranks, device="cpu") % over]])
    return rest[rank::num_ranks]


def restored_within(restored: int, epoch: int) -> str:
    """Return why the epoch cannot be set to `epoch` while the rest of the epoch `restored` is to come."""
    return (
        f"set_epoch({epoch}), but the restored checkpoint is from the middle of epoch {restored}: leave set_epoch out, a "
        "resumable loader counts its epochs itself"
    )


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler whose next epoch can begin where an earlier attempt stopped, with any number of ranks.

    Its length is always that of a whole epoch.

    Args:
        dataset: A dataset with a length, and items by number.
        rank: This rank.
        num_ranks: The number of ranks.
        shuffle: Whether every epoch has another order.
        seed: The seed of the orders; the same on all ranks.
        drop_last: Whether to leave out samples that do not make a batch for every rank, instead of using some twice.

    Attributes:
        start: The number of used samples of the epoch, which the next iteration leaves out; 0 unless restored.

    """

    def __init__(self, dataset: Any, rank: int, num_ranks: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        super().__init__(dataset, num_ranks, rank, shuffle, seed, drop_last)
        self.start = 0
        self._num_all = len(dataset)  # of the present epoch
        self._checksums: dict[tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[Any]:
        rest = self._order(self.epoch)[self.start :]
        return iter(rank_share(rest, self.rank, self.num_replicas, drop_last=self.drop_last).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Raises:
            ValueError: If another epoch was restored, and not all of its samples are used yet.

        """
        if self.start and epoch != self.epoch:
            raise ValueError(restored_within(self.epoch, epoch))
        super().set_epoch(epoch)

    def follow_length(self) -> None:
        """Let the next iteration have all samples of a dataset that has grown or shrunk, unless it is the rest of an epoch."""
        data: Any = self.dataset
        if self.start or len(data) == self._num_all:
            return
        epoch, self._num_all, self._checksums = self.epoch, len(data), {}
        super().__init__(self.dataset, self.num_replicas, self.rank, self.shuffle, self.seed, self.drop_last)
        self.epoch = epoch

    def after(self, position: Position, num_turns: int) -> Position:
        """Return the position after each rank has used `num_turns` more samples than at `position`."""
        used = min(position.used + num_turns * self.num_replicas, self._num_all)
        return Position(position.epoch, used)

    def has_batch(self, position: Position, batch_size: int) -> bool:
        """Return whether a batch is left at `position`: a whole one for every rank with `drop_last`, else a sample."""
        needed = batch_size * self.num_replicas if self.drop_last else 1
        return self._num_all - position.used >= needed

    def state_at(self, position: Position) -> dict[str, int]:
        """Return the state of `position` for `restore`: plain values, the same on all ranks."""
        state = {"epoch": position.epoch, "used": position.used, "length": self._num_all, "seed": self.seed}
        return {**state, "order": self._order_checksum(position.epoch) if position.used else 0}

    def restore(self, state: Mapping[str, int]) -> None:
        """Set the position and the seed of the next iteration to those of a state of `state_at`.

        Raises:
            StateMismatchError: If the position is in the middle of an epoch, and these data have another length or order;
                nothing is changed.

        """
        before, self.seed, self.start = (self.seed, self.start), state["seed"], 0
        self.follow_length()
        if state["used"] and (reason := self._differs(state)):
            self.seed, self.start = before
            raise StateMismatchError(
                f"the checkpoint is from the middle of epoch {state['epoch']}, and {reason}: which samples were used is "
                "unknown; resume with the same data, from a checkpoint between epochs, or without the loader in the state"
            )
        super().set_epoch(state["epoch"])
        self.start = state["used"]

    def _differs(self, state: Mapping[str, int]) -> str:
        if state["length"] != (length := self._num_all):
            return f"the dataset had {state['length']} samples then and has {length} now"
        if state["order"] != self._order_checksum(state["epoch"]):
            return "the samples come in another order now (another shuffle=, or a torch that shuffles otherwise)"
        return ""

    def _order(self, epoch: int) -> torch.Tensor:
        order = epoch_order(self._num_all, self.seed + epoch if self.shuffle else None)
        weighted = order * torch.arange(1, len(order) + 1, device="cpu")
        self._checksums = {(epoch, self.seed): int(weighted.sum())}  # modulo 2**64
        return order

    def _order_checksum(self, epoch: int) -> int:
        if (epoch, self.seed) not in self._checksums:
            self._order(epoch)
        return self._checksums[epoch, self.seed]
