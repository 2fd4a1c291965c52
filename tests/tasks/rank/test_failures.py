"""What a failure counts as is told by its type and origin, not by words in its text."""

import copyreg
import errno
import os
import pickle
import signal
import sys
from dataclasses import replace

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
    StorageSpec,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.errors import ReportWithdrawnError
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import RankFailedError, StorageNotSeenError
from prefect_torch.tasks.rank.failures import (
    cause_first,
    cause_of,
    hint_at_death,
    is_of_gpu,
    of_exception,
    of_returncode,
    of_start,
)
from prefect_torch.tasks.rank.program import call
from rank_specs import rank_spec
from torch import distributed
from torch.utils.data import DataLoader, Dataset

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55185."
DEBUGGED = "ProcessGroupWrapper: Monitored Barrier encountered error running collective: CollectiveFingerPrint("


class QuotingError(RuntimeError):
    """A user's own error, whatever it quotes."""


def test_what_a_training_raises_is_pickled_where_exceptions_bring_their_causes_along(monkeypatch):
    """As they do by tblib, once Dask is imported: the cause holds the exception itself, which had no end."""

    def with_cause(error):
        return key_error, (error.args[0], error.__cause__)

    failed = RankFailedError("rank 0 failed", 0, "user", KeyError("lr"), "its traceback")
    failed.original.__cause__ = failed
    assert str(pickle.loads(pickle.dumps(failed)).original) == "'lr'"
    monkeypatch.setitem(copyreg.dispatch_table, KeyError, with_cause)
    original = pickle.loads(pickle.dumps(failed.original))
    assert (original.args, original.__cause__.traceback) == (("lr",), "its traceback")
    assert str(pickle.loads(pickle.dumps(failed)).original) == "'lr'"
    assert failed.original.__cause__ is failed


@pytest.mark.parametrize(
    ("error", "resumes", "num_machines", "kind"),
    [
        (ImportError(), True, 2, "unprepared"),
        (ImportError(), True, 1, "final"),
        (ImportError(), False, 2, "final"),
        (StorageNotSeenError(), True, 1, "unprepared"),
        (StorageNotSeenError(), False, 2, "final"),
        (StorageNotSeenError(), True, 0, "final"),
    ],
)
def test_what_a_rank_lacks_may_be_its_machines_once_others_have_come_further(error, resumes, num_machines, kind):
    assert of_start(error, resumes=resumes, num_machines=num_machines) == kind


def test_a_run_is_resumed_by_ranks_that_train_it_further():
    own = StorageSpec("/store")
    restored = CheckpointRef(own, "run", "000001-00000004-8260df80")
    spec = rank_spec(storage=own, restored=restored)
    assert spec.resumes
    assert not replace(spec, restored=None).resumes
    assert not replace(spec, evaluates=True).resumes
    assert not replace(spec, restored=replace(restored, run="other")).resumes
    assert not replace(spec, restored=replace(restored, storage=StorageSpec("/other"))).resumes


def key_error(text, cause):
    error = KeyError(text)
    error.__cause__ = cause
    return error


