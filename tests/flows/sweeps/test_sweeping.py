"""Whole sweeps: real trials, each with a process of its own."""

import gc
import json
import logging
import math
import os
import re
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from uuid import UUID

import httpx
import numpy as np
import pytest
from commits import commit
from faulty_storage import Crash
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelling, Crashed
from prefect_servers import rows, wait_until
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, FencedError, Manifest, RunBusyError, StorageError
from prefect_torch.ckpt.reporting.decisions import TRAINING_ITERATION, DecisionPoints
from prefect_torch.ckpt.runs.attempts import claims
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, list_attempts, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, read_history
from prefect_torch.ckpt.runs.manifest import new_id
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.whole.trials import trials_of
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    Hosts,
    JournalDamagedError,
    Result,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    SweepFailedError,
    SweepResult,
    choice,
    grid,
    interruptions,
    randint,
    sweep,
    sweeping,
    train,
    uniform,
)
from prefect_torch.flows.calls.cluster_runner import ClusterThreads
from prefect_torch.flows.monitoring.restarted import FIRST_NAME_LABEL, RESTARTS_LABEL, RESUMES_LABEL
from prefect_torch.flows.monitoring.sweeps.summary import summarize_sweep
from prefect_torch.flows.sweeps import beginning, trial_storage, unused_criteria
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.events import Cloned, Source, TrialReported, TrialResumed, TrialStarted, decode_event
from prefect_torch.flows.sweeps.journal.history import RungReport, TrialRecord, history_of
from prefect_torch.flows.sweeps.journal.journal import Journal, list_parts
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.journal.stored_trials import read_trials, runs_without_entries
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_storage import count_reports, pin_source, remove_lost_pin, undecided
from prefect_torch.flows.sweeps.unused_criteria import UnusedCriteria
from prefect_torch.flows.trials import leading
from prefect_torch.flows.trials.left_trials import LeftTrials
from prefect_torch.flows.trials.local_trials import LocalTrials
from prefect_torch.tasks.prefect_api.client import SubflowClients
from prefect_torch.tasks.rank.resources.cpus import count_cpus
from prefect_torch.tasks.training import backoff, outcomes
from prefect_torch.tasks.training.restarts import Restarts
from stored_sweeps import store_sweep
from told_trainings import events_about


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="digits", storage=str(tmp_path))


def search(**changes) -> SearchConfig:
    return SearchConfig(**{"metric": "loss", "mode": "min", "num_trials": 3, "sampler": "random", "seed": 1, **changes})


def test_a_sweep_finds_the_best_of_its_trials_at_two_at_once(run, tmp_path, opened):
    config = {"epochs": 2, "fails": 0.99, "killed_at": 1}
    chosen = search(max_concurrent=2, initial_points=[{"lr": 0.995}], keep_best_trials=1)
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}):
        result = sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, config, chosen, run=run)
    assert opened == [str(tmp_path)] * 2, "for all trials, and for the page of the storage's runs"
    assert [trial.state for trial in result.trials] == ["failed", "completed", "completed"]
    assert result.errors.keys() == {0}
    assert "ValueError: lr=0.995 diverged" in result.errors[0]
    losses = {trial.number: trial.metrics["loss"] for trial in result.trials[1:]}
    assert losses == {it.number: pytest.approx(abs(it.config["lr"] - 0.3) + 0.5) for it in result.trials[1:]}
    assert result.best.number == min(losses, key=losses.get)
    assert result.best.config["epochs"] == 2
    assert result.best.checkpoint.step == 1
    assert [trial.checkpoint for trial in result.trials if trial.number != result.best.number] == [None, None]
    assert result.best.result.attempts == 2  # each was killed once, which cost an attempt of it and nothing else
    assert result.best.run.startswith(f"digits/trial-{result.best.number:04d}-")
    assert SweepResult.from_storage(tmp_path, "digits") == result
    with pytest.raises(ValueError, match=r"run 'digits' in .* is a sweep: read it by SweepResult"):
        Result.from_storage(tmp_path, "digits")
    assert list(result.trials_dataframe["config/lr"]) == [trial.config["lr"] for trial in result.trials]
    assert CheckpointStore.open(tmp_path, result.best.run).latest().step == 1
    check_events(tmp_path, result)
    check_page_of_trial(tmp_path, result.best)


