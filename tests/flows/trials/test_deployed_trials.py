"""Trials as flow runs of a deployment that a process serves."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from commits import commit
from forked_programs import Popen
from owners import OWNERS
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.logging import disable_run_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    temporary_settings,
)
from prefect.states import Cancelled, Cancelling, Crashed, Failed, Pending, Running, Scheduled, Suspended
from prefect_servers import api_that_answers, wait_until
from prefect_torch.ckpt import FencedError, StorageError, StorageSpec
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.deployments import make_deployment
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    SweepFailedError,
    choice,
    sweep,
    uniform,
)
from prefect_torch.flows.sweeps.asked_decisions import are_questions_expected, expect_questions
from prefect_torch.flows.sweeps.definition import define, store_definition
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.journal.journal import Journal
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.trials import deployed_trials, trial_flow_runs
from prefect_torch.flows.trials.deployed_trials import DeployedTrials
from prefect_torch.flows.trials.left_trials import LeftTrials
from prefect_torch.flows.trials.trial_flow_runs import FlowRunWatch
from prefect_torch.flows.trials.trial_runs import Training
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.training import backoff

SUPPORT = Path(__file__).parents[2] / "support"
NAME = "trials-of-a-test"
CLIMB = f"{SUPPORT / 'sweep_trainings.py'}:climb"
LONGEST_END_S = 30


@pytest.fixture
def served():
    env = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    command = [sys.executable, SUPPORT / "serve_trials.py", NAME]
    with (
        Popen(command, env=env, start_new_session=True) as server,
        get_client(sync_client=True) as client,
    ):
        try:
            wait_until(lambda: is_known(client), "the deployment")
            yield f"train/{NAME}"
        finally:
            end_group(server)


def end_group(server) -> None:
    """Let the process end by itself, and then leave nothing of what it started, which has its process group."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(LONGEST_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def is_known(client) -> bool:
    try:
        return client.read_deployment_by_name(f"train/{NAME}") is not None
    except ObjectNotFound:
        return False


def search(**changes) -> SearchConfig:
    given = {"metric": "loss", "num_trials": 2, "sampler": "random", "initial_points": [{"lr": 0.9}, {"lr": 0.4}], **changes}
    return SearchConfig(**{**given, "initial_points": given["initial_points"][: given["num_trials"]]})


def test_trials_are_flow_runs_of_a_deployment_that_pause_and_go_on_from_their_checkpoints(served, tmp_path):
    run = RunConfig(name="deployed", storage=str(tmp_path))
    chosen = search(scheduler="asha", max_t=3, max_concurrent=2)
    result = sweep(CLIMB, {"lr": uniform(0, 1)}, {"epochs": 9}, chosen, run=run, trials_on=served)
    assert [trial.state for trial in result.trials] == ["paused", "completed"]
    assert [trial.reason for trial in result.trials] == ["waits at rung 1 (at 1)", "step=3 has reached 3"]
    assert [trial.checkpoint.step for trial in result.trials] == [1, 3]
    attempts = result.best.result.attempts
    assert [record.step for record in result.best.result.history] == [0, 1, 2, 3]  # none was trained twice
    with get_client(sync_client=True) as client:
        of_deployment = DeploymentFilter(id=DeploymentFilterId(any_=[client.read_deployment_by_name(served).id]))

        def runs():
            return client.read_flow_runs(deployment_filter=of_deployment)

        wait_until(lambda: all(it.state is not None and it.state.is_final() for it in runs()), "every flow run is over")
        found = runs()
    assert [it.name for it in found].count(result.best.run) == attempts
    assert {it.state_name for it in found} == {"Completed"}
    assert list((tmp_path / "deployed").glob("a*ed/*")) == []


WRONG = [
    ("gpu", {}, r"trials_on='gpu': give a deployment of the flow 'train', such as 'train/gpu'"),
    ("train/nowhere", {}, "trials_on='train/nowhere': there is no deployment 'train/nowhere'; those deployed are: "),
    ("train/gpu", {"storage": "memory://here"}, "needs a storage that all machines reach themselves"),
    ("train/gpu", {"storage": CheckpointStorage(location="s3://bucket")}, "the storage is an unsaved block, and trials need"),
]


def test_more_trials_at_once_than_an_answer_of_the_api_has_rows_are_all_seen_to_end(prefect_server, tmp_path, monkeypatch):
    monkeypatch.setattr(DeployedTrials, "_end_of", lambda *_: None)
    sweep_run = Run.open(str(tmp_path), "many")
    trials = DeployedTrials(None, None, sweep_run, lambda: None, "train/many", "")
    trials._running = {it: (TrialRecord(it, f"many/trial-{it:04d}-{it:08x}", {}, it), uuid4()) for it in range(201)}
    assert trials.take_ended(0).keys() == set(range(201))


