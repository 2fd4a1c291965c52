"""Checkpoints evaluated after the fact, beside a living training: a real server, real ranks."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from forked_programs import Popen, started_as_usual
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Failed, Running, Scheduled, Suspended
from prefect.utilities.callables import parameter_schema
from prefect_servers import api_that_answers
from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_keys, newest_attempt, read_outcomes, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.flows import (
    CheckpointConfig,
    Hosts,
    NotEnoughMachinesError,
    RankFailedError,
    Result,
    ScalingConfig,
    evaluate,
)
from prefect_torch.flows.arguments import committed_checkpoint, find_named
from prefect_torch.flows.calls.cluster_runner import ClusterThreads
from prefect_torch.flows.evaluation import _MOST_LOOKS, _new_checkpoints, _unevaluated
from prefect_torch.tasks.rank.program.call import _as_metrics
from prefect_torch.tasks.training.liveness import is_being_trained
from prefect_torch.tasks.training.observers import Observers
from prefect_torch.tasks.training.retention_schedule import RetentionSchedule
from ranks import Attempt, folder

SUPPORT = Path(__file__).parents[1] / "support"
TWO = ScalingConfig(num_workers=2)
EPOCHS = 2
ID = "000001-00000000-0123abcd"
KEEPS_BEST = {"num_to_keep": 1, "checkpoint_score_attribute": "eval/accuracy", "evaluation_timeout_s": 3600}


@dataclass
class Watched:
    """A training, and what the evaluation that watched it returned."""

    storage: str
    store: CheckpointStore
    evaluated: dict
    attempt_files: list[str]
    told: dict


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    storage = str(tmp_path_factory.mktemp("watched") / "store")
    config = {"epochs": EPOCHS, "pause_s": 1}
    arguments = [storage, "trainings:train_epochs", *(json.dumps(it) for it in (config, {}, KEEPS_BEST))]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "PREFECT_API_URL": PREFECT_API_URL.value()}
    training = Popen(
        [sys.executable, str(SUPPORT / "run_training.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        store = CheckpointStore.open(storage, "run")
        while next(store.ids(), None) is None:
            assert training.poll() is None, training.communicate()[0]
        with started_as_usual():  # ranks that show what they import
            evaluated = evaluate("evaluations:measure", storage, "run", scaling=TWO, watch=True, poll_s=0.2)
        output, _ = training.communicate(timeout=60)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, output
    files = [info.key for info in store.storage.list("run/attempts/")]
    return Watched(storage, store, evaluated, files, json.loads(output.splitlines()[-1]))


def test_a_training_is_evaluated_to_its_end_and_notices_nothing(watched):
    store = watched.store
    assert watched.told == {"returned": {"begun": 0, "attempt": 1}, "resumed_from": None}
    assert len(watched.attempt_files) == 1
    assert [outcome.ending for outcome in read_outcomes(store)] == ["completed"]
    assert newest_attempt(store).settings["evaluation_timeout_s"] == 3600
    assert {int(checkpoint_id.split("-")[1]) for checkpoint_id in watched.evaluated} == set(range(EPOCHS))
    left = {manifest.step: manifest for manifest in store.list()}
    assert all(manifest.evaluations == ("eval",) for manifest in left.values())
    assert store.best(1, "eval/accuracy")[0].step == 0
    assert left[0].metrics == {
        "epoch": 0,
        "loss": 1.0,
        "eval": {"accuracy": 1.0, "ranks": 2.0, "place": "run/1/2", "reported": "epoch, loss", "prefect": False},
    }
    assert [record.metrics["epoch"] for record in Result.from_storage(watched.storage, "run").history] == list(range(EPOCHS))


def test_the_cluster_of_the_task_runner_has_the_ranks_and_is_waited_for_once(tmp_path, caplog):
    storage = fill(tmp_path, [0, 1]).spec.url
    nowhere = ClusterThreads(Hosts(["nowhere"], command="false", leader_address="127.0.0.1", wait_s=0))
    with pytest.raises(NotEnoughMachinesError, match="nowhere: its command ended with 1"):
        evaluate.with_options(task_runner=nowhere)("evaluations:measure", storage, "run")
    assert "could not be evaluated" not in caplog.text


def test_a_failure_and_a_pruned_checkpoint_do_not_keep_the_others_from_being_evaluated(tmp_path, caplog):
    store = fill(tmp_path, [0, 1, 2])
    first, second, third = store.ids()
    checkpoint, *others = (store.checkpoint(store.get(it)) for it in (third, second, first))
    given = [others[1].path, Path(others[0].path), checkpoint]  # a path, as an automation gives it: nothing besides
    with pytest.raises(RuntimeError, match=r"report\(\) was called inside an evaluation.* return the metrics") as caught:
        evaluate("evaluations:measure", checkpoints=given, config={"0": "prune", "1": "report"})
    assert f"rank 0 of the evaluation of {second} failed" in str(caught.value.__cause__)
    (logged,) = (it for it in caplog.messages if it.startswith(f"rank 0 of the evaluation of {second} failed:\n"))
    assert re.search(r"^Traceback.*\n  File .*evaluations\.py", logged, re.MULTILINE)
    errors = [it.getMessage() for it in caplog.records if it.levelno == logging.ERROR]
    assert errors[0] == logged
    assert [it.partition("(")[0] for it in errors[1:]] == ["Finished in state Failed"], "that of the flow run"
    assert f"checkpoint {second} could not be evaluated: {caught.value!r}" in caplog.messages
    assert f"checkpoint {first} of run 'run' is skipped: it does not exist, or was pruned" in caplog.text
    assert [(manifest.id, manifest.evaluations) for manifest in store.list()] == [(second, ()), (third, ("eval",))]
    assert not [info.key for info in store.storage.list("run/") if first in info.key]


def test_an_evaluation_that_watches_waits_for_a_storage_that_is_away(tmp_path, monkeypatch, caplog):
    store, is_away, pauses = fill(tmp_path, [0]), [], []

    def read(*given):
        if is_away:
            raise StorageError("the bucket does not answer")
        return read_manifests(*given)

    def pause():
        pauses.append(0)
        if len(pauses) == 1:
            fill(tmp_path, [1])
            is_away.append(True)
        elif len(pauses) == _MOST_LOOKS + 2:
            is_away.clear()

    monkeypatch.setattr("prefect_torch.flows.evaluation.read_manifests", read)
    monkeypatch.setattr("prefect_torch.flows.evaluation.is_being_trained", lambda _: len(pauses) <= _MOST_LOOKS + 2)
    assert [it.checkpoint_id for it in _new_checkpoints(store, "eval", pause)] == sorted(store.ids())
    assert caplog.text.count("the bucket does not answer; new checkpoints are looked for again once it answers") == 1
    is_away.append(True)
    with pytest.raises(StorageError, match="the bucket does not answer"):  # at the first look, which nobody has to wait for
        next(_new_checkpoints(store, "eval", pause))


def test_the_last_checkpoint_of_a_training_that_ends_during_a_look_is_evaluated(tmp_path, monkeypatch):
    store, looks = CheckpointStore.open(tmp_path / "store", "run"), []

    def is_being_trained(_):
        if not looks:
            fill(tmp_path, [0])
        looks.append(None)
        return False

    monkeypatch.setattr("prefect_torch.flows.evaluation.is_being_trained", is_being_trained)
    assert len([*_new_checkpoints(store, "eval", lambda: None)]) == 1


def test_the_error_of_a_rank_is_told_also_while_the_storage_is_away(tmp_path, monkeypatch, caplog):
    store = fill(tmp_path, [0])

    def no_answer(*_):
        raise StorageError("the bucket does not answer")

    def fail(*_):
        monkeypatch.setattr(CheckpointStore, "committed", no_answer)
        raise RankFailedError("rank 0 failed: ValueError: boom", 0, "user", ValueError("boom"), "Traceback of the rank")

    monkeypatch.setattr("prefect_torch.tasks.evaluation_task._run", fail)
    with pytest.raises(ValueError, match="boom"):
        evaluate("evaluations:measure", store.spec.url, "run")
    assert "Traceback of the rank" in caplog.text


def test_a_checkpoint_of_no_run_is_an_error_beside_those_that_are_evaluated(tmp_path):
    """It was skipped as one that was pruned, and the flow run completed without an evaluation."""
    store = fill(tmp_path, [0])
    (known,) = store.ids()
    with pytest.raises(FileNotFoundError, match=f"there is no run 'nosuch' in .*{tmp_path}"):
        evaluate("evaluations:measure", store.spec.url, checkpoints=[f"nosuch/{known}", f"run/{known}"])
    assert store.get(known).evaluations == ("eval",)


def fill(tmp_path, epochs) -> CheckpointStore:
    """Leave a run behind as a training does that was not evaluated."""
    store = CheckpointStore.open(str(tmp_path / "store"), "run")
    session = Attempt(store).session()
    for epoch in epochs:
        session.report({"epoch": epoch}, folder(tmp_path / "c", **{"state.json": json.dumps({"epoch": epoch})}))
    return store


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "m:f returned a NoneType on rank 0: return a dict"),
        ([1], "returned a list"),
        ({"a": [1]}, "metric 'a' is of type list"),
    ],
)
def test_what_cannot_be_attached_is_refused_in_the_rank_that_returned_it(returned, told):
    spec = SimpleNamespace(function=SimpleNamespace(name="m:f"))
    with pytest.raises((TypeError, ValueError), match=told):
        _as_metrics(returned, spec)


def test_the_list_of_runs_says_what_was_evaluated_and_how_it_ended(tmp_path):
    fill(tmp_path, [0, 1])
    for _ in range(2):
        evaluate("evaluations:measure", str(tmp_path / "store"), "run", name="test")
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=2)
    assert [it.state.message for it in newest] == ["0 checkpoints", "2 checkpoints, accuracy 0.9 of the last"]
    assert all(it.name.startswith("run-test-") for it in newest)


@pytest.mark.parametrize("given", [{"run": "caf\udce9"}, {"run": "run", "name": "caf\udce9"}])
def test_a_name_that_is_no_text_is_refused_as_any_other(tmp_path, given):
    with pytest.raises(ValueError, match=r"name 'caf\\udce9'"):
        evaluate("evaluations:measure", str(tmp_path / "store"), **given)


def test_what_was_evaluated_is_not_evaluated_again_unasked(tmp_path):
    store = fill(tmp_path, [0])
    store.attach_metrics(next(store.ids()), {"accuracy": 1})
    assert evaluate("evaluations:measure", str(tmp_path / "store"), "run") == {}


def test_the_leader_of_a_training_drops_what_was_evaluated_meanwhile_and_waits_for_the_rest(tmp_path, caplog):
    store = fill(tmp_path, [0, 1, 2, 3])
    first, second, *others = manifests = store.list()
    policy = CheckpointConfig(**KEEPS_BEST).policy()

    @flow
    def training():
        job = SimpleNamespace(store=store, run="run", policy=policy)
        retention = RetentionSchedule(job, *claim_keys(store), manifests[:3], None, Observers([]), ManifestMemory())
        newest = manifests[3]
        retention.committed(CommitEvent(newest.id, newest.step, newest.metrics, newest.total_bytes, 0.0))
        retention.finish(manifests[3].id)
        assert store.list() == manifests
        store.attach_metrics(first.id, {"accuracy": 0.1})
        store.attach_metrics(second.id, {"accuracy": 0.9})
        retention.finish(manifests[3].id)

    training()
    assert [manifest.id for manifest in store.list()] == [second.id, *(manifest.id for manifest in others)]
    assert "has no metric" not in caplog.text


def test_the_name_of_a_reported_metric_is_refused_before_any_rank_starts(tmp_path):
    fill(tmp_path, [0])
    with pytest.raises(ValueError, match="the training reported a metric 'epoch'"):
        evaluate("evaluations:measure", str(tmp_path / "store"), "run", name="epoch")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"eval_fn": "evaluations:nosuch"}, "eval_fn 'evaluations:nosuch'"),
        ({"run": "nosuch"}, "there is no run 'nosuch'"),
        ({"run": "searched"}, "run 'searched' in .* is a sweep: give one of its trials"),
        ({"run": None}, "give run"),
        ({"name": "a/b"}, "evaluation name"),
        ({"checkpoints": "nosuch"}, "give a committed checkpoint's id"),
        ({"checkpoints": [ID], "run": None}, "give its run"),
        ({"checkpoints": [ID], "watch": True}, "not both"),
        ({"scaling": ScalingConfig(num_workers=99, use_gpu=True)}, "needs 99 GPUs, and this machine has"),
    ],
)
def test_what_cannot_be_evaluated_is_said_at_once(tmp_path, wrong, told):
    fill(tmp_path, [])
    sweep = CheckpointStore.open(tmp_path / "store", "searched")
    claim_attempt(sweep, Owner.current(), world_size=0)
    sweep.records.put_json(sweep.layout.sweep, {})
    given = {"eval_fn": "evaluations:measure", "storage": str(tmp_path / "store"), "run": "run", **wrong}
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        evaluate(**given)


def test_the_form_asks_for_the_function_alone_and_takes_what_an_automation_knows():
    schema = parameter_schema(evaluate)
    assert schema.required == ["eval_fn"]
    assert all({"title", "description"} <= field.keys() for field in schema.properties.values())
    url = f"s3://bucket/run/checkpoints/{ID}"
    given = evaluate.validate_parameters({"eval_fn": "m:f", "run": "", "checkpoints": url, "config": {}, "scaling": {}})
    assert (given["run"], given["checkpoints"]) == (None, url)


@pytest.mark.parametrize(
    ("checkpoint", "url", "run"),
    [
        (ID, "s3://bucket/base", "run"),
        (f"other/{ID}", "s3://bucket/base", "other"),
        (f"s3://bucket/base/other/checkpoints/{ID}", "s3://bucket/base", "other"),
        (f"s3://elsewhere/other/checkpoints/{ID}/", "s3://elsewhere", "other"),
        (f"/folder/other/checkpoints/{ID}", "/folder", "other"),
        (f"~/folder/other/checkpoints/{ID}", str(Path.home() / "folder"), "other"),
    ],
)
def test_a_checkpoint_is_named_by_id_or_place_and_read_with_the_credentials_of_its_storage(checkpoint, url, run):
    storage = StorageSpec("s3://bucket/base", {"aws_access_key_id": "mine"}, RetryPolicy(deadline_s=7))
    found = find_named(checkpoint, storage, "run")
    assert (found.storage.url, found.run, found.checkpoint_id, found.storage.retry.deadline_s) == (url, run, ID, 7)
    assert (found.storage.options == storage.options) == (url == storage.url)


def test_a_checkpoint_is_named_by_a_url_that_only_the_storages_login_can_open(monkeypatch):
    """A URL of Azure does not name the account, which only the block of the storage has."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    storage = StorageSpec("az://container/base", {"azure_storage_account_name": "mine"})
    assert find_named(f"az://container/base/other/checkpoints/{ID}", storage).storage is storage


