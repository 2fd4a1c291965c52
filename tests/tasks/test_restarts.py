"""Budgets are counted in storage: they outlive the process that leads."""

import httpx
import pytest
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, RunBusyError, StorageError
from prefect_torch.ckpt.attempts import Outcome, Owner, claim_attempt, write_outcome
from prefect_torch.ckpt.session import ReportSettings
from prefect_torch.tasks.attempt import claim
from prefect_torch.tasks.errors import PreemptedTooOftenError, RankFailedError
from prefect_torch.tasks.function import pack_function
from prefect_torch.tasks.job import TrainJob
from prefect_torch.tasks.restarts import failure_kind, may_restart


@pytest.fixture
def store(tmp_path):
    return CheckpointStore.open(tmp_path, "run")


def job(store, **budgets):
    return TrainJob(
        function=pack_function("json:loads", None),
        storage=store.spec,
        run=store.run,
        num_workers=1,
        use_gpu=False,
        backend=None,
        policy=RetentionPolicy(),
        resume="auto",
        verify="digest",
        takeover=True,
        seed=None,
        reports=ReportSettings(),
        grace_s=0,
        hang_timeout_s=None,
        **{"max_failures": 0, "max_infrastructure_failures": 0, "max_preemptions": 0, **budgets},
    )


def attempt(store, kind, flow_run_id="mine"):
    """Let an attempt end by `kind`, or, for None, by a SIGKILL that leaves no outcome."""
    claimed = claim_attempt(store, Owner.current(flow_run_id), world_size=1)
    if kind is not None:
        write_outcome(store, Outcome(claimed.number, "failed", flow_run_id, kind))


BUDGETS = {"user": "max_failures", "infrastructure": "max_infrastructure_failures", "preemption": "max_preemptions"}


@pytest.mark.parametrize("kind", BUDGETS)
def test_each_kind_of_failure_has_a_budget_of_its_own(store, kind):
    for other in BUDGETS:
        if other != kind:
            attempt(store, other)
    for used in range(1, 4):
        attempt(store, kind)
        assert may_restart(store, job(store, **{BUDGETS[kind]: 2}), "mine", kind) is (used <= 2)
    assert may_restart(store, job(store, **{BUDGETS[kind]: -1}), "mine", kind)


def test_another_flow_runs_failures_do_not_count(store):
    attempt(store, "user", "another")
    attempt(store, "user")
    assert may_restart(store, job(store, max_failures=1), "mine", "user")


def test_what_is_final_is_never_tried_again(store):
    attempt(store, "final")
    assert not may_restart(
        store, job(store, max_failures=-1, max_infrastructure_failures=-1, max_preemptions=-1), "mine", "final"
    )


@pytest.mark.parametrize("kind", ["preemption", None])
def test_a_flow_run_that_was_ended_too_often_is_refused_when_it_is_started_again(store, kind):
    for _ in range(2):
        claim(store, job(store, max_preemptions=2), "mine")
        if kind is not None:
            write_outcome(store, Outcome(1, "preempted", "mine", "preemption"))
    attempt(store, kind)
    with pytest.raises(PreemptedTooOftenError, match="ended from outside 3 times, with max_preemptions=2"):
        claim(store, job(store, max_preemptions=2), "mine")
    claim(store, job(store, max_preemptions=2), "a new one")
    claim(store, job(store, max_preemptions=-1), "mine")


@pytest.mark.parametrize(
    ("error", "counts_as"),
    [
        (StorageError("no answer"), "infrastructure"),
        (httpx.ConnectError("Prefect's API is away"), "infrastructure"),
        (RunBusyError("alive elsewhere"), "final"),
        (ValueError("x"), "final"),
    ],
)
def test_what_a_leader_itself_meets_counts_where_it_may_pass(error, counts_as):
    assert failure_kind(error) == counts_as


@pytest.mark.parametrize(
    ("kind", "counts_as"),
    [
        ("user", "user"),
        ("final", "final"),
        ("preemption", "preemption"),
        ("infrastructure", "infrastructure"),
        ("communication", "infrastructure"),
        ("peer", "infrastructure"),
    ],
)
def test_a_ranks_failure_counts_against_one_budget(kind, counts_as):
    assert failure_kind(RankFailedError("x", 0, kind)) == counts_as


def test_a_ranks_failure_is_one_line_where_it_is_logged_and_all_of_its_text_where_it_is_raised():
    failed = RankFailedError("rank 1 failed: ValueError: x\n\nTraceback (most recent call last): ...", 1, "user")
    assert repr(failed) == "RankFailedError('rank 1 failed: ValueError: x')"
    assert "Traceback" in str(failed)