class Api:
    """Prefect's API with one flow run, or without an answer.

    Attributes:
        flow_run: The flow run.
        tagged: The flow runs of its trial that are found by their tag.
        is_away: Whether it is away.
        looks: The number of requests.
        cancelled: The flow runs that are to be cancelled.

    """

    def __init__(self):
        self.flow_run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a-flow-run", state=Running())
        self.tagged = []
        self.is_away = False
        self.looks = 0
        self.cancelled = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read_flow_runs(self, *, flow_run_filter, limit, offset):
        assert (limit, offset) == (200, 0)
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0, "no trial would have an answer meanwhile"
        self.looks += 1
        if self.is_away:
            raise httpx.ConnectError("refused")
        return [self.flow_run] if flow_run_filter.tags is None else self.tagged

    def set_flow_run_state(self, flow_run_id, state):
        assert state.is_cancelling()
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0, "the next trial would wait meanwhile"
        if self.is_away:
            raise httpx.ConnectError("refused")
        self.cancelled.append(flow_run_id)


@pytest.fixture
def api(monkeypatch):
    made = Api()
    monkeypatch.setattr(trial_flow_runs, "get_client", lambda **_: made)
    with disable_run_logger():
        yield made


@pytest.fixture
def trials(tmp_path):
    training = SimpleNamespace(storage=StorageSpec(str(tmp_path)), failure=FailureConfig())
    sweep = Run.open(str(tmp_path), "sweep")
    attempt = claim_attempt(sweep, Owner.current("the sweep's"), world_size=0)
    return DeployedTrials(training, None, sweep, partial(check_fence, sweep, claim_key(sweep, attempt)), "train/gpu", "")


TRIAL = TrialRecord(0, "sweep/trial-0000-0123abcd", {}, 0)


def test_a_trial_starts_once_the_api_answers_and_a_request_whose_answer_was_lost_is_recognized(api, trials, monkeypatch):
    keys = []

    def deploy(*, idempotency_key, **_):
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise httpx.ReadTimeout("no answer")
        return api.flow_run

    monkeypatch.setattr(deployed_trials, "run_deployment", deploy)
    monkeypatch.setattr(DeployedTrials, "_parameters", lambda *_: {})
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.01)
    api.is_away = True
    trials.start(TRIAL)
    assert (trials.num_running(), trials.running_runs(), keys) == (1, {TRIAL.run}, [])
    api.is_away = False

    def has_started():
        assert trials.take_ended(0) == {}
        return trials._running

    wait_until(has_started, "the trial has a flow run", every_s=0.01)
    assert len(keys) == 2
    assert keys[0] == keys[1]
    trials.start(TRIAL)
    assert keys[2] != keys[0], "it is another start"


def test_one_trial_of_all_that_are_to_start_asks_for_its_flow_run_after_each_pause_while_the_api_is_away(trials, monkeypatch):
    """A request whose packets vanish takes a minute, and no trial gets an answer meanwhile: eight of them took too long."""
    clock, asked, is_away = SimpleNamespace(now_s=0.0), [], True

    def flow_run_of(_, start):
        asked.append(start.trial.number)
        if not is_away:
            return uuid4()
        clock.now_s += 60.0
        raise httpx.ConnectTimeout("no answer")

    monkeypatch.setattr(DeployedTrials, "_flow_run_of", flow_run_of)
    monkeypatch.setattr(deployed_trials, "Backoff", lambda: backoff.Backoff(lambda: clock.now_s))
    with disable_run_logger():
        for number in range(8):
            trials.start(replace(TRIAL, number=number))
        assert asked == [0]
        for _ in range(3):
            clock.now_s += 3.0
            trials._start_due()
            trials._start_due()
        assert asked == [0, 0, 1, 2]
        is_away = False
        clock.now_s += 30.0
        trials._start_due()
    assert asked[4:] == [3, 4, 5, 6, 7, 0, 1, 2]
    assert sorted(trials._running) == list(range(8))


@pytest.mark.parametrize(
    "error", [ObjectNotFound(None), httpx.HTTPStatusError("403 Forbidden", request=None, response=httpx.Response(403))]
)
def test_a_trial_that_prefect_refuses_ends_the_sweep_with_its_own_error(api, trials, monkeypatch, error):
    def deploy(**_):
        raise error

    monkeypatch.setattr(deployed_trials, "run_deployment", deploy)
    monkeypatch.setattr(DeployedTrials, "_parameters", lambda *_: {})
    with pytest.raises(SweepFailedError, match=r"trial 0 has no flow run.*goes on when it is started again"):
        trials.start(TRIAL)


