"""Budgets outlive the process that leads, and need no storage that answers."""

import errno
import pickle
from dataclasses import replace
from json import JSONDecodeError
from uuid import uuid4

import httpx
import pytest
from faulty_storage import FaultyStorage
from prefect.settings import PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED, temporary_settings
from prefect_servers import api_that_answers
from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    RunBusyError,
    StorageError,
)
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.manifest import new_id
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.rank.errors import RankFailedError, RestartsUsedUpError
from prefect_torch.tasks.rank.failures import counts_against
from prefect_torch.tasks.rank.user_code.function import pack_function
from prefect_torch.tasks.training import restarts as restarts_module
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.restarts import Restarts
from prefect_torch.tasks.training.start import claim


def job(store, **budgets):
    return TrainJob(
        function=pack_function("json:loads", None),
        store=store,
        initial_checkpoint=None,
        scaling=ScalingConfig(),
        run_config=RunConfig(takeover=True),
        checkpoint=CheckpointConfig(),
        failure=FailureConfig(**{"max_failures": 0, "max_infrastructure_failures": 0, "max_preemptions": 0, **budgets}),
    )


BUDGETS = {
    "user": "max_failures",
    "infrastructure": "max_infrastructure_failures",
    "out_of_memory": "max_out_of_memory_failures",
    "preemption": "max_preemptions",
}
UNLIMITED = dict.fromkeys(BUDGETS.values(), -1)


@pytest.mark.parametrize("page", [b"<html>maintenance</html>", "<html>Störung</html>".encode("latin-1")])
def test_a_page_of_a_proxy_in_the_place_of_prefects_answer_is_no_end_of_a_training(page):
    """As where the server is being upgraded; with status 503, it is an httpx.HTTPError."""
    checked = {PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False}  # as it was before
    restarts, errors = Restarts(FailureConfig(), str(uuid4()), is_rerun=True), (JSONDecodeError, UnicodeDecodeError)
    with api_that_answers(200, page), temporary_settings(checked), pytest.raises(errors) as caught:
        _ = restarts.owner
    assert counts_against(caught.value) == "infrastructure"


@pytest.mark.parametrize("kind", BUDGETS)
def test_each_kind_of_failure_has_a_budget_of_its_own(store, kind):
    restarts = Restarts(job(store, **{BUDGETS[kind]: 2}).failure, "mine")
    for other in BUDGETS:
        if other != kind:
            assert not restarts.count_failure(other)
    assert [restarts.count_failure(kind) for _ in range(3)] == [True, True, False]
    unlimited = Restarts(job(store, **{BUDGETS[kind]: -1}).failure, "mine")
    assert all(unlimited.count_failure(kind) for _ in range(9))


def test_what_is_final_is_never_tried_again(store):
    assert not Restarts(job(store, **UNLIMITED).failure, "mine").count_failure("final")


def test_each_restart_has_its_delay_and_all_further_ones_the_last(store):
    restarts = Restarts(job(store, retry_delay_s=[0, 10, 60]).failure, "mine")
    delays = [restarts.delay_s]
    for kind in (*BUDGETS, "user"):
        restarts.count_failure(kind)
        delays.append(restarts.delay_s)
    assert delays == [0, 0, 10, 60, 60, 60]
    restarts = Restarts(job(store, retry_delay_s=10, retry_jitter_factor=0.2).failure, "mine")
    for _ in range(100):
        restarts.count_failure("user")
        delays.append(restarts.delay_s)
    assert 5 < min(delays[6:]) < max(delays[6:]) <= 12


def test_a_restart_without_a_delay_begins_at_once(store):
    restarts = Restarts(job(store).failure, "mine")
    restarts.count_failure("user")
    assert restarts.delay_s == 0


def test_prefect_is_allowed_as_many_retries_as_all_budgets_together(store):
    assert Restarts(job(store, max_failures=2, max_out_of_memory_failures=1).failure, "mine").most_retries == 3
    assert Restarts(job(store, max_failures=2, max_preemptions=-1).failure, "mine").most_retries > 10**5


