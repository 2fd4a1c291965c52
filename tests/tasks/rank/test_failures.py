"""What a failure counts as is told by its type and origin, not by words in its text."""

import errno
import os
import signal

import pytest
import torch
from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CommitFailedError,
    FencedError,
    PeerGoneError,
    RankLocalStateError,
    ReportMismatchError,
    StateMismatchError,
    StorageError,
    StorageFullError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.errors import ReportWithdrawnError
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import cause_first, of_exception, of_returncode
from torch import distributed
from torch.utils.data import DataLoader, Dataset

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55185."


class QuotingError(RuntimeError):
    """A user's own error, whatever it quotes."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("nccl is great, gloo is too: broken pipe, connection closed by peer"), "user"),
        (RuntimeError(f"the loss is nan; before, there was {GLOO}"), "user"),
        (QuotingError(GLOO), "user"),
        (BrokenPipeError("to a process of the user's"), "user"),
        (RuntimeError(GLOO), "communication"),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms"),
            "communication",
        ),
        (distributed.DistBackendError("NCCL error"), "communication"),
        (distributed.DistNetworkError("socket closed"), "communication"),
        (distributed.DistStoreError("wait timeout"), "communication"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (StorageError("no answer"), "infrastructure"),
        (CommitFailedError("rank 1 could not store its part"), "infrastructure"),
        (CheckpointCorruptError("changed since it was verified"), "infrastructure"),
        (StorageFullError("no space left"), "user"),
        (OSError(errno.ENOSPC, "No space left on device"), "user"),
        (CheckpointNotFoundError("there is no folder"), "user"),
        (StateMismatchError("another model"), "final"),
        (RankLocalStateError("another number of ranks"), "final"),
        (ReportMismatchError("another step"), "final"),
        (FencedError("overtaken"), "final"),
        (UnsupportedFormatError("upgrade"), "final"),
        (ReportWithdrawnError("rank 1 could not report"), "withdrawn"),
        (PeerGoneError("rank 1 died"), "peer"),
        (KeyboardInterrupt(), "user"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_exception_counts_by_its_type(error, kind):
    assert of_exception(error) == kind


class Killed(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_data_loaders_worker_that_the_kernel_killed_ran_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Killed(), num_workers=1)))
    assert of_exception(caught.value) == "user"
    assert of_exception(caught.value, oom_killed=True) == "out_of_memory"
    assert of_exception(RuntimeError("the loss is nan"), oom_killed=True) == "user"


@pytest.mark.parametrize(
    ("returncode", "oom_killed", "kind"),
    [
        (-signal.SIGKILL, True, "out_of_memory"),
        (-signal.SIGKILL, False, "infrastructure"),
        (None, True, "out_of_memory"),
        (None, False, "infrastructure"),
        (-signal.SIGSEGV, True, "infrastructure"),
        (7, True, "infrastructure"),
        (-signal.SIGTERM, True, "preemption"),
    ],
)
def test_a_death_counts_by_its_signal_and_by_what_the_kernel_did(returncode, oom_killed, kind):
    assert of_returncode(returncode, oom_killed=oom_killed) == kind


def test_consequences_come_after_every_cause():
    kinds = ["peer", "withdrawn", "communication", "infrastructure", "user", "out_of_memory", "final"]
    stopped = RuntimeError("the task runner's own")
    ordered = cause_first([stopped, *(RankFailedError("x", 0, kind) for kind in kinds)])
    assert ordered.pop() is stopped
    assert [failure.kind for failure in ordered] == [
        *("final", "out_of_memory", "user", "infrastructure", "withdrawn", "communication", "peer")
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError("x"), "infrastructure"), (StorageFullError("x"), "infrastructure"), (FencedError("x"), "final")],
)
def test_before_the_function_runs_nothing_is_its_failure(error, kind):
    assert of_exception(error, in_function=False) == kind