@pytest.mark.parametrize("page", [b"<html>Please log in</html>", "<html>Zug\u00e4nge</html>".encode("latin-1"), b""])
def test_a_trial_whose_start_gets_a_page_of_a_proxy_instead_of_an_answer_waits(trials, monkeypatch, page):
    monkeypatch.setattr(DeployedTrials, "_parameters", lambda *_: {})
    checked = {PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False}  # as it was when the sweep began
    with disable_run_logger(), api_that_answers(200, page), temporary_settings(checked):
        trials.start(TRIAL)
        assert trials.running_runs() == {TRIAL.run}
        assert trials._start_pauses.wait_s() > 0
        assert trials._goes_on_elsewhere(TRIAL), "nobody knows"
        trial_flow_runs.cancel(TRIAL, uuid4(), "the sweep ends")
        assert trial_flow_runs.cancel_flow_runs([TRIAL], "the sweep begins again") == [TRIAL]


def test_a_sweep_that_was_overtaken_leaves_the_trials_to_its_successor(api, trials, tmp_path):
    trials._running = {0: (TRIAL, api.flow_run.id)}
    trials.terminate(KeyboardInterrupt())
    assert api.cancelled == [api.flow_run.id]
    claim_attempt(Run.open(str(tmp_path), "sweep"), Owner.current("the next"), world_size=0)
    trials.terminate(KeyboardInterrupt())
    assert api.cancelled == [api.flow_run.id]
    assert trials.num_running() == 0


def test_a_trial_whose_cancellation_is_refused_is_cancelled_later_and_keeps_no_other_waiting(api, trials, monkeypatch):
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(trial_flow_runs, "last_sign", lambda *_: None)
    trials._running = {0: (TRIAL, api.flow_run.id), 1: (replace(TRIAL, number=1), uuid4())}
    ids = [flow_run_id for _, flow_run_id in trials._running.values()]
    api.is_away = True
    trials.terminate(KeyboardInterrupt())
    assert api.cancelled == []
    api.is_away = False

    def are_cancelled():
        trials.take_ended(0)
        return api.cancelled

    wait_until(are_cancelled, "the cancellations", every_s=0.01)
    trials.take_ended(0)
    assert api.cancelled == ids