def test_a_checkpoint_that_could_not_be_read_is_looked_at_again_for_a_while(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path / "store", "run")
    attempt = Attempt(store)
    for step in range(2):
        attempt.session().report({}, folder(tmp_path / "c", m=str(step)), step=step)
    first, second = store.ids()
    refused, looks = [], {}

    def once(run, listed):
        return [it for it in read_manifests(run, listed) if it.id not in refused]

    monkeypatch.setattr("prefect_torch.flows.evaluation.read_manifests", once)
    refused.append(second)
    assert [it.checkpoint_id for it in _unevaluated(store, "eval", looks)] == [first]
    refused.clear()
    assert [it.checkpoint_id for it in _unevaluated(store, "eval", looks)] == [second]
    assert _unevaluated(store, "eval", looks) == []
    refused.append(first)
    never = {}
    assert [[it.checkpoint_id for it in _unevaluated(store, "eval", never)] for _ in range(5)] == [[second], [], [], [], []]
    refused.clear()
    assert _unevaluated(store, "eval", never) == [], "a damaged one is not read for ever"


@pytest.mark.parametrize("given", [str, Checkpoint])
def test_a_directory_that_is_no_checkpoint_of_a_run_such_as_one_of_rays_is_read_in_the_function(tmp_path, given):
    written = "give a committed checkpoint.*; of other files, give the directory in the config, and read Checkpoint"
    with pytest.raises(ValueError, match=written):
        committed_checkpoint(given(str(tmp_path)), StorageSpec("s3://bucket/base"))


