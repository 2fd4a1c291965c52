"""Random generators of a loader's iterator, separate from those of the process."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import xxhash

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


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
    loader.generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(repr((seed, *identity)).encode()))
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