def test_trials_have_answers_while_the_api_is_away_which_is_asked_rarely(api, trials, monkeypatch):
    answered, now_s = [], [0.0]

    def sleep(seconds):
        now_s[0] += seconds

    monkeypatch.setattr(deployed_trials, "answer_questions", lambda *_: answered.append(0) or 0)
    monkeypatch.setattr(deployed_trials, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    trials._running = {0: (TRIAL, api.flow_run.id)}
    api.is_away = True
    assert trials.take_ended(2.0) == {}
    assert (now_s, len(answered)) == ([2.0], 5)
    assert api.looks == 1
    trials._give_up_s = 0.0  # it has been terminated, and the time for that is over
    assert trials.take_ended(2.0) == {0: None}


def test_a_storage_that_is_away_ends_no_trial_and_keeps_no_sweep_from_its_end(api, trials, monkeypatch):
    away = []

    def is_away(*_):
        away.append(0)
        raise StorageError("no answer")

    monkeypatch.setattr(deployed_trials, "answer_questions", is_away)
    monkeypatch.setattr(trial_flow_runs, "read_status", is_away)
    trials._running = {0: (TRIAL, api.flow_run.id)}
    assert trials.take_ended(0) == {}
    assert (len(away), trials.num_running()) == (2, 1)
    trials.terminate(RuntimeError("boom"))
    assert api.cancelled == [api.flow_run.id]
    api.flow_run.state = Cancelled()
    assert trials.take_ended(0) == {0: None}
    assert len(away) == 3


@pytest.mark.parametrize(
    ("has_committed", "failure", "most"),
    [(False, {}, 3), (True, {}, None), (True, {"max_preemptions": 1}, 1), (False, {"max_infrastructure_failures": 0}, 0)],
)
def test_a_lost_flow_run_that_has_committed_a_checkpoint_was_preempted(api, trials, tmp_path, has_committed, failure, most):
    trials._training.failure = FailureConfig(**failure)
    run, ends = Run.open(str(tmp_path), TRIAL.run), []
    for step in range(6):
        lost = api.flow_run = FlowRun(id=uuid4(), flow_id=uuid4(), name="lost", state=Crashed(message="evicted"))
        attempt = claim_attempt(run, Owner.current(str(lost.id)), world_size=1)
        if has_committed:
            commit(run, step, attempt=attempt.number)
        trials._running = {0: (TRIAL, lost.id)}
        ends += trials.take_ended(0).values()
    assert [end is None for end in ends] == [most is None or place < most for place in range(6)]
    if most is not None:
        name = "max_preemptions" if has_committed else "max_infrastructure_failures"
        assert ends[most].reason == f"its flow run was lost {most + 1} times, with {name}={most}"


@pytest.mark.parametrize(("kind", "most"), [("preemption", 1), (None, None)])
def test_a_preemption_that_a_flow_run_has_recorded_counts_as_that(api, trials, tmp_path, kind, most):
    """But not that it was suspended or gave way, which has no kind; nor with the losses that come before a checkpoint."""
    trials._training.failure = FailureConfig(max_preemptions=1, max_infrastructure_failures=0)
    run, ends = Run.open(str(tmp_path), TRIAL.run), []
    for _ in range(3):
        api.flow_run = FlowRun(id=uuid4(), flow_id=uuid4(), name="preempted", state=Crashed())
        attempt = claim_attempt(run, Owner.current(str(api.flow_run.id)), world_size=1)
        write_outcome(run, Outcome(attempt.number, "preempted", str(api.flow_run.id), kind))
        trials._running = {0: (TRIAL, api.flow_run.id)}
        ends += trials.take_ended(0).values()
    assert [end is None for end in ends] == [most is None or place < most for place in range(3)]


def test_a_flow_run_whose_ranks_were_terminated_too_often_has_failed(api, trials, tmp_path):
    api.flow_run.state = Failed()
    run, flow_run_id = Run.open(str(tmp_path), TRIAL.run), str(api.flow_run.id)
    attempt = claim_attempt(run, Owner.current(flow_run_id), world_size=1)
    write_outcome(run, Outcome(attempt.number, "failed", flow_run_id, "preemption", "rank 0 was ended by SIGTERM"))
    trials._running = {0: (TRIAL, api.flow_run.id)}
    assert trials.take_ended(0) == {0: TrialEnd("failed", "rank 0 was ended by SIGTERM")}


@pytest.mark.parametrize("kind", ["none, since it was killed", "preemption", None])
def test_a_cancelled_flow_run_fails_its_trial_however_its_process_ended(api, trials, tmp_path, kind):
    """A worker kills a process that hangs; Prefect may not answer the process; one that was suspended has recorded no kind."""
    api.flow_run.state = Cancelled()
    run, flow_run_id = Run.open(str(tmp_path), TRIAL.run), str(api.flow_run.id)
    attempt = claim_attempt(run, Owner.current(flow_run_id), world_size=1)
    commit(run, 1, attempt=attempt.number)
    if kind in ("preemption", None):
        write_outcome(run, Outcome(attempt.number, "preempted", flow_run_id, kind))
    trials._running = {0: (TRIAL, api.flow_run.id)}
    assert trials.take_ended(0) == {0: TrialEnd("failed", "flow run 'a-flow-run' of train/gpu was cancelled", {"loss": 0.0})}


def test_the_answered_questions_of_a_flow_run_that_has_ended_are_not_looked_at_again(api, trials, tmp_path):
    sweep_run, token = Run.open(str(tmp_path), "sweep"), f"{TRIAL.run.partition('/')[2]}-0123456789abcdef"
    for key in (sweep_run.layout.asked(token), sweep_run.layout.answered(token)):
        sweep_run.records.put_json(key, {"points": None})
    api.flow_run.state = Crashed(message="killed")
    trials._search = SimpleNamespace(trials={})
    trials._running = {0: (TRIAL, api.flow_run.id)}
    assert trials.take_ended(0) == {0: None}
    assert sweep_run.keys(sweep_run.layout.all_asked) == []


def test_a_trial_that_another_flow_run_trains_goes_on_in_that_one(api, trials):
    api.flow_run.state = Failed(message="attempt 1 was overtaken by attempt 2")
    api.tagged = [api.flow_run.model_copy(update={"id": uuid4(), "state": Running()})]
    trials._running = {0: (TRIAL, api.flow_run.id)}
    assert trials.take_ended(0) == {0: None}
    api.tagged = [api.flow_run]
    trials._running = {0: (TRIAL, api.flow_run.id)}
    (end,) = trials.take_ended(0).values()
    assert end.reason.endswith("of train/gpu ended before it trained: attempt 1 was overtaken by attempt 2")


@pytest.fixture(scope="module")
def unserved():
    """Two deployments whose flow runs wait for ever."""
    return {name: make_deployment(name, "json:loads").apply() for name in ("queue-a", "queue-b")}


def trials_of(sweep: Run, deployment: str, **changes) -> DeployedTrials:
    storage = sweep.spec
    training = Training(
        **{
            "pack": lambda _: None,
            "storage": storage,
            "config": {"y": (5, 0.1)},
            "scaling": ScalingConfig(),
            "run_config": RunConfig(storage=storage.url),
            "checkpoint": CheckpointConfig(),
            "failure": FailureConfig(),
            **changes,
        }
    )
    return DeployedTrials(training, None, sweep, lambda: None, deployment, "json:loads")


def start(trials, trial):
    """Start a trial, and return the id of its flow run; a busy server may refuse a request, which is tried again."""
    trials.start(trial)
    while not trials._running:
        trials.take_ended(0.1)
    return trials._running[trial.number][1]


def test_a_deployment_of_an_older_version_takes_trials_without_the_settings_that_it_does_not_know(tmp_path):
    older = make_deployment("older", "json:loads")
    for config in ("ScalingConfig", "RunConfig", "CheckpointConfig", "FailureConfig"):
        known = older._parameter_openapi_schema.definitions[config]["properties"]
        for name in known.keys() - {"name", "resume", "takeover", "storage", "num_workers"}:
            del known[name]
    older.apply()
    given = {"scaling": ScalingConfig(num_workers=2), "run_config": RunConfig(name="sweep", storage=str(tmp_path))}
    trial = TrialRecord(0, "older/trial-0000-0123abcd", {}, 0)
    with disable_run_logger(), get_client(sync_client=True) as client:
        begun = start(trials_of(Run.open(str(tmp_path), "older"), "train/older", **given), trial)
        parameters = client.read_flow_run(begun).parameters
    run = {"name": trial.run, "resume": "auto", "takeover": True, "storage": str(tmp_path)}
    assert {name: parameters[name] for name in ("run", "scaling")} == {"run": run, "scaling": {"num_workers": 2}}
    assert parameters["checkpoint"] == parameters["failure"] == {}  # in place of the deployment's own


@pytest.mark.parametrize(
    ("space", "config", "problem"),
    [
        ({}, {"clip": math.inf}, "config['clip'] is inf"),
        ({"clip": choice([1.0, math.inf])}, {}, "space['clip']['values'][1] is inf"),
        ({"a": {"b": 2**70}}, {}, "space['a']['b'] is an integer of more than 64 bits"),
        ({"a": choice([{"b": choice(["\0"])}])}, {}, "space['a']['values'][0]['b']['values'][0] has a lone surrogate or a NUL"),
    ],
    ids=range(4),
)
def test_a_value_that_prefect_would_change_is_refused_before_any_trial_has_drawn_it(unserved, tmp_path, space, config, problem):
    run = RunConfig(name="refused", storage=str(tmp_path))
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}, which Prefect's API does not return as it is"):
        sweep("json:loads", {"lr": uniform(0, 1), **space}, config, search(num_trials=1), run=run, trials_on="train/queue-a")
    assert list(tmp_path.iterdir()) == []