HERE_AND_ALIVE = Owner.current()
DEAD = replace(HERE_AND_ALIVE, pid=2**22 + 1)
ELSEWHERE = replace(HERE_AND_ALIVE, host="another/machine", flow_run_id=str(uuid4()))


@pytest.mark.parametrize(
    ("owner", "ending", "goes_on"),
    [
        (HERE_AND_ALIVE, None, True),
        (HERE_AND_ALIVE, "completed", False),
        (HERE_AND_ALIVE, "failed", False),  # outside of a flow run, nobody starts the next attempt
        (DEAD, None, False),
        (ELSEWHERE, None, True),
        (ELSEWHERE, "failed", False),
        (ELSEWHERE, "completed", False),
    ],
)
def test_a_run_is_watched_for_as_long_as_somebody_may_train_it(tmp_path, owner, ending, goes_on):
    store = CheckpointStore.open(tmp_path, "run")
    assert not is_being_trained(store)
    attempt = claim_attempt(store, owner, world_size=1)
    if ending is not None:
        write_outcome(store, Outcome(attempt.number, ending))
    assert is_being_trained(store) == goes_on


@pytest.mark.parametrize("ending", [None, "failed"])
def test_a_run_that_failed_is_watched_until_its_flow_run_ends(tmp_path, ending):
    """Its retry may wait; Prefect alone knows."""
    store = CheckpointStore.open(tmp_path, "run")

    @flow
    def training():
        owner = replace(ELSEWHERE, flow_run_id=flow_run.id)
        attempt = claim_attempt(store, owner, world_size=1)
        if ending is not None:
            write_outcome(store, Outcome(attempt.number, ending))
        return is_being_trained(store)

    assert training() is True
    assert is_being_trained(store) is False


