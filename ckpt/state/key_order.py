"""The order of the keys in a state's dicts, which the tensors and values of an index do not record."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_torch.ckpt.runs.records.fields import Count

from .plan import Step


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """The order of the keys in one dict of a state.

    Attributes:
        path: The dict's path in the state.
        keys: Its keys, in their order.
        rank: The rank that alone has this order; None for all ranks.

    """

    path: tuple[Step, ...]
    keys: tuple[Step, ...]
    rank: Count | None = None


def hashable(step: Step) -> Any:
    """Return a step of a path as a key: a str, an int, or a tuple for the index of a list."""
    return tuple(step) if isinstance(step, list) else step


def key_of(path: Sequence[Step]) -> tuple[Any, ...]:
    """Return `path` in a hashable form."""
    return tuple(hashable(step) for step in path)


def ordered(known: Iterable[Any], keys: Iterable[Any]) -> list[Any]:
    """Return all of `known`: first those in `keys`, in the order of `keys`."""
    left = dict.fromkeys(known)
    first = dict.fromkeys(key for key in keys if key in left)
    return [*first, *(key for key in left if key not in first)]


def needed_orders(paths: Iterable[Sequence[Step]], by_rank: Mapping[int, Iterable[KeyOrder]]) -> tuple[KeyOrder, ...]:
    """Return the key orders that differ from that of `paths`, so that a reader can restore each rank's dicts in their order.

    Args:
        paths: The paths of all tensors and values, in the order of the index.
        by_rank: The order of the keys in each dict that a rank had, by rank.

    """
    dicts: dict[tuple[Any, ...], list[tuple[int, KeyOrder]]] = defaultdict(list)
    for rank, orders in by_rank.items():
        for order in orders:
            dicts[key_of(order.path)].append((rank, order))
    if not dicts:  # for example a state that consists of modules and optimizers only
        return ()
    found = _children(paths, dicts)
    needed = []
    for path, of_ranks in dicts.items():
        known = [*found[path]]
        first = of_ranks[0][0]
        for rank, order in of_ranks:
            mine = {*key_of(order.keys)}
            new = ordered(known, key_of(order.keys))
            if [key for key in known if key in mine] == [key for key in new if key in mine]:
                continue
            needed.append(KeyOrder(order.path, order.keys, None if rank == first else rank))
            known = new if rank == first else known
    return tuple(needed)


def _children(paths: Iterable[Sequence[Step]], dicts: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], dict[Any, None]]:
    """Return the keys below each of `dicts` in the order in which `paths` name them."""
    found: dict[tuple[Any, ...], dict[Any, None]] = {path: {} for path in dicts}
    for path in map(key_of, paths):
        for depth, key in enumerate(path):
            if (children := found.get(path[:depth])) is not None:
                children[key] = None
    return found
