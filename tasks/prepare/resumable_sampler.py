"""Whose turn a sample is: the order of an epoch, as a function of nothing that a restart changes.

The ranks take the samples of an epoch in turns, so that after equally many batches what was used is the beginning of one
order, whoever used it. A position is therefore a number, the same on all ranks: how many of them. Any number of ranks shares
what is left, with any batch size. Imports torch, never prefect: ranks use it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from prefect_torch.ckpt import StateMismatchError
from torch.utils.data import DistributedSampler


@dataclass(frozen=True, slots=True)
class Position:
    """How far a training is in its data.

    Attributes:
        epoch: Counted from 0.
        used: How many of the epoch's samples were used, by all ranks together.

    """

    epoch: int = 0
    used: int = 0


def epoch_order(num_samples: int, seed: int | None) -> torch.Tensor:
    """Return the order of all samples in one epoch, the one that DistributedSampler has for that seed; None sorts them."""
    if seed is None:
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


def rank_share(rest: torch.Tensor, rank: int, num_ranks: int, *, drop_last: bool = False) -> torch.Tensor:
    """Return this rank's part of `rest`, every num_ranks-th of it; all ranks get equally many.

    Args:
        rest: The samples to share, in their order.
        rank: This rank.
        num_ranks: The number of ranks.
        drop_last: Whether samples that do not make a whole turn are left out. Else ranks without one in the last turn get one
            that another rank has in that turn: so nothing used before comes again, and as many ranks get the same
            whether or not they were interrupted before.

    """
    over = len(rest) % num_ranks
    if over and drop_last:
        rest = rest[: len(rest) - over]
    elif over:
        last_turn = rest[len(rest) - over :]
        rest = torch.cat([rest, last_turn[torch.arange(over, num_ranks) % over]])
    return rest[rank::num_ranks]


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler whose next epoch can begin where an earlier attempt stopped, with any number of ranks.

    Its length is always that of a whole epoch.

    Args:
        dataset: Has a length, and items by number.
        rank: This rank.
        num_ranks: The number of ranks.
        shuffle: Whether every epoch has an order of its own.
        seed: Of the orders; the same on all ranks.
        drop_last: Whether to leave out what does not make a batch for every rank, rather than to use samples twice.

    Attributes:
        start: How many samples of the epoch the next iteration leaves out because they were used; 0 unless restored.

    """

    def __init__(self, dataset: Any, rank: int, num_ranks: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        super().__init__(dataset, num_ranks, rank, shuffle, seed, drop_last)
        self.start = 0
        self._num_all = len(dataset)
        self._checksums: dict[tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[Any]:
        rest = self._order(self.epoch)[self.start :]
        return iter(rank_share(rest, self.rank, self.num_replicas, drop_last=self.drop_last).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Raises:
            ValueError: If another one was restored, and some of its samples are still to be used.

        """
        if self.start and epoch != self.epoch:
            raise ValueError(
                f"set_epoch({epoch}), but the restored checkpoint is from the middle of epoch {self.epoch}: leave set_epoch "
                "out, a resumable loader counts its epochs itself"
            )
        super().set_epoch(epoch)

    def after(self, position: Position, num_turns: int) -> Position:
        """Return where the ranks are when each has used `num_turns` more samples than at `position`."""
        used = min(position.used + num_turns * self.num_replicas, self._num_all)
        return Position(position.epoch, used)

    def has_batch(self, position: Position, batch_size: int) -> bool:
        """Say whether anything is left at `position` for every rank: a whole batch with `drop_last`, else a sample."""
        needed = batch_size * self.num_replicas if self.drop_last else 1
        return self._num_all - position.used >= needed

    def tell(self, position: Position) -> dict[str, int]:
        """Return what `restore` needs to continue from `position`: plain values, the same on all ranks."""
        told = {"epoch": position.epoch, "used": position.used, "length": self._num_all, "seed": self.seed}
        return {**told, "order": self._order_checksum(position.epoch) if position.used else 0}

    def restore(self, told: Mapping[str, int]) -> None:
        """Begin the next iteration where `tell` was told, with the seed from there.

        Raises:
            StateMismatchError: If that is in the middle of an epoch, and these data have another length or order; nothing is
                changed.

        """
        before, self.seed = self.seed, told["seed"]
        if told["used"] and (reason := self._differs(told)):
            self.seed = before
            raise StateMismatchError(
                f"the checkpoint is from the middle of epoch {told['epoch']}, and {reason}: which samples were used cannot be "
                "told; resume with the same data, from a checkpoint between epochs, or without the loader in the state"
            )
        super().set_epoch(told["epoch"])
        self.start = told["used"]

    def _differs(self, told: Mapping[str, int]) -> str:
        if told["length"] != (length := self._num_all):
            return f"the dataset had {told['length']} samples then and has {length} now"
        if told["order"] != self._order_checksum(told["epoch"]):
            return "the samples come in another order now (another shuffle=, or a torch that shuffles otherwise)"
        return ""

    def _order(self, epoch: int) -> torch.Tensor:
        order = epoch_order(self._num_all, self.seed + epoch if self.shuffle else None)
        weighted = order * torch.arange(1, len(order) + 1)
        self._checksums = {(epoch, self.seed): int(weighted.sum())}  # modulo 2**64
        return order

    def _order_checksum(self, epoch: int) -> int:
        if (epoch, self.seed) not in self._checksums:
            self._order(epoch)
        return self._checksums[epoch, self.seed]