@pytest.mark.parametrize(
    ("error", "state", "goes_on"),
    [
        ("suspended", Suspended(), True),
        ("suspended", Scheduled(name="Resuming"), True),
        ("suspended", Running(), True),  # resumed, with another process that has not claimed the run yet
        ("suspended", Failed(), False),
        (None, Scheduled(name="AwaitingRetry"), True),
        (None, Running(), False),
    ],
)
def test_a_run_whose_process_is_gone_is_watched_while_its_flow_run_may_begin_again(tmp_path, error, state, goes_on):
    """An evaluation beside a training ended when somebody paused that, and left out the checkpoints after the resume."""
    store, begun = CheckpointStore.open(tmp_path, "run"), []

    @flow
    def training():
        begun.append(flow_run.id)

    training()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(begun[0]), state, force=True)
    attempt = claim_attempt(store, replace(DEAD, flow_run_id=begun[0]), world_size=1)
    if error is not None:
        write_outcome(store, Outcome(attempt.number, "preempted", begun[0], error=error))
    assert is_being_trained(store) is goes_on


@pytest.mark.parametrize(("status", "goes_on"), [(401, False), (404, False), (500, True)])
def test_a_run_of_which_prefect_tells_nothing_is_over_with_its_newest_attempt_unless_prefect_is_away(
    tmp_path, caplog, monkeypatch, status, goes_on
):
    """A key may have expired: who watches would otherwise wait for ever."""
    store = CheckpointStore.open(tmp_path, "run")
    attempt = claim_attempt(store, ELSEWHERE, world_size=1)
    monkeypatch.setattr("prefect_torch.tasks.training.liveness.get_run_logger", logging.getLogger)  # a flow has its own API
    with api_that_answers(status):
        assert is_being_trained(store) is True
        write_outcome(store, Outcome(attempt.number, "failed"))
        assert is_being_trained(store) is goes_on
    with api_that_answers(200, b"<html>under maintenance</html>"):
        assert is_being_trained(store) is True
    said = [record.getMessage() for record in caplog.records if "does not tell whether" in record.getMessage()]
    assert [ELSEWHERE.flow_run_id in it and "401" in it for it in said] == [True] * (status == 401)
