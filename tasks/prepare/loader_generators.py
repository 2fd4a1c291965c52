"""The random numbers that a loader's iterator draws for itself, apart from those of the process.

Imports torch, never prefect: ranks use it.
"""

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
def own_generator(loader: "DataLoader[Any]", *place: int) -> Iterator[None]:
    """Let an iterator that `loader` begins within the block draw its workers' seed from a generator made for it.

    torch draws that seed from the loader's generator, or from the process's: once in an epoch that nothing interrupts, and once
    more where the epoch is resumed, after which every number that the process draws is another one. Here nothing is drawn. The
    seed follows from the one of that generator and from `place`, so it is the same in a resumed training, which restores both.

    Args:
        loader: It has its own generator again when the block ends.
        place: What tells this iteration from others: its epoch, the rank, and so on.

    """
    given = loader.generator
    seed = torch.initial_seed() if given is None else given.initial_seed()
    loader.generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(repr((seed, *place)).encode()))
    try:
        yield
    finally:
        loader.generator = given


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the process's generators (torch's on the CPU, Python's, and NumPy's if it is loaded) as they were before."""
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
