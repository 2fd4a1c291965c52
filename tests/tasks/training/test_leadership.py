"""Who may lead a run after whom."""

from dataclasses import replace

import pytest
from commits import commit
from prefect.logging import disable_run_logger
from prefect.states import AwaitingRetry, Crashed, Pending, Running, Scheduled, Suspended
from prefect_torch.ckpt import CheckpointStore, FencedError, RetentionPolicy, RunBusyError, StorageSpec
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, list_attempts, write_outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner, SlurmStart
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.tasks import RunConfig, SyncConfig
from prefect_torch.tasks.gang.termination import TerminatedError
from prefect_torch.tasks.prefect_api.flow_run import has_flow_run_ended
from prefect_torch.tasks.training import leadership, liveness
from prefect_torch.tasks.training.leadership import Claimant, claim_run
from prunes import prune_as_leader

HERE = Owner.current("0b1c2d3e-0000-4000-8000-000000000001")
OTHER = "0b1c2d3e-0000-4000-8000-000000000002"
ELSEWHERE = replace(HERE, host="elsewhere/boot")


@pytest.fixture(params=[1, 0], ids=["training", "sweep"])
def lead(store, request):
    def lead(owner, *, takeover=False, restarted=()):
        config = RunConfig(storage=store.storage.url, takeover=takeover)
        with disable_run_logger():
            return claim_run(store, Claimant(owner, config, tuple(restarted), request.param), lambda: None)[0]

    return lead


@pytest.mark.parametrize("takeover", [False, True])
def test_a_process_that_a_later_one_of_its_flow_run_has_overtaken_does_not_take_the_run_back(lead, takeover):
    """As a machine that was suspended does, whose flow run was run again elsewhere."""
    lead(HERE, takeover=takeover)
    assert lead(HERE, takeover=takeover).number == 2, "its own retry"
    assert lead(ELSEWHERE, takeover=takeover).number == 3
    with pytest.raises(FencedError, match=rf"another process of this flow run, {HERE.pid} on elsewhere, leads run 'run'"):
        lead(HERE, takeover=takeover)
    assert lead(ELSEWHERE, takeover=takeover).number == 4


def test_a_restart_does_not_take_back_what_was_taken_over_from_the_flow_run_that_it_restarts(lead, monkeypatch):
    monkeypatch.setattr(liveness, "has_flow_run_ended", lambda flow_run_id: False)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    first, taker, restart = (replace(ELSEWHERE, flow_run_id=f"0b1c2d3e-0000-4000-8000-00000000000{n}") for n in (4, 5, 6))
    lead(first, takeover=True)
    assert lead(restart, takeover=True, restarted=[first.flow_run_id]).number == 2, "it was only interrupted"
    assert lead(taker, takeover=True).number == 3
    with pytest.raises(RunBusyError, match=f"by flow run {taker.flow_run_id}"):
        lead(restart, takeover=True, restarted=[first.flow_run_id])
    fresh = replace(restart, flow_run_id="0b1c2d3e-0000-4000-8000-000000000007")
    with pytest.raises(RunBusyError):
        lead(fresh, takeover=True, restarted=[restart.flow_run_id, first.flow_run_id])
    assert lead(fresh, takeover=True).number == 4


@pytest.mark.parametrize(
    ("ending", "kind", "has_ended", "is_led"),
    [
        ("failed", "user", False, True),
        ("preempted", None, False, True),
        ("failed", "user", True, False),
        ("failed", "user", None, False),
        ("failed", "final", False, False),
        ("completed", None, False, False),
        ("cancelled", None, False, False),
    ],
)
def test_between_two_attempts_a_run_is_its_flow_runs(store, lead, monkeypatch, ending, kind, has_ended, is_led):
    monkeypatch.setattr(liveness, "has_flow_run_ended", lambda flow_run_id: has_ended)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    lead(ELSEWHERE)
    write_outcome(store, Outcome(1, ending, ELSEWHERE.flow_run_id, kind))
    if is_led:
        with pytest.raises(RunBusyError, match=r"is (being trained|led) by flow run"):
            lead(replace(HERE, flow_run_id=OTHER))
        assert lead(replace(HERE, flow_run_id=OTHER), takeover=True).number == 2
    else:
        assert lead(replace(HERE, flow_run_id=OTHER)).number == 2


def test_who_leads_a_run_is_named_without_what_a_terminal_would_obey(lead, monkeypatch):
    """A claim is of anybody who can write to the storage."""
    monkeypatch.setattr(liveness, "has_flow_run_ended", lambda flow_run_id: False)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    lead(replace(HERE, host="a\x1b[2J\rb/boot", flow_run_id="c\x1b[1A"))
    with pytest.raises(RunBusyError, match=r"flow run c \[1A \(process \d+ on a \[2J b, attempt 1") as caught:
        lead(replace(HERE, flow_run_id=OTHER))
    assert str(caught.value).isprintable()