PRESENT_STARTS = {
    "same": ("train/queue-a", {}),
    "deployment": ("train/queue-b", {}),
    "config": ("train/queue-a", {"config": {"y": (7, 0.1)}}),
    "failure": ("train/queue-a", {"failure": FailureConfig(max_failures=3)}),
    "scaling": ("train/queue-a", {"scaling": ScalingConfig(num_workers=2)}),
}


@pytest.mark.parametrize("change", PRESENT_STARTS)
def test_a_flow_run_that_outlived_its_sweep_is_taken_over_if_another_one_would_be_the_same(unserved, tmp_path, change):
    deployment, changes = PRESENT_STARTS[change]
    sweep_run = Run.open(str(tmp_path), change)
    trial = TrialRecord(0, f"{change}/trial-0000-0123abcd", {}, 0)
    with disable_run_logger(), get_client(sync_client=True) as client:
        begun = start(trials_of(sweep_run, "train/queue-a"), trial)
        present = start(trials_of(sweep_run, deployment, **changes), trial)
        assert (present == begun) == (change == "same")
        assert client.read_flow_run(begun).state.is_scheduled() == (change == "same")
        flow_run = client.read_flow_run(present)
        assert flow_run.deployment_id == unserved[deployment.rpartition("/")[2]]
        assert flow_run.parameters["failure"] == ({"max_failures": 3} if change == "failure" else {})
        start(trials_of(sweep_run, deployment, **changes), trial)
        assert [it.id for it in trial_flow_runs.find_alive(trial)] == [present]