def test_a_claim_that_fails_counts_though_no_attempt_tells_of_it(store):
    gone = FaultyStorage(store.storage, crash_at=1, error=StorageError("no answer"))
    away = CheckpointStore(gone, store.layout, store.spec)
    restarts = Restarts(job(store, max_infrastructure_failures=1).failure, "mine")
    allowed = []
    for _ in range(2):
        gone.operations.clear()
        with pytest.raises(StorageError) as caught:
            claim(away, job(store), restarts)
        allowed.append(restarts.count_failure(counts_against(caught.value)))
    assert allowed == [True, False]
    assert gone.fired == 2


@pytest.fixture
def rerun(monkeypatch):
    """Let the flow run have been run again, by somebody after it had ended in the state that this is set to, if any."""
    monkeypatch.setattr(restarts_module, "find_end_before_rerun", lambda flow_run_id: ended[0])
    ended = [None]
    return ended


def earlier_attempt(store, kind, *, flow_run_id="mine", budget=None, commits=False):
    """Let an attempt of an earlier process end by `kind`, or, for None, by a SIGKILL that leaves no outcome."""
    killed = replace(Owner.current(flow_run_id, budget), pid=1)
    claimed = claim_attempt(store, killed, world_size=1)
    if commits:
        store.storage.put_bytes(store.layout.manifest(new_id(claimed.number, 0)), b"")
    if kind is not None:
        write_outcome(store, Outcome(claimed.number, "failed", flow_run_id, kind))


@pytest.mark.usefixtures("rerun")
@pytest.mark.parametrize("kind", BUDGETS)
def test_a_flow_run_that_is_started_again_goes_on_with_what_is_left_of_its_budgets(store, monkeypatch, kind):
    monkeypatch.setattr("prefect_torch.tasks.training.start.end_left_task_runs", lambda *_: None)  # that asks Prefect
    earlier_attempt(store, kind)
    earlier_attempt(store, kind, flow_run_id="another")
    restarts = Restarts(job(store, **{BUDGETS[kind]: 2}).failure, "mine", is_rerun=True)
    claim(store, job(store), restarts)
    assert [restarts.count_failure(kind) for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("kind", "commits", "counts_as"),
    [
        ("preemption", False, "was terminated 3 times, with max_preemptions=2"),
        (None, True, "was terminated 3 times, with max_preemptions=2"),
        (None, False, "lost its processes, its storage or its network 3 times, with max_infrastructure_failures=2"),
        ("out_of_memory", False, "ran out of memory 3 times, with max_out_of_memory_failures=2"),
    ],
)
def test_a_flow_run_whose_budget_is_used_up_is_refused_until_somebody_runs_it_again(store, rerun, kind, commits, counts_as):
    for _ in range(3):
        earlier_attempt(store, kind, commits=commits)
    limited = job(store, **dict.fromkeys(BUDGETS.values(), 2))
    with pytest.raises(RestartsUsedUpError, match=counts_as):
        claim(store, limited, Restarts(limited.failure, "mine", is_rerun=True))
    other = claim(store, limited, Restarts(limited.failure, "a new one"))
    write_outcome(store, Outcome(other.number, "completed"))
    unlimited = job(store, **UNLIMITED)
    claim(store, unlimited, Restarts(unlimited.failure, "mine", is_rerun=True))
    rerun[0] = "failed-state"
    by_a_person = Restarts(limited.failure, "mine", is_rerun=True)
    assert claim(store, limited, by_a_person).owner.budget == "failed-state"
    for _ in range(3):
        earlier_attempt(store, kind, commits=commits, budget="failed-state")
    with pytest.raises(RestartsUsedUpError, match=counts_as):
        claim(store, limited, Restarts(limited.failure, "mine", is_rerun=True))