def test_a_requeued_slurm_job_goes_on_with_the_run_of_its_earlier_start(lead, monkeypatch):
    """As after the failure of its machine: nobody was left to tell the end of that flow run, which stays Running."""
    monkeypatch.setattr(liveness, "has_flow_run_ended", lambda flow_run_id: False)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    lead(replace(ELSEWHERE, slurm_start=SlurmStart("main/7", 0)))
    for name, value in {"CLUSTER_NAME": "main", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    with pytest.raises(RunBusyError):
        lead(Owner.current(OTHER))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert lead(Owner.current(OTHER)).number == 2


@pytest.mark.parametrize(
    ("ending", "state", "is_led"),
    [
        ("preempted", Suspended(), True),
        ("preempted", Scheduled(name="Resuming"), True),
        ("preempted", Scheduled(name="Yielded"), True),
        ("preempted", Pending(), True),
        ("preempted", Running(), False),
        ("preempted", Crashed(), False),
        ("preempted", None, False),
        ("failed", AwaitingRetry(), False),  # in the process that is gone
    ],
)
def test_a_flow_run_that_has_left_its_machine_keeps_its_run_there_too(store, lead, monkeypatch, ending, state, is_led):
    monkeypatch.setattr(liveness, "read_state", lambda flow_run_id: state)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    gone = replace(HERE, started=0)
    lead(gone)
    write_outcome(store, Outcome(1, ending, gone.flow_run_id, "user" if ending == "failed" else None))
    if is_led:
        with pytest.raises(RunBusyError, match=r"is (being trained|led) by flow run"):
            lead(replace(HERE, flow_run_id=OTHER))
        assert lead(replace(HERE, flow_run_id=gone.flow_run_id)).number == 2
    else:
        assert lead(replace(HERE, flow_run_id=OTHER)).number == 2


def test_a_flow_run_id_that_is_not_of_prefect_is_of_no_flow_run_that_it_knows(store):
    assert has_flow_run_ended("x") is None


@pytest.fixture
def machines(tmp_path):
    """A run on two machines, with directories of their own that are copied to one place."""
    copy = "cp -a --no-target-directory {source} {target}"
    options = SyncConfig(upload=copy, download=copy, target=str(tmp_path / "there")).transport().options()
    specs = [StorageSpec(str(tmp_path / name), options, RetryPolicy(0, 0, 0)) for name in ("here", "elsewhere")]
    return [CheckpointStore.open(spec, "run") for spec in specs]


def lead_alone(store, owner):
    claimant = Claimant(owner, RunConfig(storage=store.storage.url), (), 1, is_alone=True)
    with disable_run_logger():
        return claim_run(store, claimant, lambda: None)[0]


def test_a_termination_while_a_run_is_downloaded_to_be_claimed_ends_that_and_claims_nothing(tmp_path):
    sync = SyncConfig(
        upload="true {source} {target}", download="sh -c 'sleep 1000' {source} {target}", target=str(tmp_path / "x")
    )
    store = CheckpointStore.open(StorageSpec(str(tmp_path / "here"), sync.transport().options()), "run")
    claimant = Claimant(HERE, RunConfig(storage=store.storage.url), ())
    asked = []

    def raise_if_requested():
        asked.append(None)
        if len(asked) == 4:
            raise TerminatedError

    with disable_run_logger(), pytest.raises(TerminatedError):
        claim_run(store, claimant, lambda: pytest.fail("it goes on"), raise_if_requested)
    assert list(list_attempts(store)) == []


def test_a_restart_brings_nothing_back_that_was_deleted_on_its_machine_of_a_synced_run(machines):
    """A hundred pruned checkpoints would not fit on a disk for some, nor be copied within a call's time."""
    store, _ = machines
    lead_alone(store, HERE)
    manifests = [commit(store, step) for step in range(4)]
    store.pin(manifests[0].id)
    store.unpin(manifests[0].id)
    prune_as_leader(store, RetentionPolicy(1))
    left = keys(store)
    assert [lead_alone(store, HERE).number for _ in range(2)] == [2, 3]
    assert {key for key in keys(store) - left if not key.startswith(store.layout.attempts)} == set()
    assert store.pinned() == frozenset()
    assert store.list() == manifests[-1:]


def keys(store):
    return {info.key for info in store.storage.list("run/")}


def test_a_restart_has_all_that_another_machine_has_stored_of_a_synced_run_since(machines, monkeypatch):
    store, elsewhere = machines
    monkeypatch.setattr(liveness, "has_flow_run_ended", lambda flow_run_id: True)
    lead_alone(store, HERE)
    assert lead_alone(elsewhere, replace(ELSEWHERE, flow_run_id=OTHER)).number == 2
    manifest = commit(elsewhere, 5, attempt=2)
    assert lead_alone(store, HERE).number == 3
    assert store.latest() == manifest
    store.verify(manifest, "size")