def test_a_flow_run_with_all_settings_is_that_of_a_start_which_gives_none_of_the_defaults(unserved, tmp_path):
    """An earlier version gave a trial's flow run the defaults, too."""
    sweep_run, trial = Run.open(str(tmp_path), "whole"), TrialRecord(0, "whole/trial-0000-0123abcd", {}, 0)
    given = {
        "scaling": ScalingConfig(num_workers=(1, 2)),
        "run_config": RunConfig(storage=str(tmp_path)),
        "checkpoint": CheckpointConfig(num_to_keep=2),
        "failure": FailureConfig(),
    }
    whole = {name: type(config)(**dict(config)) for name, config in given.items()}
    with disable_run_logger(), get_client(sync_client=True) as client:
        begun = start(trials_of(sweep_run, "train/queue-a", **whole), trial)
        assert len(client.read_flow_run(begun).parameters["failure"]) > 1
        assert start(trials_of(sweep_run, "train/queue-a", **given), trial) == begun
        assert start(trials_of(sweep_run, "train/queue-a", **whole), trial) == begun


@pytest.mark.parametrize("unknown", [{"failure": {"max_surprises": 3}}, {"failure": None}], ids=["setting", "config"])
def test_a_flow_run_whose_settings_this_version_does_not_know_is_cancelled(unserved, tmp_path, unknown):
    trials = trials_of(Run.open(str(tmp_path), "unknown"), "train/queue-a")
    trial = TrialRecord(0, "unknown/trial-0000-0123abcd", {}, 0)
    parameters = {**trials._parameters(trial), **unknown}
    assert not trials._would_be_same(SimpleNamespace(parameters=parameters), trials._parameters(trial))