def check_page_of_trial(tmp_path, trial):
    *_, last = list_attempts(CheckpointStore.open(tmp_path, trial.run))
    written = rows(PREFECT_API_URL.value(), "artifacts", flow_runs={"id": {"any_": [last.owner.flow_run_id]}})
    (page,) = (it["data"] for it in written if (it["key"] or "").endswith("-summary"))
    (config,) = re.findall(r"## Setup\n\n1 rank led from .*torch .*\n\n```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(config) == trial.config


def check_events(tmp_path, result):
    told = events_about(f"prefect-torch.trial.{tmp_path}/digits/", 6)
    assert sorted((int(it.resource["trial"]), it.event.removeprefix("prefect-torch.trial.")) for it in told) == [
        *((0, "failed"), (0, "started")),
        *((1, "completed"), (1, "started")),
        *((2, "completed"), (2, "started")),
    ]
    failed = next(it for it in told if it.event.endswith("failed"))
    assert failed.payload["config"] == {"lr": 0.995}
    assert "diverged" in failed.payload["reason"]
    assert {it.role: it.id for it in failed.related}["sweep"] == f"prefect-torch.sweep.{tmp_path}/digits"
    bests = events_about(f"prefect-torch.sweep.{tmp_path}/digits", 1)
    assert {it.event for it in bests} == {"prefect-torch.sweep.new-best"}
    assert bests[-1].resource["trial"] == str(result.best.number)
    assert bests[-1].resource["run"] == result.best.run
    assert bests[-1].payload["value"] == result.best.metrics["loss"]
    assert [it.payload["previous"] for it in bests] == [None, *(it.payload["value"] for it in bests[:-1])]
    *_, last = list_attempts(CheckpointStore.open(tmp_path, result.best.run))
    alive = f"prefect.flow-run.{last.owner.flow_run_id}"
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(last.owner.flow_run_id).state
    assert state.message == f"step 1, loss {result.best.metrics['loss']:.5g}"
    wait_until(lambda: "prefect.flow-run.heartbeat" in {it.event for it in events_about(alive, 1)}, "a trial's heartbeat")


PAGE = (Path(__file__).parents[3] / "docs/how-to/sweeps.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_searches_with_asha_and_optuna_reads_the_journal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function, program, look, deployed, view = BLOCKS
    Path("my_trial.py").write_text(function)
    for code in (program, look):
        exec(compile(code, "page", "exec"), {"__name__": "__main__"})
    found = SweepResult.from_storage("./checkpoints", "line-sweep")
    assert sorted(trial.state for trial in found.trials) == ["completed", "paused", "paused"]
    best = min(found.trials, key=lambda trial: trial.metrics["loss"])
    assert best.state == "completed"
    assert best.reason == "step=3 has reached 3"
    assert [trial.checkpoint.step for trial in found.trials if trial.state == "paused"] == [1, 1]
    assert {trial.result.completed for trial in found.trials} == {False}  # each was stopped after a report
    capsys.readouterr()
    exec(compile(view, "page", "exec"), {})
    assert int(capsys.readouterr().out) >= 3
    made = {"__name__": "imported"}
    exec(compile(deployed, "page", "exec"), made)
    assert made["line"].parameters["space"] == {"lr": {"kind": "loguniform", "low": 0.001, "high": 1}}


@contextmanager
def without_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_stores() -> int:
    """Return how many key-value stores of ranks this process serves."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((thread / "comm").read_text())
    return sum(name.startswith("pt_tcpstore") for name in names)


def test_trials_at_once_share_the_cpus_of_the_machine(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    searching, nothing = partial(sweep, "sweep_trainings:tell_threads", {"x": choice([1])}, {}, run=run), search(num_trials=1)
    assert searching(nothing).best.metrics["loss"] == count_cpus()
    assert searching(search(max_concurrent=9)).trials[1].metrics["loss"] == max(1, count_cpus() // 3), "of three trials"


def test_the_cluster_of_the_task_runner_has_the_ranks_of_all_trials(run):
    nowhere = ClusterThreads(Hosts(["nowhere"], command="false", leader_address="127.0.0.1", wait_s=0))
    searching, never = sweep.with_options(task_runner=nowhere), FailureConfig(max_infrastructure_failures=0)
    with pytest.raises(SweepFailedError, match="nowhere: its command ended with 1"):
        searching("sweep_trainings:climb", {"lr": uniform(0, 1)}, {}, search(num_trials=1), run=run, failure=never)


def test_a_grid_is_tried_whole_and_a_sweep_that_is_raised_goes_on(run, caplog):
    space = {"x": grid([2, 1])}
    first = sweep("sweep_trainings:return_loss", space, {"y": 5}, SearchConfig(metric="loss", num_trials=1), run=run)
    assert [trial.config for trial in first.trials] == [{"x": 2, "y": 5}]
    before = num_stores()
    with without_collection():
        result = sweep("sweep_trainings:return_loss", space, {"y": 5}, SearchConfig(metric="loss"), run=run)
        assert num_stores() <= before  # each has a thread and nine descriptors
    assert [trial.config for trial in result.trials] == [{"x": 2, "y": 5}, {"x": 1, "y": 5}]
    assert result.trials[:1] == first.trials
    assert result.best.metrics == {"loss": 6}
    assert "no trial ran" not in caplog.text
    assert sweep("sweep_trainings:return_loss", space, {"y": 6}, SearchConfig(metric="loss"), run=run) == result
    assert "no trial ran: none was left, so the result is the earlier one; another RunConfig.name" in caplog.text
    with pytest.raises(ValueError, match=r"has space=.* give it another name, or resume='never'"):
        sweep("sweep_trainings:return_loss", {"x": grid([3])}, search=SearchConfig(metric="loss"), run=run)
    assert read_status(Run.open(run.storage, run.name)).state == "completed"  # as before
    fresh = run.model_copy(update={"resume": "never"})
    again = sweep("sweep_trainings:return_loss", {"x": grid([3])}, search=SearchConfig(metric="loss"), run=fresh)
    assert [trial.config for trial in again.trials] == [{"x": 3}]
    assert SweepResult.from_storage(run.storage, run.name) == again


def test_the_former_trials_of_a_sweep_that_begins_again_keep_their_checkpoints(run):
    """The new ones have none yet."""
    chosen = search(num_trials=1, keep_best_trials=1)
    for resume in ("auto", "never"):
        starting = run.model_copy(update={"resume": resume})
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, {"epochs": 2}, chosen, run=starting)
    assert [bool(it.list()) for it in trials_of(CheckpointStore.open(run.storage, run.name))] == [True, True]


def test_a_trial_has_the_config_with_which_it_last_started(run):
    space, one, two = {"x": grid([1, 2, 3])}, search(num_trials=1, sampler=None), search(num_trials=2, sampler=None)
    sweep("sweep_trainings:return_loss", space, {"y": 5}, one, run=run)
    sweep("sweep_trainings:return_loss", space, {"y": 7}, two, run=run)
    found = SweepResult.from_storage(run.storage, run.name)
    assert [(trial.config, trial.metrics["loss"]) for trial in found] == [({"x": 1, "y": 5}, 6), ({"x": 2, "y": 7}, 9)]


def test_a_trial_that_completed_before_its_sweep_goes_on_with_another_config_had_the_one_before(tmp_path):
    def led(attempt, config):
        events = [decode_event(entry, "test") for entry in entries]
        chosen = search(num_trials=2)
        searched = Search(chosen, parse_space({"lr": uniform(0, 1)}), 0, RecordedTrials(events, entries.append), "sweep")
        searched.lead(attempt, config)
        return searched

    entries = []
    first = led(1, {"y": 5})
    done, running = Run.open(tmp_path, first.next_trial().run), first.next_trial()
    claimed = claim_attempt(done, Owner.current("a-flow-run"), world_size=1)
    write_outcome(done, Outcome(claimed.number, "completed", "a-flow-run", return_value={"loss": 1.0}))
    again = led(2, {"y": 7})
    assert [trial.number for trial in leading._recovered(again, CheckpointStore.open(tmp_path, "digits"))] == [running.number]
    assert [(trial.state, trial.common) for trial in again.trials.values()] == [("completed", {"y": 5}), ("running", {"y": 7})]
    assert history_of(decode_event(entry, "test") for entry in entries) == again.trials


def test_a_sweep_that_begins_again_does_so_once_and_a_retry_of_its_flow_run_goes_on(run, monkeypatch):
    asked, ends = SearchConfig(metric="loss"), []
    sweep("sweep_trainings:return_loss", {"x": grid([3])}, search=asked, run=run)

    def fail_once(*arguments):
        ends.append(SweepResult.from_storage(run.storage, run.name))
        if len(ends) == 1:
            raise OSError("no answer")
        return summarize_sweep(*arguments)

    monkeypatch.setattr(sweeping, "summarize_sweep", fail_once)
    fresh = run.model_copy(update={"resume": "never"})
    result = sweep.with_options(retries=1)("sweep_trainings:return_loss", {"x": grid([1, 2])}, search=asked, run=fresh)
    assert [trial.config for trial in result.trials] == [{"x": 1}, {"x": 2}]
    assert [end.trials for end in ends] == [result.trials, result.trials]


def test_a_new_search_is_not_mixed_with_the_trials_of_the_one_before_if_it_fails_before_it_begins(run, monkeypatch):
    asked, space = search(num_trials=1), {"x": choice([3])}
    before = sweep("sweep_trainings:return_loss", space, search=asked, run=run)

    def fail(*_):
        raise OSError("no answer")

    highest, fresh = search(num_trials=1, mode="max"), run.model_copy(update={"resume": "never"})
    monkeypatch.setattr(sweeping, "show_sweep", fail)
    with pytest.raises(OSError, match="no answer"):
        sweep("sweep_trainings:return_loss", space, search=highest, run=fresh)
    assert SweepResult.from_storage(run.storage, run.name) == before
    with pytest.raises(ValueError, match=r"has modes=\['min'\], and this one \['max'\]"):
        sweep("sweep_trainings:return_loss", space, search=highest, run=run)


def test_a_new_search_that_is_killed_before_it_is_stored_begins_when_its_flow_run_is_tried_again(run, monkeypatch):
    sweep("sweep_trainings:return_loss", {"x": choice([3])}, search=search(num_trials=1), run=run)
    store, tries = sweeping.store_definition, []

    def fail_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise OSError("no answer")
        store(*arguments)

    for module in (beginning, sweeping):
        monkeypatch.setattr(module, "store_definition", fail_once)
    fresh = run.model_copy(update={"resume": "never"})
    retried = sweep.with_options(retries=1)
    result = retried("sweep_trainings:return_loss", {"x": choice([4])}, search=search(num_trials=1, mode="max"), run=fresh)
    assert [trial.config for trial in result.trials] == [{"x": 4}]
    assert SweepResult.from_storage(run.storage, run.name) == result


def test_a_sweep_that_a_living_process_leads_is_refused_unless_it_is_taken_over(run):
    claim_attempt(Run.open(run.storage, run.name), Owner.current(str(uuid.uuid4())), world_size=0)
    with pytest.raises(RunBusyError, match=r"sweep 'digits' in .* is led by flow run .* then give takeover=True"):
        sweep("sweep_trainings:return_loss", {"x": grid([1])}, search=SearchConfig(metric="loss"), run=run)
    taken = run.model_copy(update={"takeover": True})
    result = sweep("sweep_trainings:return_loss", {"x": grid([1])}, search=SearchConfig(metric="loss"), run=taken)
    assert [trial.state for trial in result.trials] == ["completed"]


def test_a_restart_of_a_sweep_does_not_take_back_what_was_taken_over_from_the_flow_run_that_it_restarts(run):
    led = Run.open(run.storage, run.name)
    parameters = {
        "train_fn": "sweep_trainings:return_loss",
        "space": {"x": {"kind": "grid", "values": [1]}},
        "search": {"metric": "loss"},
        "run": {"name": run.name, "storage": run.storage, "takeover": True},
    }
    with get_client(sync_client=True) as client:
        crashed = client.create_flow_run(sweep, state=Crashed())
        claim_attempt(led, Owner.current(str(crashed.id)), world_size=0)
        taker = str(uuid.uuid4())
        claim_attempt(led, Owner.current(taker), world_size=0)
        restart = client.create_flow_run(sweep, parameters=parameters)
        labels = {RESTARTS_LABEL: 1, RESUMES_LABEL: str(crashed.id), FIRST_NAME_LABEL: crashed.name}
        client.update_flow_run_labels(restart.id, labels)
        with pytest.raises(RunBusyError, match=f"is led by flow run {taker}"):
            run_flow(sweep, client.read_flow_run(restart.id))
    assert [attempt.owner.flow_run_id for attempt in list_attempts(led)] == [str(crashed.id), taker]


def test_a_sweep_and_a_training_do_not_share_a_name(run):
    space, asked = {"x": grid([1])}, SearchConfig(metric="loss")
    sweep("sweep_trainings:return_loss", space, {"y": 1}, asked, run=run)
    for taken in (run, run.model_copy(update={"takeover": True})):
        with pytest.raises(ValueError, match=r"^run 'digits' in .* is a sweep, so a training needs another name$"):
            train("sweep_trainings:return_loss", {"x": 1, "y": 1}, run=taken)
    assert SweepResult.from_storage(run.storage, run.name).best.metrics == {"loss": 2}
    other = run.model_copy(update={"name": "training"})
    train("sweep_trainings:return_loss", {"x": 1, "y": 1}, run=other)
    for taken in (other, other.model_copy(update={"takeover": True})):
        with pytest.raises(ValueError, match=r"^run 'training' in .* is a training, so a sweep needs another name$"):
            sweep("sweep_trainings:return_loss", space, {"y": 1}, asked, run=taken)


def test_what_is_pinned_of_a_source_is_there_though_it_goes_on(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path, "sweep/trial-0000-0123abcd")
    trial = TrialRecord(0, store.run, {}, 0)
    assert pin_source(CheckpointStore.open(tmp_path, "sweep"), trial, "a") is None
    first, second = commit(store, 0), commit(store, 1)
    latest = CheckpointStore.latest

    def latest_that_is_pruned_then(self):
        found = latest(self)
        monkeypatch.setattr(CheckpointStore, "latest", latest)
        delete_checkpoints(store, [found])
        return found

    monkeypatch.setattr(CheckpointStore, "latest", latest_that_is_pruned_then)
    assert pin_source(CheckpointStore.open(tmp_path, "sweep"), trial, "b") == (first.id, 1)
    monkeypatch.delattr(CheckpointStore, "latest")
    reported = replace(trial, reports=(RungReport(0, 1.0, first.id, 5),))
    assert pin_source(CheckpointStore.open(tmp_path, "sweep"), reported, "c") == (first.id, 5), "without a look at the newest"
    assert second.id not in {manifest.id for manifest in store.list()}


def test_a_pin_whose_clone_a_kill_kept_from_the_journal_is_removed_at_the_next_start(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path, "sweep/trial-0000-0123abcd")
    source, made = commit(store, 0), commit(store, 1)
    store.pin(source.id, "00000000")
    clone, pin = "sweep/trial-0001-11111111", CheckpointStore.pin

    def be_killed_after_it(self, *given):
        pin(self, *given)
        raise Crash

    monkeypatch.setattr(CheckpointStore, "pin", be_killed_after_it)
    with pytest.raises(Crash):
        pin_source(CheckpointStore.open(tmp_path, "sweep"), TrialRecord(0, store.run, {}, 0), clone)
    led = Run.open(str(tmp_path), "sweep")
    remove_lost_pin(led, [TrialRecord(1, "sweep/trial-0001-22222222", {}, 1, earlier_runs=(clone,))])
    assert store.pinned() == {source.id, made.id}
    remove_lost_pin(led, [TrialRecord(1, "sweep/trial-0001-22222222", {}, 1)])
    assert store.pinned() == {source.id}
    remove_lost_pin(Run.open(str(tmp_path), "another"), [])


@pytest.mark.parametrize("killed_at", [None, "end", "unpin_source"])
def test_a_takeover_that_leaves_nothing_to_train_changes_no_result_and_leaves_no_pin(run, monkeypatch, killed_at):
    space, config = {"lr": uniform(0, 1)}, {"epochs": 4}
    points = [{"lr": 0.4}, {"lr": 0.9}]
    chosen = search(scheduler="pbt", perturbation_interval=3, num_trials=2, initial_points=points, max_failed_trials=0)

    def be_killed(*_, **__):
        raise OSError("no answer")

    where = {"end": Search, "unpin_source": leading}
    if killed_at is not None:
        monkeypatch.setattr(where[killed_at], killed_at, be_killed)
        with pytest.raises(OSError, match="no answer"):
            sweep("sweep_trainings:climb", space, config, chosen, run=run)
        monkeypatch.undo()
    result = sweep("sweep_trainings:climb", space, config, chosen, run=run, checkpoint=CheckpointConfig(num_to_keep=1))
    ends = [(trial.state, trial.config["lr"], trial.checkpoint.step) for trial in result]
    assert ends == [("completed", 0.4, 3), ("completed", 0.9, 3)]
    assert [trial.metrics["loss"] for trial in result] == pytest.approx([0.1 + 1 / 4, 0.6 + 1 / 4])
    assert [trial.reason for trial in result] == [None, "no report has 'loss' since it went on from trial 0, which is undone"]
    assert SweepResult.from_storage(run.storage, run.name) == result
    assert CheckpointStore.open(run.storage, result[0].run).pinned() == set()
    runs = {manifest.parents[1] for manifest in Path(run.storage).glob("digits/trial-*/manifests/*.json")}
    assert {path.name for path in runs} == {trial.run.partition("/")[2] for trial in result}


def test_runs_that_the_journal_does_not_know_tell_that_its_last_entries_are_lost(tmp_path):
    led, names = Run.open(str(tmp_path), "sweep"), [f"sweep/trial-000{number}-0123abcd" for number in range(3)]
    for name in names[:2]:
        claim_attempt(Run.open(str(tmp_path), name), Owner.current(), world_size=1)
    commit(CheckpointStore.open(tmp_path, names[2]), 0)  # of no attempt
    started = TrialStarted(0, names[0], {}, 0)
    assert runs_without_entries(led, [started], "2020") == [names[1]]
    assert runs_without_entries(led, [started], "3020") == [], "of a journal before this one"
    reported = TrialReported(0, 1, 1, None, {}, "running", cloned=Cloned(names[1], {}, Source(0, names[0], "some-id")))
    assert runs_without_entries(led, [started, reported], "2020") == []
    resumed = TrialResumed(0, 2, reported.cloned)
    assert runs_without_entries(led, [started, resumed], "2020") == []


def test_a_trial_that_fails_on_its_way_out_after_a_stop_trains_no_further(run):
    points = [{"lr": 0.9}, {"lr": 0.3}]
    asked = search(scheduler="asha", max_t=3, num_trials=2, initial_points=points)
    fails = FailureConfig(max_failures=1)
    space, config = {"lr": uniform(0, 1)}, {"epochs": 9}
    result = sweep("sweep_trainings:fail_when_stopped", space, config, asked, run=run, failure=fails)
    assert [trial.state for trial in result.trials] == ["paused", "completed"]
    assert [trial.result.attempts for trial in result.trials] == [1, 1]
    assert [record.step for record in result.trials[0].result.history] == [0, 1]


def test_a_failed_trial_is_two_errors_of_the_log_its_traceback_and_the_end_of_its_flow_run(run, caplog):
    points = [{"lr": 9.0}, {"lr": 0.3}]
    chosen = search(num_trials=2, initial_points=points, max_failed_trials=1)
    result = sweep("sweep_trainings:climb", {"lr": uniform(0, 9)}, {"epochs": 2, "fails": 1}, chosen, run=run)
    assert [trial.state for trial in result.trials] == ["failed", "completed"]
    errors = [it.getMessage() for it in caplog.records if it.levelno >= logging.ERROR]
    assert [re.match(r"rank 0 of attempt 1 failed:|Finished in state Failed\(", it) is not None for it in errors] == [True] * 2
    assert "\nValueError: lr=9 diverged\n" in errors[0]


def lose_answer() -> None:
    raise httpx.ReadTimeout("no answer")


def read_page() -> None:
    httpx.Response(200, html="<html>Please log in</html>").json()


@pytest.mark.parametrize("fail", [lose_answer, read_page])
def test_a_trial_starts_once_prefects_api_answers_with_one_flow_run(run, monkeypatch, fail):
    create, keys = SubflowClients._create_run, []

    def lose_the_first_answer(self, *arguments):
        keys.append(arguments[-1])
        created = create(self, *arguments)
        if len(keys) == 1:
            fail()
        return created

    monkeypatch.setattr(SubflowClients, "_create_run", lose_the_first_answer)
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.01)
    result = sweep("sweep_trainings:return_loss", {"x": grid([1])}, search=SearchConfig(metric="loss"), run=run)
    assert [trial.state for trial in result.trials] == ["completed"]
    assert len(keys) == 2
    found = rows(PREFECT_API_URL.value(), "flow_runs", flow_runs={"name": {"any_": [result.best.run]}})
    assert [it["state_name"] for it in found] == ["Completed"]


def test_a_trial_whose_flow_run_is_cancelled_ends_and_the_sweep_goes_on(run, monkeypatch):
    """It trained to its end, and stayed Cancelling."""
    monkeypatch.setattr(interruptions, "_POLL_S", 0.2)
    run = run.model_copy(update={"name": "interrupted"})  # other tests' flow runs are in the same database
    points = [{"lr": 0.9, "epochs": 100_000}, {"lr": 0.4, "epochs": 1}]
    space, chosen = {"lr": uniform(0, 1), "epochs": choice([1, 100_000])}, search(num_trials=2, initial_points=points)
    api = PREFECT_API_URL.value()

    def first():
        return rows(api, "flow_runs", flow_runs={"name": {"like_": "interrupted/trial-0000-"}})

    def cancel():
        wait_until(lambda: first() and CheckpointStore.open(run.storage, first()[0]["name"]).latest(), "a checkpoint")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(first()[0]["id"]), Cancelling())

    with ThreadPoolExecutor(1) as user:
        cancelled = user.submit(copy_context().run, cancel)
        result = sweep("sweep_trainings:climb", space, {"pause_s": 0.1}, chosen, run=run)
        cancelled.result()
    assert [trial.state for trial in result.trials] == ["failed", "completed"]
    assert result.trials[0].reason.startswith("cancelled (in Prefect); work is safe up to step ")
    assert [it["state_name"] for it in first()] == ["Cancelled"]


def test_a_trial_that_ends_with_its_sweep_is_not_started_again(run, monkeypatch, caplog):
    def fail(*_):
        raise StorageError("no answer")

    monkeypatch.setattr(leading, "_record_end", fail)  # of the short one, while the other runs
    space = {"lr": uniform(0, 1), "epochs": choice([1, 100_000])}
    chosen = search(num_trials=2, max_concurrent=2, initial_points=[{"lr": 0.5, "epochs": it} for it in (100_000, 1)])
    budgets = FailureConfig(max_infrastructure_failures=3, retry_delay_s=0.0)
    with pytest.raises(StorageError, match="no answer"):
        sweep("sweep_trainings:climb", space, {"pause_s": 0.01}, chosen, run=run, failure=budgets)
    assert "the training starts again" not in caplog.text


def test_a_sweep_that_is_taken_over_ends_while_its_trials_run(run, monkeypatch):
    monkeypatch.setattr(leading, "_CHECK_S", 0.0)
    led, taken, take_ended = CheckpointStore.open(run.storage, run.name), [], LocalTrials.take_ended

    def take_over(self, timeout_s):
        if not taken:
            taken.append(claim_attempt(led, Owner.current(str(uuid.uuid4())), world_size=0))
        return take_ended(self, timeout_s)

    monkeypatch.setattr(LocalTrials, "take_ended", take_over)
    with pytest.raises(FencedError, match="attempt 1 of run 'digits' was overtaken by attempt 2"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, {"epochs": 300, "pause_s": 0.1}, search(num_trials=1), run=run)
    (trial,) = read_trials(led).values()
    newest = led.beside(trial.run).latest()
    assert newest is None or newest.step < 299


def test_a_trial_that_waits_to_be_started_again_ends_with_its_sweep(run, monkeypatch):
    monkeypatch.setattr(leading, "_CHECK_S", 0.0)
    led, waits, taken = CheckpointStore.open(run.storage, run.name), threading.Event(), []
    take_ended, count_failure = LocalTrials.take_ended, Restarts.count_failure

    def count(self, kind):
        waits.set()
        return count_failure(self, kind)

    def take_over(self, timeout_s):
        if waits.is_set() and not taken:
            taken.append(claim_attempt(led, Owner.current(str(uuid.uuid4())), world_size=0))
        return take_ended(self, timeout_s)

    monkeypatch.setattr(Restarts, "count_failure", count)
    monkeypatch.setattr(LocalTrials, "take_ended", take_over)
    with pytest.raises(FencedError, match="attempt 1 of run 'digits' was overtaken by attempt 2"):
        sweep(
            "sweep_trainings:climb",
            {"lr": uniform(0, 1)},
            {"killed_at": 0},
            search(num_trials=1),
            run=run,
            failure=FailureConfig(retry_delay_s=3600),
        )
    assert taken


def test_the_claim_of_a_sweep_is_renewed_each_day_also_while_its_journal_gets_no_entry(run, tmp_path, monkeypatch):
    monkeypatch.setattr(leading, "_CHECK_S", 0.0)
    monkeypatch.setattr(claims, "_RENEWED_AFTER_S", 0)
    ages_s, appended, append, take_ended = [], [], Journal.append, LocalTrials.take_ended

    def note(self, entry):
        appended.append(entry)
        append(self, entry)

    def age(self, timeout_s):
        (claim,) = (tmp_path / run.name / "attempts").iterdir()
        ages_s.append((len(appended), claim.stat().st_mtime))
        os.utime(claim, (0, 0))
        return take_ended(self, timeout_s)

    monkeypatch.setattr(Journal, "append", note)
    monkeypatch.setattr(LocalTrials, "take_ended", age)
    sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, {"epochs": 20, "pause_s": 0.1}, search(num_trials=1), run=run)
    (num_before, _), (num_entries, changed_s), *_ = ages_s
    assert num_entries == num_before
    assert changed_s > 0


OVERTAKEN_AT = [(beginning, "read_known_trials"), (beginning, "settle_definition"), (LeftTrials, "cancel_former")]


@pytest.mark.parametrize(("place", "name"), OVERTAKEN_AT, ids=[name for _, name in OVERTAKEN_AT])
def test_a_sweep_that_is_taken_over_while_it_begins_leaves_all_to_its_successor(run, tmp_path, monkeypatch, place, name):
    (project := tmp_path / "project").mkdir()
    (project / "code.py").write_text("")
    space, asked = {"x": grid([1])}, SearchConfig(metric="loss")
    sweep("sweep_trainings:return_loss", space, search=asked, run=run)
    led, act, taken = Run.open(run.storage, run.name), getattr(place, name), []
    first, *_ = list_parts(led)
    led.storage.put_bytes(first.key, b"damaged")

    def act_slowly(*args, **options):
        done = act(*args, **options)
        claim_attempt(led, Owner.current(str(uuid.uuid4())), world_size=0)
        for key in (led.layout.sweep, first.key, led.layout.code("its-own"), led.layout.deployed):
            led.storage.put_bytes(key, b"its own")
            taken.append(key)
        return done

    monkeypatch.setattr(place, name, act_slowly)
    again = run.model_copy(update={"resume": "never", "working_dir": str(project)})
    with pytest.raises(FencedError, match="attempt 2 of run 'digits' was overtaken by attempt 3"):
        sweep("sweep_trainings:return_loss", space, search=asked, run=again)
    assert [led.storage.get_bytes(key) for key in taken] == [b"its own"] * 4


def test_all_trials_run_the_code_with_which_the_sweep_began(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = tmp_path / "project"
    project.mkdir()
    (project / "said.txt").write_text("1")
    brought = run.model_copy(update={"working_dir": str(project), "storage": str(tmp_path / "store")})
    asked, config = SearchConfig(metric="loss"), {"project": str(project)}
    result = sweep("sweep_trainings:change_code", {"x": grid([1, 2])}, config, asked, run=brought)
    assert [trial.metrics["loss"] for trial in result.trials] == [1.0, 1.0]
    (archive,) = (tmp_path / "store").rglob("*.zip")  # not one for each trial
    assert archive.parent == tmp_path / "store" / result.name / "code"


def nested(levels: int) -> dict:
    space = {"lr": uniform(0, 1)}
    for _ in range(levels):
        space = {"inner": space}
    return space


WRONG = [
    ({}, {}, "is empty: give what is to be searched"),
    ({"lr": uniform(2, 1)}, {}, "low=2 is above high=1"),
    (nested(150), {}, "^space is nested more than 100 levels deep$"),
    (nested(800), {}, "^a parameter is nested too deeply for Prefect, or holds itself: put such data into a file"),
    (nested(2000), {}, "^a parameter is nested too deeply for Prefect"),
    ({"lr": uniform(0, 1)}, {"sampler": "grid"}, "lr is continuous"),
    ({"lr": grid([1])}, {"sampler": "tpe"}, "the space has a grid"),
    ({"lr": uniform(0, 1)}, {"initial_points": [{"lr": 1}, {"rate": 1}]}, r"initial_points\[1\]: rate is not in the space"),
    ({"lr": uniform(0, 1)}, {"initial_points": [{"lr": 5}]}, r"initial_points\[0\]: lr=5 is no number from 0.0 to 1.0"),
    (
        {"lr": uniform(0, 1, 0.25)},
        {"initial_points": [{"lr": 0.3}]},
        r"initial_points\[0\]: lr=0.3 is none of the steps of 0.25 from 0.0: the next ones are 0.25 and 0.5",
    ),
    (
        {"n": randint(1, 9, 3)},
        {"initial_points": [{"n": 3}]},
        r"initial_points\[0\]: n=3 is none of the steps of 3 from 1: the next ones are 1 and 4",
    ),
    ({"lr": uniform(0, 1)}, {"sampler": "optuna.samplers:NoSampler"}, "sampler='optuna.samplers:NoSampler' cannot be imported"),
    ({"lr": uniform(0, 1)}, {"scheduler": "pruner", "pruner": "builtins:dict"}, "pruner='builtins:dict' returned a dict"),
]


@pytest.mark.parametrize(("space", "changes", "problem"), WRONG, ids=range(len(WRONG)))
def test_a_sweep_that_cannot_be_is_refused_before_anything_is_stored(run, tmp_path, space, changes, problem):
    with pytest.raises(ValueError, match=problem):
        sweep("sweep_trainings:climb", space, search=search(**changes), run=run)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_whose_cluster_does_not_exist_is_refused_before_anything_is_stored(run, tmp_path):
    with pytest.raises(ValueError, match="torch-cluster/typo"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, {}, search(), ScalingConfig(cluster="torch-cluster/typo"), run)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_with_the_name_of_a_trial_is_refused(run, tmp_path):
    taken = run.model_copy(update={"name": "digits/trial-0000-0123abcd"})
    with pytest.raises(ValueError, match=r"^run name 'digits/trial-0000-0123abcd' is that of a sweep's trial: give"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, search=search(), run=taken)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_must_exist_and_does_not_stores_nothing(run, tmp_path):
    must = run.model_copy(update={"resume": "must"})
    with pytest.raises(CheckpointNotFoundError, match=r"there is no sweep 'digits' in .*resume='must' asks for one"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, search=search(), run=must)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_a_file_names_what_tells_the_cause(tmp_path):
    storage = tmp_path / "file"
    storage.touch()
    with pytest.raises(NotADirectoryError, match=rf"{storage}'; `prefect-torch doctor {storage}` tries each step"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, search=search(), run=RunConfig(storage=str(storage)))


def test_a_storage_that_is_away_at_the_end_hides_neither_the_result_nor_the_failure_of_a_sweep(run, monkeypatch, caplog):
    def refuse(*_):
        raise StorageError("the storage did not answer")

    monkeypatch.setattr(outcomes, "write_outcome", refuse)
    monkeypatch.setattr(outcomes, "get_run_logger", lambda: logging.getLogger("outcomes"))
    space, asked = {"lr": grid([0.995])}, SearchConfig(metric="loss")
    with pytest.raises(SweepFailedError, match="diverged"):
        sweep("sweep_trainings:climb", space, {"epochs": 1, "fails": 0.99}, asked, run=run)
    result = sweep("sweep_trainings:return_loss", {"x": grid([1])}, search=asked, run=run.model_copy(update={"name": "whole"}))
    assert result.best.metrics == {"loss": 1}
    for name in ("digits", "whole"):
        assert f"the outcome of attempt 1 of run {name!r} could not be written: the storage did not answer" in caplog.messages


def test_a_sweep_fails_though_the_flow_runs_of_its_trials_have_completed(run):
    asked = search(metric="f1", num_trials=1)
    with pytest.raises(
        SweepFailedError, match=r"all trials of sweep 'digits' failed; the first: no report .* 'f1'.*; resume='never' begins"
    ):
        sweep("sweep_trainings:return_loss", {"x": uniform(0, 1)}, search=asked, run=run)


def test_a_sweep_whose_journal_is_damaged_has_failed_and_begins_again_where_it_is_told_to(run):
    space, asked = {"x": grid([1, 2])}, SearchConfig(metric="loss")
    sweep("sweep_trainings:return_loss", space, search=asked, run=run)
    led = Run.open(run.storage, run.name)
    first, *_ = list_parts(led)
    led.storage.put_bytes(first.key, b"damaged")
    with pytest.raises(JournalDamagedError):
        sweep("sweep_trainings:return_loss", space, search=asked, run=run)
    with pytest.raises(JournalDamagedError, match=r"SweepResult\.from_storage\(\.\.\., partial=True\) show what is known"):
        SweepResult.from_storage(run.storage, run.name)
    assert [trial.config for trial in SweepResult.from_storage(run.storage, run.name, partial=True)] == [{"x": 1}, {"x": 2}]
    assert read_status(led).state == "failed"
    again = run.model_copy(update={"resume": "never"})
    result = sweep("sweep_trainings:return_loss", {"x": grid([5])}, search=asked, run=again)
    assert [trial.config for trial in result.trials] == [{"x": 5}]
    assert SweepResult.from_storage(run.storage, run.name) == result


def test_a_start_that_replaces_a_damaged_journal_knows_the_former_trials_and_calls_no_entry_lost(tmp_path, caplog):
    """Their flow runs of a deployment are cancelled."""
    led, definition = store_sweep(LocalStorage(tmp_path))
    *_, damaged, _ = list_parts(led)
    led.storage.put_bytes(damaged.key, b"damaged")
    claimed = claim_attempt(led, Owner.current("another"), world_size=0)
    begun = beginning.begin(led, claimed, definition, has_seed=False, may_be_fresh=True)
    assert (begun.is_fresh, begun.events) == (True, [])
    assert begun.former.keys() == {0, 1, 2, 3, 4}
    assert [it.partition(":")[0] for it in caplog.messages] == ["a new journal replaces the damaged one"]


def test_a_config_and_a_space_with_one_dict_are_merged_and_a_tuple_in_a_space_goes_on_as_a_list(run):
    space = {"nested": {"x": grid([1])}, "betas": (np.float64(0.9), 0.99), "width": np.int64(8)}
    config, asked = {"nested": {"x": 9, "y": np.int64(5)}, "z": 7}, SearchConfig(metric="loss", num_trials=1)
    space["rate"] = math.nan
    for _ in range(2):
        result = sweep("sweep_trainings:return_nested", space, config, asked, run=run)
        assert math.isnan(result.best.config.pop("rate"))
        assert result.best.config == {"nested": {"x": 1, "y": 5}, "z": 7, "betas": [0.9, 0.99], "width": 8}
        assert result.best.metrics == {"loss": 6}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stop": {"los": 1, "training_iteration": 9}}, "stop={'los': 1} completes no trial: no report of trial 0 has 'los'"),
        ({"scheduler": "asha", "max_t": 3}, "scheduler='asha' has not decided on trial 0: it reached step=3 without"),
        ({"scheduler": "pbt", "perturbation_interval": 2}, "scheduler='pbt' has not decided on trial 0"),
        ({"scheduler": "median"}, None),
        ({"max_t": 9, "time_attr": "epochs"}, "max_t=9 completes no trial: no report of trial 0 has 'epochs' as a number"),
        (
            {"scheduler": "asha", "grace_period": 4, "max_t": 9},
            "scheduler='asha' has not decided on trial 0: it ended at step=3, and the first decision is at 4",
        ),
    ],
)
def test_what_decides_nothing_for_want_of_a_metric_or_a_checkpoint_is_said_once(run, caplog, changes, expected):
    chosen = search(sampler=None, num_trials=2, **changes)
    result = sweep("sweep_trainings:report_no_checkpoint", {"lr": grid([1, 2])}, search=chosen, run=run)
    assert [trial.state for trial in result.trials] == ["completed"] * 2
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in told if expected and text.startswith(expected)] == told
    assert len(told) == (expected is not None)


def test_a_checkpoint_without_the_metric_and_an_end_at_the_first_report_are_said_once(run, caplog):
    """A function may report them in two calls, and steps of an optimizer where a limit was meant in epochs."""
    searching = partial(sweep, "sweep_trainings:report_checkpoint_apart", {"lr": grid([1, 2])}, run=run)
    searching(search=search(sampler=None, num_trials=2, scheduler="asha", grace_period=430, max_t=9000))
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        "scheduler='asha' has not decided on trial 0: no report of a checkpoint has 'loss'; report both in one call"
    ]
    caplog.clear()
    early = search(sampler=None, num_trials=2, scheduler="asha", max_t=5)
    result = searching(search=early, run=run.model_copy(update={"name": "early"}))
    assert [trial.reason for trial in result.trials] == ["step=430 has reached 5"] * 2
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith("max_t=5 has completed trial 0 at its first report, at step=430; ")


@pytest.mark.parametrize("changes", [{"max_t": 1, "time_attr": "training_iteration"}, {"max_t": 430}], ids=["reports", "steps"])
def test_a_limit_of_one_report_is_what_was_meant(run, caplog, changes):
    chosen = search(sampler=None, num_trials=1, **changes)
    result = sweep("sweep_trainings:report_checkpoint_apart", {"lr": grid([1])}, search=chosen, run=run)
    assert result.trials[0].state == "completed"
    assert result.trials[0].reason.endswith(f"has reached {changes['max_t']}")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_limit_that_no_report_of_a_running_trial_has_is_said_while_it_runs(tmp_path, monkeypatch):
    """Nothing else may end it: a function that reports for ever, with a name of Ray Tune's that nothing adds here."""
    monkeypatch.setattr(unused_criteria, "_FIRST_LOOK_S", 0.0)
    run = Run.open(tmp_path, "sweep/trial-0000-0123abcd")
    criteria, history = UnusedCriteria(search(stop={"time_total_s": 60, "loss": 9})), HistoryWriter(run, 1)
    told = []
    for step in range(12):
        history.append(MetricRecord(1, step, {"loss": 1.0}, None, "2026-01-01T00:00:00+00:00"))
        history.flush()
        lines = criteria.warnings_while_running(lambda: [TrialRecord(0, run.name, {}, 0)], Run.open(tmp_path, "sweep"))
        told += [(step, line) for line in lines]
    [(step, line)] = told
    assert step == 9
    assert line == (
        "stop={'time_total_s': 60} completes no trial: no report of trial 0 so far has 'time_total_s' as a number; its reports "
        "have loss"
    )


def test_of_hyperband_a_trial_without_rungs_awaits_no_decision_and_the_others_do(tmp_path):
    space, recorded = parse_space({"lr": uniform(0, 1)}), RecordedTrials([], [].append)
    searched = Search(search(scheduler="hyperband", max_t=81), space, 0, recorded, "sweep")
    criteria, told = UnusedCriteria(searched.search_config), []
    for number in (8, 0):  # 8 is the first one of the bracket that trains to max_t, and the first one that completes
        run = Run.open(tmp_path, f"sweep/trial-{number:04d}-0123abcd")
        history = HistoryWriter(run, 1)
        history.append(MetricRecord(1, 80, {"loss": 1.0}, None, "2026-01-01T00:00:00+00:00"))
        history.flush()
        trial = TrialRecord(number, run.name, {}, number, state="completed")
        told += criteria.warnings(trial, searched.first_decision(number), Run.open(tmp_path, "sweep"))
    (line,) = told
    assert line.startswith("scheduler='hyperband' has not decided on trial 0: it reached step=80 without a checkpoint")


def test_a_history_that_cannot_be_read_ends_no_sweep(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no answer")

    monkeypatch.setattr(unused_criteria, "_reports_of", fails)
    criteria = UnusedCriteria(search(stop={"loss": 9}))
    trial = TrialRecord(0, "sweep/trial-0000-0123abcd", {}, 0, state="completed")
    assert [*criteria.warnings(trial, 1.0, Run.open(tmp_path, "sweep"))] == []


def test_a_missing_optuna_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'prefect-torch\[sweep\]'"):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, search=search(), run=run)


@pytest.mark.parametrize("time_attr", ["step", "training_iteration", "epoch"])
def test_a_report_whose_decision_was_not_recorded_is_decided_by_what_it_committed(tmp_path, time_attr):
    """A kill may also have lost the record of that report, or of the one before it, in the history."""
    run = Run.open(tmp_path, "sweep/trial-0000-0123abcd")
    for step in (0, 1, 2):
        job_commit(run, step)
    points = DecisionPoints(time_attr, 2, stop={"loss": 9})
    trial = TrialRecord(0, run.name, {}, 0, milestone=2)
    request, *_ = undecided(run, trial, points)
    first = 1 if time_attr == "training_iteration" else 2
    assert (request.step, request.num_reports, request.metrics["epoch"]) == (first, first + 1, first)
    decided = replace(trial, reports=(RungReport(2, 1.0, request.checkpoint, run=run.name),))
    assert list(undecided(run, decided, replace(points, milestone=4))) == []
    cloned = replace(trial, reports=(RungReport(2, 1.0),), reports_before=2)  # its run begins from another one's checkpoint
    assert [it.step for it in undecided(run, cloned, DecisionPoints("training_iteration", 5))] == [2]
    behind = replace(trial, reports=(RungReport(2, 1.0, "an-id", run="the run before"),))  # the other one has come less far
    assert [it.step for it in undecided(run, behind, DecisionPoints("step", 1))] == [1, 2]
    assert [it.step for it in undecided(run, trial, DecisionPoints(stop={"epoch": 1}))] == [1, 2]
    assert list(undecided(run, trial, None)) == []


def test_what_was_not_decided_is_found_by_one_pass_over_the_history(tmp_path, monkeypatch):
    """Each checkpoint took a pass of its own: minutes at the start of a sweep whose trials have thousands."""
    run, passes = Run.open(tmp_path, "sweep/trial-0000-0123abcd"), []
    for step in range(5):
        job_commit(run, step)

    class History(list):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    monkeypatch.setattr(trial_storage, "read_history", lambda run: History(read_history(run)))
    assert list(undecided(run, TrialRecord(0, run.name, {}, 0), DecisionPoints(TRAINING_ITERATION, 9))) == []
    assert len(passes) == 1


def test_of_reports_that_a_kill_left_undecided_the_first_with_the_metric_is_decided(tmp_path):
    space, recorded = parse_space({"lr": uniform(0, 1)}), RecordedTrials([], [].append)
    searched = Search(search(scheduler="asha", max_t=9), space, 0, recorded, "sweep")
    trial = searched.next_trial()
    for step, metrics in enumerate(({}, {}, {"loss": 1.0}, {"loss": 2.0})):
        job_commit(Run.open(tmp_path, trial.run), step, metrics)
    assert leading._recovered(searched, CheckpointStore.open(tmp_path, "sweep")) == []
    assert [(report.time, report.value) for report in searched.trials[0].reports] == [(2, 1.0)]


@pytest.mark.parametrize(
    "changes",
    [{"scheduler": "asha", "max_t": 9}, {"scheduler": "pbt", "perturbation_interval": 2}, {"max_t": 2}],
)
@pytest.mark.parametrize("has_completed", [True, False])
def test_a_scheduler_of_a_later_start_decides_on_no_report_that_waited_for_none(tmp_path, changes, has_completed):
    """A trial that has trained to its end has the metrics of its end; one that goes on is decided on at its next report."""
    space, entries = parse_space({"lr": uniform(0, 1)}), []
    trial = Search(search(), space, 0, RecordedTrials([], entries.append), "sweep").next_trial()
    run = Run.open(tmp_path, trial.run)
    claimed = claim_attempt(run, Owner.current("a-flow-run"), world_size=1)
    for step in (1, 2, 3):
        job_commit(run, step, {"loss": 1.0 / step})
    if has_completed:
        write_outcome(run, Outcome(claimed.number, "completed", "a-flow-run", return_value={"loss": 0.1}))
    events = [decode_event(entry, "test") for entry in entries]
    searched = Search(search(**changes), space, 0, RecordedTrials(events, entries.append), "sweep")
    goes_on = leading._recovered(searched, CheckpointStore.open(tmp_path, "sweep"))
    if has_completed:
        assert (searched.trials[0].state, searched.trials[0].metrics) == ("completed", {"loss": 0.1})
    elif "scheduler" in changes:
        assert goes_on == [trial]
    else:  # a limit needs no scheduler
        assert (goes_on, searched.trials[0].reason) == ([], "step=2 has reached 2")


def test_each_report_of_a_step_counts_and_a_step_that_was_trained_again_once(tmp_path):
    run = Run.open(tmp_path, "sweep/trial-0000-0123abcd")
    for attempt, steps in ((1, (0, 0, 1)), (2, (1, 1, 2))):
        writer = HistoryWriter(run, attempt)
        for step in steps:
            writer.append(MetricRecord(attempt, step, {"loss": 1.0}, None, "2026-01-01T00:00:00+00:00"))
        writer.close()
    job_commit(run, 2)
    assert count_reports(run) == 5


def test_a_stopped_trial_has_metrics_that_only_other_reports_have(run):
    asked = search(num_trials=1, sampler=None, stop={"training_iteration": 4})
    result = sweep("sweep_trainings:report_apart", {"loss": grid([3, 4])}, search=asked, run=run)
    assert result.best.metrics == {"loss": 3, "size": 1}
    assert [record.step for record in result.best.result.history] == [0, 0, 1, 1]


def job_commit(run: Run, step: int, metrics: dict | None = None) -> None:
    checkpoint_id = new_id(1, step)
    reported = {"loss": 1.0, "epoch": step} if metrics is None else metrics
    manifest = Manifest(checkpoint_id, step, 1, reported, (), 1, None, datetime.now(timezone.utc))
    run.storage.put_bytes(run.layout.manifest(checkpoint_id), manifest.encode())
