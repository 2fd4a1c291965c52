"""A look at the tensors that count as equal on all ranks, since ranks that hold others would store a mixture of them."""

from collections.abc import Collection, Sequence

import torch
import xxhash

from .device_copies import brought_to_host
from .flatten import Leaf
from .index import rank_of
from .tensors import is_dtensor

_TENSORS = 8  # of each module and optimizer


class ReplicaSampler:
    """Reads a few elements of a rank's replicated tensors; which ones is decided when the state's leaves change."""

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}
        self._chosen_for: tuple[object, ...] = ()

    def sample(self, leaves: Sequence[Leaf], parts: Collection[str]) -> dict[str, Sequence[str]]:
        """Return what is in each of `parts`, the modules and optimizers, as two digests.

        The first is of the names of up to eight tensors, the second of one element of each. Buffers are left out, of which
        rank 0's are stored, and so are DTensors. Costs some ten microseconds, and one copy for all elements of a device.
        """
        chosen_for = (len(leaves), *parts)
        known = [leaves[place] for places in self._places.values() for place in places if place < len(leaves)]
        if chosen_for != self._chosen_for or not all(map(_is_replica, known)):
            self._places, self._chosen_for = _choose(leaves, parts), chosen_for
        looked_at = {part: [leaves[place] for place in places] for part, places in self._places.items()}
        elements = [_middle(leaf.value) for of_part in looked_at.values() for leaf in of_part]
        found = iter(brought_to_host(elements))
        samples: dict[str, Sequence[str]] = {}
        for part, of_part in looked_at.items():
            names = " ".join(leaf.name for leaf in of_part).encode()
            data = b"".join(next(found).view(torch.uint8).numpy().tobytes() for _ in of_part)
            samples[part] = [xxhash.xxh3_64_hexdigest(names), xxhash.xxh3_64_hexdigest(data)]
        return samples


def _choose(leaves: Sequence[Leaf], parts: Collection[str]) -> dict[str, list[int]]:
    """Return the places of up to eight replicas in each part, from the first to the last at equal distances."""
    chosen: dict[str, list[int]] = {}
    for part in parts:
        found = [place for place, leaf in enumerate(leaves) if leaf.name.startswith(f"{part}.") and _is_replica(leaf)]
        num = min(len(found), _TENSORS)
        chosen[part] = [found[number * (len(found) - 1) // max(1, num - 1)] for number in range(num)]
    return chosen


def _is_replica(leaf: Leaf) -> bool:
    value = leaf.value
    is_whole = isinstance(value, torch.Tensor) and value.numel() > 0 and not is_dtensor(value)
    return is_whole and leaf.of_model and not leaf.by_first and rank_of(leaf.name) is None


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element in the middle, sharing its memory."""
    return tensor.detach()[tuple(size // 2 for size in tensor.shape)].reshape(1)
