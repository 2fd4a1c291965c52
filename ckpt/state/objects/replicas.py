"""Samples of the tensors that count as equal on all ranks: unequal ones would be stored as a mixture."""

from collections.abc import Collection, Sequence

import torch
import xxhash
from prefect_torch.ckpt.state.index import rank_of
from prefect_torch.ckpt.state.staging.buffer import memory_of
from prefect_torch.ckpt.state.staging.device_copies import copied_to_host

from .flatten import Leaf
from .tensors import local_part

_TENSORS = 8  # of each module and optimizer


class ReplicaSampler:
    """Reads a few elements of a rank's modules and optimizers, at its first, second, fourth, eighth … report of a state."""

    def __init__(self) -> None:
        self._reports = 0

    def sample(self, leaves: Sequence[Leaf], parts: Collection[str]) -> dict[str, Sequence[str]]:
        """Return two digests for each of `parts`, the modules and optimizers; at most reports, return nothing.

        The first is of the names of up to eight tensors and the part of each that this rank has: ranks that have the same are
        compared. The second is of one element of each. Buffers are left out, since rank 0's are stored. Costs a few
        milliseconds, and a copy from each device for each part.
        """
        self._reports += 1
        return _sample(leaves, parts) if self._reports.bit_count() == 1 else {}


def _sample(leaves: Sequence[Leaf], parts: Collection[str]) -> dict[str, Sequence[str]]:
    samples: dict[str, Sequence[str]] = {}
    for part in parts:
        chosen = _spread([leaf for leaf in leaves if leaf.name.startswith(f"{part}.") and _is_replica(leaf)])
        mine = [(leaf.name, *held) for leaf in chosen if (held := local_part(leaf.value)) is not None]
        boxes = repr([(name, offsets, tuple(local.shape)) for name, offsets, local in mine]).encode()
        data = b"".join(map(memory_of, copied_to_host([_middle(local) for _, _, local in mine])))
        samples[part] = [xxhash.xxh3_64_hexdigest(boxes), xxhash.xxh3_64_hexdigest(data)]
    return samples


def _is_replica(leaf: Leaf) -> bool:
    has_elements = isinstance(leaf.value, torch.Tensor) and leaf.value.numel() > 0
    return has_elements and leaf.of_model and not leaf.by_first and rank_of(leaf.name) is None


def _spread(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return up to eight of `leaves`, from the first to the last at equal distances."""
    num = min(len(leaves), _TENSORS)
    return [leaves[number * (len(leaves) - 1) // max(1, num - 1)] for number in range(num)]


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element in the middle, sharing its memory."""
    return tensor.detach()[tuple(size // 2 for size in tensor.shape)].reshape(1)
