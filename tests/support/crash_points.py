"""A crash before, after and in the middle of every storage operation."""

import contextlib

import pytest
from faulty_storage import Crash, FaultyStorage
from prefect_torch.ckpt import CheckpointStore, CommitFailedError, StorageSpec
from prefect_torch.ckpt.runs.layout import Layout


def open_run(storage) -> CheckpointStore:
    return CheckpointStore(storage, Layout("run"), StorageSpec(storage.url))


def crash_points(storage_of, run):
    """Yield the storage for a crash before, after and in the middle of every operation, until one ran through."""
    for way in ({"after": False}, {"after": True}, {"torn": True}):
        for number in range(1, 1000):
            faulty = FaultyStorage(storage_of(number, str(way)), number, **way)
            with contextlib.suppress(Crash, CommitFailedError):  # the latter tells of a background thread's crash
                run(faulty)
            if not faulty.fired:
                break
            yield faulty
        else:
            pytest.fail("it never ends")