def test_a_retry_does_not_take_the_run_back_from_who_has_taken_it_over(store):
    claim_attempt(store, Owner.current(), world_size=1)
    restarts = Restarts(job(store).failure, "mine")
    assert [claim(store, job(store), restarts).number for _ in range(2)] == [2, 3]
    newer = claim_attempt(store, Owner.current(), world_size=1)
    with pytest.raises(RunBusyError, match="attempt 4"):
        claim(store, job(store), restarts)
    check_fence(store, claim_key(store, newer))


@pytest.mark.usefixtures("rerun")
@pytest.mark.parametrize("told_by", ["history", "the next attempt", "nothing"])
def test_a_killed_attempt_whose_checkpoints_retention_has_deleted_counts_as_a_preemption(store, told_by):
    for _ in range(2):
        killed = replace(Owner.current("mine", None), pid=1)
        claimed = claim_attempt(store, killed, world_size=1)
        checkpoint_id = new_id(claimed.number, 0)
        if told_by == "history":
            writer = HistoryWriter(store, claimed.number)
            writer.append(MetricRecord(claimed.number, 0, {}, checkpoint_id, "2026-11-21T00:00:00+00:00"))
            writer.flush()
        elif told_by == "the next attempt":
            record_resumed_from(store, claim_attempt(store, Owner.current("other"), world_size=1), store.path_of(checkpoint_id))
    seed = f"{store.path}-seed/checkpoints/{new_id(2, 0)}"  # that of another run says nothing of this one
    record_resumed_from(store, claim_attempt(store, Owner.current("other"), world_size=1), seed)
    limited = job(store, max_infrastructure_failures=1, max_preemptions=1)
    counts_as = "lost its processes" if told_by == "nothing" else "was terminated 2 times"
    with pytest.raises(RestartsUsedUpError, match=counts_as):
        claim(store, limited, Restarts(limited.failure, "mine", is_rerun=True))


def test_an_attempt_of_this_process_is_counted_once(store, rerun):
    """Such as one whose claim was stored though its answer was lost, and which has no outcome."""
    assert rerun == [None]
    claim_attempt(store, Owner.current("mine"), world_size=1)
    restarts = Restarts(job(store, max_infrastructure_failures=1).failure, "mine", is_rerun=True)
    assert restarts.count_failure("infrastructure")
    claim(store, job(store), restarts)
    assert not restarts.count_failure("infrastructure")


@pytest.mark.parametrize(
    ("error", "counts_as"),
    [
        (StorageError("no answer"), "infrastructure"),
        (httpx.ConnectError("Prefect's API is away"), "infrastructure"),
        (RunBusyError("alive elsewhere"), "final"),
        (CheckpointCorruptError("no whole checkpoint left"), "final"),
        (CheckpointNotFoundError("resume='must'"), "final"),
        (OSError(errno.ENOSPC, "No space left on device"), "user"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "user"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("can't start new thread"), "infrastructure"),
        (RuntimeError("x"), "final"),
        (ValueError("x"), "final"),
    ],
)
def test_what_a_leader_itself_meets_counts_where_it_may_pass(error, counts_as):
    assert counts_against(error) == counts_as


@pytest.mark.parametrize(
    ("kind", "counts_as"),
    [
        ("user", "user"),
        ("final", "final"),
        ("preemption", "preemption"),
        ("infrastructure", "infrastructure"),
        ("out_of_memory", "out_of_memory"),
        ("withdrawn", "user"),
        ("communication", "infrastructure"),
        ("peer", "infrastructure"),
    ],
)
def test_a_ranks_failure_counts_against_one_budget(kind, counts_as):
    assert counts_against(RankFailedError("x", 0, kind)) == counts_as


def test_a_ranks_failure_keeps_its_traceback_when_it_is_pickled():
    failed = RankFailedError(
        "rank 1 failed: ValueError: x", 1, "user", ValueError("x"), "Traceback (most recent call last): ..."
    )
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), copy.rank, copy.kind, copy.traceback) == (str(failed), 1, "user", failed.traceback)
    assert str(copy.original) == "x"
    assert not copy.was_killed
    assert pickle.loads(pickle.dumps(RankFailedError("x", 1, "infrastructure", was_killed=True))).was_killed
