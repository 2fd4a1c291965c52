"""Retention over a whole storage, and the deployments of prefect.yaml, on a real server."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from forked_programs import run_program
from memory_storage import MemoryStorage
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, UnsupportedFormatError
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import CheckpointConfig, prune, pruning
from prefect_torch.tasks import prune_checkpoints
from ranks import Attempt, folder
from waiting_storage import WaitingStorage

ROOT = Path(__file__).parents[2]
KEEPS_ONE = {"num_to_keep": 1}


def fill(storage, run, tmp_path, scores, settings=KEEPS_ONE, *, is_trained=False):
    store = CheckpointStore.open(storage, run)
    attempt = Attempt(store)
    session = attempt.session()
    for score in scores:
        session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
    write_outcome(store, Outcome(attempt.number, "completed"))
    claimed = claim_attempt(store, Owner.current(), world_size=1, settings=settings)
    if not is_trained:
        write_outcome(store, Outcome(claimed.number, "completed"))
    return store, claimed


def scores(store):
    return [manifest.metrics["score"] for manifest in store.list()]


@pytest.mark.parametrize("place", ["local", "memory"])
def test_runs_are_found_among_whatever_else_lies_there(tmp_path, place):
    storage = str(tmp_path / "store") if place == "local" else f"memory://{tmp_path}"
    for run in ["b", "a-1", "a", "a0"]:
        store, _ = fill(storage, run, tmp_path, [1])
    store.storage.put_bytes("not-a-run/file", b"")
    store.storage.put_bytes("file", b"")
    store.storage.put_bytes("~odd name/run.json", b"{}")
    assert sorted(list_runs(storage)) == ["a", "a-1", "a0", "b"]


def test_a_run_that_is_denied_keeps_no_other_from_being_pruned(tmp_path, caplog, monkeypatch):
    class Denied(LocalStorage):
        def size(self, key):
            if key == "b/run.json":
                raise PermissionError(errno.EACCES, "denied", key)
            return super().size(key)

    storage = str(tmp_path / "store")
    for run in ["a", "b", "c"]:
        fill(storage, run, tmp_path, [1, 2])
    assert list(list_runs(Denied(Path(storage)))) == ["a", "c"]
    assert [record.getMessage() for record in caplog.records] == ["left out: [Errno 13] denied: 'b/run.json'"]

    def denied(store):
        if store.run == "b":
            raise PermissionError(errno.EACCES, "denied", store.path)
        return read_status(store)

    monkeypatch.setattr("prefect_torch.flows.pruning.read_status", denied)
    monkeypatch.setattr("prefect_torch.flows.monitoring.pages.runs_page.read_status", denied)
    with pytest.raises(PermissionError, match="denied"):
        prune(storage)
    assert [scores(CheckpointStore.open(storage, run)) for run in ["a", "b", "c"]] == [[2], [1, 2], [2]]


def test_the_policies_of_many_runs_are_read_at_the_same_time():
    """They were read one after the other: ten minutes for ten thousand runs before the first prune."""
    inner = MemoryStorage()
    names = [f"run-{number:02}" for number in range(20)]
    for name in names:
        claim_attempt(CheckpointStore.open(inner, name), Owner.current(), world_size=1, settings=KEEPS_ONE)
    storage = WaitingStorage(inner, "attempts")
    policies, refused = pruning._read_policies(storage, names, must_exist=False)
    assert (list(policies), refused) == (names, [])
    assert storage.most["attempts"] >= 4


def test_each_run_is_pruned_by_its_own_policy(tmp_path, opened):
    storage = str(tmp_path / "store")
    one, _ = fill(storage, "one", tmp_path, [1, 2, 3])
    best, _ = fill(storage, "best", tmp_path, [3, 2, 1], {**KEEPS_ONE, "checkpoint_score_attribute": "score"})
    everything, _ = fill(storage, "everything", tmp_path, [1, 2], {})
    expected = {"one": [manifest.id for manifest in one.list()[:2]], "best": [best.list()[1].id], "everything": []}
    opened.clear()
    assert prune(storage, dry_run=True) == expected
    assert opened == [storage] * 2, "for all runs, and for their page"
    assert scores(one) == [1, 2, 3]
    assert prune(storage) == expected
    assert (scores(one), scores(best), scores(everything)) == ([3], [3, 1], [1, 2])
    assert prune(storage, ["everything"], CheckpointConfig(num_to_keep=1))["everything"] != []
    assert scores(everything) == [2]


def test_what_a_given_policy_does_not_say_of_evaluations_and_damaged_checkpoints_is_the_runs_own(tmp_path):
    storage, by_accuracy = str(tmp_path / "store"), {"num_to_keep": 1, "checkpoint_score_attribute": "eval/accuracy"}
    own = {**by_accuracy, "evaluation_timeout_s": 3600, "keep_quarantined_days": 0}
    store, _ = fill(storage, "run", tmp_path, [1, 2, 3, 4], own)
    damaged, _, rated, _ = store.list()
    quarantine(store, damaged.id, "a bit flipped")
    store.attach_metrics(rated.id, {"accuracy": 1})
    prune(storage, checkpoint=CheckpointConfig(**by_accuracy, keep_quarantined_days=7))
    assert any(store.storage.list(store.layout.data(damaged.id)))
    prune(storage, checkpoint=CheckpointConfig(**by_accuracy))
    assert scores(store) == [2, 3, 4]
    assert not any(store.storage.list(store.layout.data(damaged.id)))
    prune(storage, checkpoint=CheckpointConfig(**by_accuracy, evaluation_timeout_s=None))
    assert scores(store) == [3, 4]
    prune(storage, checkpoint=CheckpointConfig(num_to_keep=1))
    assert scores(store) == [4]


def test_many_runs_are_pruned_by_a_few_threads_or_as_many_as_are_given():
    """Each run had a thread, a thousand at once, whatever number was given."""
    assert prune.task_runner._max_workers == 8
    assert prune.with_options(task_runner=ThreadPoolTaskRunner(max_workers=2)).task_runner._max_workers == 2


def test_a_prune_outlasts_an_outage_as_a_training_does(tmp_path, monkeypatch):
    retries = []
    monkeypatch.setattr(pruning, "list_runs", lambda _: retries.append(PREFECT_CLIENT_MAX_RETRIES.value()) or [])
    assert prune(tmp_path) == {}
    assert retries == [7]


def test_a_metric_that_no_checkpoint_of_a_run_has_deletes_nothing_of_it(tmp_path):
    storage = str(tmp_path / "store")
    lacks, _ = fill(storage, "lacks", tmp_path, [3, 2, 1], {})
    one, _ = fill(storage, "one", tmp_path, [1])
    awaits, _ = fill(storage, "awaits", tmp_path, [3, 2, 1], {**KEEPS_ONE, "checkpoint_score_attribute": "eval/accuracy"})
    misspelled = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="scor")
    said = "no checkpoint of run 'lacks' has a number as the metric 'scor'; they have score"
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=said):
            prune(storage, ["one", "lacks"], misspelled, dry_run=dry_run)
    with pytest.raises(ValueError, match=said):
        lacks.prune(misspelled.policy())
    assert (scores(lacks), scores(one)) == ([3, 2, 1], [1])
    prune(storage)  # by its own policy a run may be pruned before its evaluation
    assert scores(awaits) == [1]
    prune(storage, ["awaits"], CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/accuracy"))


def test_what_a_living_training_restored_stays_until_it_has_ended(tmp_path):
    store, claimed = fill(str(tmp_path / "store"), "run", tmp_path, [1, 2], is_trained=True)
    first = store.list()[0]
    record_resumed_from(store, claimed, store.checkpoint(first).path)
    assert prune(str(tmp_path / "store")) == {"run": []}
    writer = HistoryWriter(store, 1)
    writer.append(MetricRecord(1, 1, {}, store.list()[1].id, "2026-11-21T00:00:00+00:00"))
    writer.flush()
    assert prune(str(tmp_path / "store")) == {"run": []}
    write_outcome(store, Outcome(claimed.number, "completed"))
    assert prune(str(tmp_path / "store")) == {"run": [first.id]}


def test_what_alone_remembers_its_report_stays_while_a_training_lives(tmp_path):
    store, claimed = fill(str(tmp_path / "store"), "run", tmp_path, [1, 2, 3], is_trained=True)
    first, second, _ = store.list()
    assert prune(str(tmp_path / "store")) == {"run": []}
    writer = HistoryWriter(store, 1)
    writer.append(MetricRecord(1, 0, {}, first.id, "2026-11-21T00:00:00+00:00"))
    writer.flush()
    assert prune(str(tmp_path / "store")) == {"run": [first.id]}
    write_outcome(store, Outcome(claimed.number, "completed"))
    assert prune(str(tmp_path / "store")) == {"run": [second.id]}


def test_a_run_that_was_begun_by_half_is_left_out_and_the_others_are_pruned(tmp_path):
    store, _ = fill(str(tmp_path / "store"), "one", tmp_path, [1, 2])
    other = CheckpointStore.open(store.spec, "other")
    claimed = claim_attempt(other, Owner.current(), world_size=1)
    other.storage.delete([other.layout.attempt(claimed.number, claimed.token)])  # killed between the two
    first, _ = store.list()
    assert prune(str(tmp_path / "store")) == {"one": [first.id]}


def test_a_prune_by_hand_keeps_what_a_living_training_restored(tmp_path):
    store, claimed = fill(str(tmp_path / "store"), "run", tmp_path, [1, 2], is_trained=True)
    first, second = store.list()
    record_resumed_from(store, claimed, store.checkpoint(first).path)
    writer = HistoryWriter(store, 1)
    writer.append(MetricRecord(1, 1, {}, second.id, "2026-11-21T00:00:00+00:00"))
    writer.flush()

    @flow
    def by_hand():
        return prune_checkpoints(store.spec, "run", RetentionPolicy(1)).drop

    assert by_hand() == ()
    write_outcome(store, Outcome(claimed.number, "completed"))
    assert by_hand() == (first,)


def test_a_run_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run 'missing'"):
        prune(str(tmp_path), ["missing"])


def test_a_sweep_that_is_named_is_told_to_have_trials(tmp_path, caplog):
    sweep = CheckpointStore.open(tmp_path / "store", "searched")
    claim_attempt(sweep, Owner.current(), world_size=0)
    sweep.records.put_json(sweep.layout.sweep, {})
    assert prune(str(tmp_path / "store")) == {"searched": []}
    assert "is a sweep" not in caplog.text
    state = prune(str(tmp_path / "store"), ["searched"], return_state=True)
    assert (state.message, state.result()) == ("1 run, 0 checkpoints deleted", {"searched": []})
    assert "run 'searched' is a sweep: give its trials to prune, as prefect-torch best" in caplog.text


def test_nothing_is_deleted_where_one_of_the_named_runs_is_missing(tmp_path):
    store, _ = fill(str(tmp_path / "store"), "one", tmp_path, [1, 2, 3])
    with pytest.raises(FileNotFoundError, match="there is no run 'missing'"):
        prune(str(tmp_path / "store"), ["one", "missing"])
    assert scores(store) == [1, 2, 3]
    dropped = [manifest.id for manifest in store.list()[:2]]
    assert prune(str(tmp_path / "store"), ["one", "one"]) == {"one": dropped}


def test_a_run_of_a_newer_version_fails_the_flow_once_the_others_are_pruned(tmp_path):
    newer, claimed = fill(str(tmp_path / "store"), "a", tmp_path, [1, 2])
    store, _ = fill(str(tmp_path / "store"), "b", tmp_path, [1, 2, 3])
    key = newer.layout.attempt(claimed.number, claimed.token)
    newer.records.put_json(key, {**newer.records.get_json(key), "format": 99})
    with pytest.raises(UnsupportedFormatError, match="format 99"):
        prune(str(tmp_path / "store"))
    assert (scores(newer), scores(store)) == ([1, 2], [3])


def test_every_deployment_of_prefect_yaml_is_deployed_as_it_is_written(tmp_path):
    """With the commands at the top of the file, in a copy, since deploying writes into the folder."""
    shutil.copy(ROOT / "prefect.yaml", tmp_path)
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}

    def run_prefect(*arguments):
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = run_program(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run_prefect("work-pool", "create", "--type", "process", "gpu-pool")
    run_prefect("deploy", "--all")
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    with get_client(sync_client=True) as client:
        for entry in entries:
            flow = entry["entrypoint"].rpartition(":")[2]
            deployed = client.read_deployment_by_name(f"{flow}/{entry['name']}")
            assert deployed.entrypoint == entry["entrypoint"]
            assert deployed.enforce_parameter_schema
            assert json.loads(json.dumps(deployed.parameters)) == entry.get("parameters", {})
            assert [schedule.schedule.cron for schedule in deployed.schedules] == [
                schedule["cron"] for schedule in entry.get("schedules", [])
            ]
            assert deployed.work_queue_name == entry["work_pool"]["work_queue_name"]
            assert deployed.global_concurrency_limit is None  # its lease would not survive a restart of the server