@pytest.mark.usefixtures("unserved")
def test_a_sweep_whose_flow_runs_nothing_takes_says_so_once(tmp_path, monkeypatch, caplog):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(trial_flow_runs, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    led, trial = Run.open(str(tmp_path), "untaken"), TrialRecord(0, "untaken/trial-0000-0123abcd", {}, 0)
    with disable_run_logger():
        begun = start(trials_of(led, "train/queue-a"), trial)
    watch = FlowRunWatch(led)
    for clock.now_s in (100.0, 159.0, 160.0, 400.0):
        wait_until(lambda: watch.look([(trial, begun)]) is not None, "an answer of the server", every_s=0.01)
        told = [record.getMessage() for record in caplog.records if "nothing has taken" in record.getMessage()]
        assert len(told) == (clock.now_s >= 160.0)
    assert told[0].startswith("no trial runs, and nothing has taken 1 flow run, such as 'untaken/trial-0000-0123abcd', for")


@pytest.mark.usefixtures("unserved")
def test_a_trial_can_be_suspended_and_is_not_cancelled_with_the_sweep_that_has_started_it(client, tmp_path):
    """Of subflow runs, Prefect refuses the first, and does the second, though another start has taken them over."""
    trial = TrialRecord(0, "suspended/trial-0000-0123abcd", {}, 0)

    @flow
    def sweeping():
        return start(trials_of(Run.open(str(tmp_path), "suspended"), "train/queue-a"), trial)

    started = client.read_flow_run(sweeping())
    assert started.parent_task_run_id is None
    client.set_flow_run_state(started.id, Running(), force=True)
    assert client.set_flow_run_state(started.id, Suspended()).state.is_paused()


def test_a_flow_run_whose_process_is_gone_for_a_while_is_crashed(api, tmp_path, monkeypatch):
    clock, crashed, lost = SimpleNamespace(now_s=0.0), [], {}
    monkeypatch.setattr(trial_flow_runs, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(api, "set_flow_run_state", lambda *given, force: crashed.append(given), raising=False)
    owner = replace(OWNERS["lost"], flow_run_id=str(api.flow_run.id))
    claim_attempt(Run.open(str(tmp_path), TRIAL.run), owner, world_size=1)
    watch = FlowRunWatch(Run.open(tmp_path, "sweep"))
    for clock.now_s in (100.0, 103.0, 105.0, 109.0, 110.0):
        _, lost[clock.now_s] = watch.look([(TRIAL, api.flow_run.id)])
    assert lost == {100.0: set(), 103.0: set(), 105.0: set(), 109.0: set(), 110.0: {api.flow_run.id}}
    assert [(flow_run_id, state.is_crashed()) for flow_run_id, state in crashed] == [(api.flow_run.id, True)]


@pytest.mark.parametrize("state", [Suspended(), Scheduled(name="Yielded"), Pending()])
def test_a_flow_run_that_has_left_its_machine_is_not_lost(api, tmp_path, monkeypatch, state):
    """A trial that somebody paused was set to Crashed, and another flow run continued it immediately."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(trial_flow_runs, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(trial_flow_runs, "last_sign", lambda *_: None)
    owner = replace(OWNERS["lost"], flow_run_id=str(api.flow_run.id))
    claim_attempt(Run.open(str(tmp_path), TRIAL.run), owner, world_size=1)
    api.flow_run = api.flow_run.model_copy(update={"state": state})
    watch = FlowRunWatch(Run.open(tmp_path, "sweep"))
    for clock.now_s in range(100, 200, 10):
        assert watch.look([(TRIAL, api.flow_run.id)])[1] == set()


def test_many_flow_runs_are_looked_at_concurrently(api, tmp_path, monkeypatch):
    together, waits = threading.Barrier(10), []

    def wait(*_):
        waits.append(PREFECT_CLIENT_MAX_RETRIES.value())
        together.wait(10)

    monkeypatch.setattr(trial_flow_runs, "read_status", wait)
    monkeypatch.setattr(trial_flow_runs, "last_sign", wait)
    found = {it: api.flow_run.model_copy(update={"id": it}) for it in (uuid4() for _ in range(20))}
    trials = {it: TrialRecord(number, f"many/trial-{number:04d}-0123abcd", {}, number) for number, it in enumerate(found)}
    with without_retries():
        assert FlowRunWatch(Run.open(tmp_path, "sweep"))._lost(api, trials, found) == set()
    assert len(waits) == 40
    assert set(waits[20:]) == {0}, "the requests are not repeated"


def test_a_flow_run_of_another_machine_without_heartbeats_is_crashed(api, tmp_path, monkeypatch):
    clock, crashed, heartbeats = SimpleNamespace(now_s=0.0), [], []
    monkeypatch.setattr(trial_flow_runs, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(trial_flow_runs, "Backoff", lambda: SimpleNamespace(wait_s=lambda: 0.0, record=lambda: None))
    monkeypatch.setattr(trial_flow_runs, "last_sign", lambda *_: heartbeats[-1] if heartbeats else None)
    monkeypatch.setattr(api, "set_flow_run_state", lambda *given, force: crashed.append(given), raising=False)
    owner = replace(OWNERS["unknown"], flow_run_id=str(api.flow_run.id))
    claim_attempt(Run.open(str(tmp_path), TRIAL.run), owner, world_size=1)
    watch = FlowRunWatch(Run.open(tmp_path, "sweep"))

    def is_lost_in(seconds):
        until_s = clock.now_s + seconds
        while clock.now_s < until_s:
            clock.now_s += 10.0
            if (seen := watch.look([(TRIAL, api.flow_run.id)])) is not None and seen[1]:
                return True
        return False

    assert not is_lost_in(3000), "without any heartbeat, silence means nothing"
    for _ in range(10):
        heartbeats.append(SimpleNamespace(id=uuid4()))
        assert not is_lost_in(180)
    api.is_away = True
    assert not is_lost_in(3000)
    api.is_away = False
    assert not is_lost_in(500), "the heartbeat that came during the outage is unknown"
    heartbeats.append(SimpleNamespace(id=uuid4()))
    assert not is_lost_in(520)
    assert is_lost_in(100)
    assert [(flow_run_id, state.is_crashed()) for flow_run_id, state in crashed] == [(api.flow_run.id, True)]


@pytest.mark.parametrize(
    ("state", "pool", "is_lost"), [(Pending(), None, True), (Pending(), "k", False), (Running(), "k", True)]
)
def test_a_flow_run_whose_machine_vanished_before_its_claim_is_crashed(api, tmp_path, monkeypatch, state, pool, is_lost):
    clock, crashed, seen = SimpleNamespace(now_s=0.0), [], False
    monkeypatch.setattr(trial_flow_runs, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(trial_flow_runs, "last_sign", lambda *_: None)
    monkeypatch.setattr(api, "set_flow_run_state", lambda *given, force: crashed.append(given), raising=False)
    monkeypatch.setattr(api, "read_work_pool", lambda name: SimpleNamespace(type="kubernetes"), raising=False)
    api.flow_run = api.flow_run.model_copy(update={"state": state, "work_pool_name": pool})
    watch = FlowRunWatch(Run.open(tmp_path, "sweep"))
    while clock.now_s < 1900 and not seen:
        clock.now_s += 30.0
        seen = bool(watch.look([(TRIAL, api.flow_run.id)])[1])
        assert not seen or clock.now_s > 1800
    assert (seen, len(crashed)) == (is_lost, int(is_lost))


def test_a_sweep_that_was_overtaken_answers_no_trial(api, trials, tmp_path):
    led = Run.open(str(tmp_path), "sweep")
    claim_attempt(led, Owner.current("the next"), world_size=0)
    trials._search = SimpleNamespace(trials={0: replace(TRIAL, state="paused")})  # which the next leader has resumed
    trials._running = {1: (replace(TRIAL, number=1), api.flow_run.id)}
    led.records.put_json(led.layout.asked(f"{TRIAL.run.rpartition('/')[2]}-0123abcd"), {"points": True})
    with pytest.raises(FencedError):
        trials.take_ended(0.0)
    assert led.keys(led.layout.all_answered) == []


def test_a_sweep_that_was_overtaken_starts_nothing(api, trials, tmp_path, monkeypatch):
    monkeypatch.setattr(deployed_trials, "run_deployment", lambda **_: pytest.fail("it has started a flow run"))
    claim_attempt(Run.open(str(tmp_path), "sweep"), Owner.current("the next"), world_size=0)
    with pytest.raises(FencedError):
        trials.start(TRIAL)


def test_a_flow_run_that_is_being_cancelled_is_not_adopted(api, trials, monkeypatch):
    monkeypatch.setattr(DeployedTrials, "_parameters", lambda *_: {"config": {}})
    ending = api.flow_run.model_copy(update={"id": uuid4(), "state": Cancelling(), "parameters": {"config": {}}})
    api.tagged = [ending]
    monkeypatch.setattr(deployed_trials, "run_deployment", lambda **_: api.flow_run)
    trials.start(TRIAL)
    assert [it[1] for it in trials._running.values()] == [api.flow_run.id]


def test_flow_runs_of_a_sweep_that_begins_again_are_cancelled(api, tmp_path):
    led = Run.open(str(tmp_path), "sweep")
    running, ended = TRIAL, replace(TRIAL, number=1, state="completed")
    api.tagged = [api.flow_run, api.flow_run.model_copy(update={"id": uuid4(), "state": Cancelling()})]
    with without_retries():
        LeftTrials(led, are_deployed=False).cancel_former([running, ended])
        assert (api.looks, api.cancelled) == (0, []), "its trials were no flow runs of a deployment"
        expect_questions(led, are_expected=True)
        LeftTrials(led, are_deployed=False).cancel_former([running, ended])
        assert (api.looks, api.cancelled) == (1, [api.flow_run.id])
        api.is_away = True
        LeftTrials(led, are_deployed=False).cancel_former([running])
        assert api.cancelled == [api.flow_run.id]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_queued_flow_run_trains_no_trial_of_a_sweep_that_goes_on_in_its_own_process(unserved, tmp_path, monkeypatch, is_away):
    """Also if Prefect's API is away when the sweep starts again: the flow run is cancelled later."""
    led, space = Run.open(str(tmp_path), "left"), {"lr": uniform(0, 1)}
    begun = claim_attempt(led, Owner.current("a-flow-run"), world_size=0)
    write_outcome(led, Outcome(begun.number, "preempted", "a-flow-run"))
    chosen = search(num_trials=1)
    store_definition(led, define(CLIMB, space, {"epochs": 1}, chosen))
    journal = Journal(led, claim_key(led, begun), 0)
    searched = Search(chosen, parse_space(space), 0, RecordedTrials([], journal.append), "left")
    searched.lead(begun.number)
    expect_questions(led, are_expected=True)
    trial = searched.next_trial()
    with disable_run_logger():
        queued = start(trials_of(led, "train/queue-a"), trial)
    looks, find_alive = [], trial_flow_runs.find_alive

    def find(trial):
        looks.append(PREFECT_CLIENT_MAX_RETRIES.value())
        if is_away and len(looks) == 1:
            raise httpx.ConnectError("no answer")
        return find_alive(trial)

    monkeypatch.setattr(trial_flow_runs, "find_alive", find)
    run = RunConfig(name="left", storage=str(tmp_path))
    result = sweep(CLIMB, space, {"epochs": 1}, chosen, run=run)
    assert looks == ([0, 0] if is_away else [0]), "none waits for the API"
    assert not are_questions_expected(led)
    assert [(it.run, it.state) for it in result.trials] == [(trial.run, "completed")]
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(queued).state.is_cancelled()


@pytest.mark.parametrize(("trials_on", "changes", "problem"), WRONG, ids=range(len(WRONG)))
def test_a_deployment_that_cannot_run_trials_is_refused_at_once(tmp_path, trials_on, changes, problem):
    run = RunConfig(**{"name": "deployed", "storage": str(tmp_path), **changes})
    with pytest.raises(ValueError, match=problem):
        sweep("sweep_trainings:climb", {"lr": uniform(0, 1)}, search=search(), run=run, trials_on=trials_on)
    assert list(tmp_path.iterdir()) == []