def test_a_last_commit_that_finds_the_disk_full_counts_alike_where_the_function_exits():
    class Session:
        takes_reports, context = False, None

        def finish(self):
            raise StorageFullError("no space left")

        def fail(self, detail, flush_s, *, is_consequence):
            pass

    def leave():
        sys.exit(0)

    for function in (lambda: None, leave):
        assert call.call_in_session(function, None, Session(), rank_spec()).kind == "user"


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
        (RuntimeError(f"Gloo connectFullMesh failed with {GLOO}"), "communication"),
        (RuntimeError(f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original: \n{GLOO}"), "communication"),
        (RuntimeError("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms"), "communication"),
        (RuntimeError("Application timeout caused pair closure"), "communication"),
        (RuntimeError(f"{DEBUGGED}TensorShape=[1], TensorDtypes=Long). Error: \n{GLOO}"), "communication"),
        (RuntimeError("eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"), "communication"),
        (RuntimeError("RPCErr:1:RPC ran for more than set timeout (4000 ms) and will now be marked"), "communication"),
        (RuntimeError("On WorkerInfo(id=1, name=w1):\nRuntimeError('eof (this error originated at tensorpipe/')"), "user"),
        (RuntimeError("the loss is nan, but rank 1 successfully reached monitoredBarrier"), "user"),
        (RuntimeError("Detected mismatch between collectives on ranks. Rank 0 is running collective"), "user"),
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


def test_an_error_that_the_function_raises_from_a_lost_connection_is_a_consequence_too():
    for cause, kind in (
        (RuntimeError(GLOO), "communication"),
        (PeerGoneError("rank 1 died"), "peer"),
        (MemoryError(), "user"),
        (KeyError("lr"), "user"),
    ):
        error, outer = QuotingError("the step failed"), QuotingError("the epoch failed")
        error.__cause__, outer.__cause__ = cause, error
        assert of_exception(error) == of_exception(outer) == kind
    error.__cause__ = outer  # as pickles of exceptions may have it
    assert of_exception(error) == "user"


def test_an_error_that_is_raised_while_a_lost_connection_is_handled_is_a_consequence_too():
    """As one in `except` or `finally` without `from`: it had not been raised without the other rank's failure."""
    error, outer = QuotingError("the step failed"), KeyError("where it is cleaned up")
    error.__context__, outer.__context__ = RuntimeError(GLOO), error
    assert of_exception(error) == of_exception(outer) == "communication"
    outer.__suppress_context__ = True  # `from None`: the function says that it is another matter
    assert of_exception(outer) == "user"


@pytest.mark.parametrize(
    ("caught", "kind"),
    [(RuntimeError(GLOO), "communication"), (MemoryError(), "out_of_memory"), (ZeroDivisionError(), "user"), (None, "user")],
)
def test_an_exit_where_the_function_has_caught_an_error_is_of_the_kind_of_that_error(caught, kind):
    left = SystemExit(1)
    left.__context__ = caught
    assert of_exception(left) == kind


def test_a_failed_commit_is_the_failure_of_the_ranks_that_could_not_store_their_parts():
    """So the error names their machine, which is avoided if it fails again and again, unless all ranks fail."""
    error = CommitFailedError("rank 1 could not store its part: no answer")
    error.ranks = (1, 2)
    sent = pickle.loads(pickle.dumps(error))
    assert [of_exception(sent, rank=rank) for rank in range(4)] == ["peer", "infrastructure", "infrastructure", "peer"]
    full = StorageFullError("rank 1 could not store its part: no space left")
    full.ranks = (1,)
    assert of_exception(full, rank=0) == "user"


def accelerator_error(code, text):
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be reported at some other call")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (2, "out of memory", "out_of_memory"),
        (46, "CUDA-capable device(s) is/are busy or unavailable", "infrastructure"),
        (100, "no CUDA-capable device is detected", "infrastructure"),
        (214, "uncorrectable ECC error encountered", "infrastructure"),
        (220, "uncorrectable NVLink error detected during the execution", "infrastructure"),
        (226, "Invalid access of peer GPU memory over nvlink or a hardware error", "infrastructure"),
        (802, "system not yet initialized", "infrastructure"),
        (700, "an illegal memory access was encountered", "user"),
        (710, "device-side assert triggered", "user"),
        (719, "unspecified launch failure", "user"),
    ],
)
def test_a_broken_gpu_is_told_from_a_broken_kernel(code, text, kind):
    assert of_exception(accelerator_error(code, text)) == kind
    assert of_exception(accelerator_error(code, "translated")) == kind
    assert of_exception(RuntimeError(f"CUDA error: {text}\nCompile with")) == kind  # of torch before 2.8
    assert is_of_gpu(accelerator_error(code, text)) == (kind == "infrastructure")
    assert of_exception(QuotingError(f"CUDA error: {text}")) == "user"


def test_a_gpus_memory_that_others_hold_says_nothing_about_the_function():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), accelerator_error(2, "out of memory")):
        assert of_exception(error, is_gpu_shared=True) == "infrastructure"
    assert of_exception(MemoryError(), is_gpu_shared=True) == "out_of_memory"
    assert of_exception(ValueError(), is_gpu_shared=True) == "user"


@pytest.mark.parametrize(
    ("returncode", "oom_killed", "hint"),
    [
        (-signal.SIGABRT, False, "aborts a process whose collective timed out"),
        (-signal.SIGBUS, False, "/dev/shm"),
        (-signal.SIGKILL, True, "the kernel has killed for lack of memory"),
        (-signal.SIGKILL, None, "the machine ran out of memory"),
        (0, None, "os._exit()"),
    ],
)
def test_a_death_is_explained(returncode, oom_killed, hint):
    assert hint in hint_at_death(returncode, oom_killed=oom_killed)


def test_a_death_whose_cause_is_unknown_is_not_explained():
    assert {hint_at_death(-signal.SIGKILL, oom_killed=False), hint_at_death(1, oom_killed=None)} == {""}


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
        (0, False, "user"),
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


def test_a_cause_has_the_failures_that_it_did_not_cause():
    def failure(rank, kind="user"):
        return RankFailedError(f"rank {rank}", rank, kind)

    of_a_node = cause_of([failure(5), failure(4, "final"), failure(6, "communication")])
    assert (of_a_node.rank, [it.rank for it in of_a_node.others]) == (4, [5])
    hang = RankFailedError("all hang", None, "infrastructure")
    whole = pickle.loads(pickle.dumps(cause_of([failure(0), failure(1, "peer"), of_a_node, RuntimeError("x"), hang])))
    assert (whole.rank, [it.rank for it in whole.others]) == (4, [5, 0])


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError("x"), "infrastructure"), (StorageFullError("x"), "infrastructure"), (FencedError("x"), "final")],
)
def test_before_the_function_runs_nothing_is_its_failure(error, kind):
    assert of_exception(error, in_function=False) == kind
