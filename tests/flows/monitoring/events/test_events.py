"""What automations are told of a training, read from a real server."""

import math
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from prefect import flow
from prefect.events import Event
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import Proxy
from prefect_torch.ckpt import CheckpointStore, Plan, RetentionPolicy, StorageError
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.monitoring.events import observer, sweep_events
from prefect_torch.flows.monitoring.events import outbox as module
from prefect_torch.flows.monitoring.events.outbox import EventOutbox
from prefect_torch.flows.monitoring.events.sweep_events import SweepEvents
from prefect_torch.flows.sweeps.journal.events import Cloned, Source, TrialResumed
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted, CheckpointQuarantined, CheckpointsPruned
from servers import free_port
from told_trainings import Job, events_about, tell_all

LOW_LOSS = RetentionPolicy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Two attempts: the first commits and fails, the second finds one damaged, commits, prunes and completes."""
    job = Job(str(tmp_path_factory.mktemp("events")), LOW_LOSS)
    store = job.store
    first = job.claim()
    commits = [job.commit(1, step, loss=loss, deep={"acc": 0.5}) for step, loss in enumerate((0.5, 0.7, math.nan, 0.4))]
    second = job.claim()
    commits += [job.commit(2, 4, loss=0.45), job.commit(2, 5, loss=0.4), job.commit(2, 6, accuracy=1)]
    reported = ReportEvent(MetricRecord(1, 0, {"loss": 0.5}, None, "2026-01-01T00:00:00+00:00"))
    unscored = Job(job.folder, run="unscored")
    tell_all(
        unscored,
        AttemptStarted(unscored.claim(), None),
        *(unscored.commit(1, 0), unscored.commit(1, 1)),
        AttemptEnded(Outcome(1, "preempted", None, "preemption", "terminated (SIGTERM)")),
    )
    flow_run_id = tell_all(
        job,
        AttemptStarted(first, None),
        *(reported, *commits[:4]),
        AttemptEnded(Outcome(1, "failed", None, "user", "boom" * 2000)),
        CheckpointQuarantined(commits[3].id, "a bit flipped"),
        AttemptStarted(second, f"{store.path}/checkpoints/{commits[0].id}"),
        *commits[4:],
        CheckpointsPruned(Plan({}, (store.get(commits[1].id),))),
        AttemptEnded(Outcome(2, "completed")),
    )
    about_run = events_about(f"prefect-torch.run.{store.path}", 3)
    about_checkpoints = events_about(f"prefect-torch.checkpoint.{store.path}", 9)
    return flow_run_id, store, commits, about_run, about_checkpoints


def committed(training):
    return [event for event in training[4] if event.event == "prefect-torch.checkpoint.committed"]


def test_each_happening_arrives_once_and_in_order(training):
    _, store, commits, about_run, about_checkpoints = training
    assert [(event.event, event.resource["attempt"]) for event in about_run] == [
        ("prefect-torch.attempt.started", "1"),
        ("prefect-torch.attempt.failed", "1"),
        ("prefect-torch.attempt.started", "2"),
    ]
    places = [f"{store.path}/checkpoints/{commit.id}" for commit in commits]
    assert [
        (event.event.removeprefix("prefect-torch.checkpoint."), event.resource["checkpoint"]) for event in about_checkpoints
    ] == [
        *(("committed", place) for place in places[:4]),
        ("quarantined", places[3]),
        *(("committed", place) for place in places[4:]),
        ("pruned", places[1]),
    ]


def test_an_attempt_is_told_though_the_storage_is_away(tmp_path, monkeypatch):
    def away(_):
        raise StorageError("gone")

    job, put = Job(str(tmp_path), LOW_LOSS), []
    attempts, commits = [job.claim(), job.claim()], [job.commit(1, 0, loss=0.5), job.commit(2, 1, loss=0.9)]
    monkeypatch.setattr(CheckpointStore, "list", away)
    monkeypatch.setattr(EventOutbox, "put", lambda _, *events: put.extend(events))
    told = observer.EventObserver(job)
    for attempt, commit in zip(attempts, commits, strict=True):
        with pytest.raises(StorageError):
            told.observe(AttemptStarted(attempt, "s3://bucket/seed"))
        told.observe(commit)
    assert [event.event for event in put].count("prefect-torch.attempt.started") == 2
    assert "s3://bucket/seed" in {resource.id for resource in put[-1].related}
    assert [event.resource["is_best"] for event in put if "is_best" in event.resource.root] == ["true", "false"]


def test_an_event_of_a_training_that_a_flow_calls_is_related_to_the_deployment_of_that_flow(client, tmp_path):
    """`evaluate_new_best(trained_by=...)` awaits it; Prefect's own events of subflow runs have none."""
    job = Job(str(tmp_path))

    @flow(name="calls")
    def calls():
        tell_all(job, AttemptStarted(job.claim(), None))

    deployment = client.create_deployment(client.create_flow(calls), "calling")
    run_flow(calls, client.create_flow_run_from_deployment(deployment))
    (event,) = events_about(f"prefect-torch.run.{job.store.path}", 1)
    assert [it.id for it in event.related if it.role == "deployment"] == [f"prefect.deployment.{deployment}"]


def test_a_training_whose_caller_was_deleted_has_events(tmp_path, monkeypatch):
    def deleted(*_):
        yield from ()
        raise ObjectNotFound(RuntimeError("404 Not Found"))

    monkeypatch.setattr(module, "flow_runs_from", deleted)
    job = Job(str(tmp_path))
    tell_all(job, AttemptStarted(job.claim(), None))
    events_about(f"prefect-torch.run.{job.store.path}", 1)


def test_a_commit_has_labels_to_match_and_metrics_to_read(training):
    flow_run_id, store, commits, _, _ = training
    event = committed(training)[0]
    place = f"{store.path}/checkpoints/{commits[0].id}"
    assert dict(event.resource.root) == {
        "prefect.resource.id": f"prefect-torch.checkpoint.{place}",
        "prefect.resource.name": "run step 0",
        "run": "run",
        "storage": store.storage.url,
        "attempt": "1",
        "prefect.run-count": "1",
        "checkpoint": place,
        "step": "0",
        "is_best": "true",
    }
    assert event.payload["metrics"] == {"loss": 0.5, "deep/acc": 0.5}
    assert (event.payload["bytes"], event.payload["duration_s"], event.payload["stall_s"]) == (7, 0.5, 0.25)
    related = {resource.role: resource.id for resource in event.related}
    assert related["run"] == f"prefect-torch.run.{store.path}"
    assert related["flow-run"] == f"prefect.flow-run.{flow_run_id}"
    assert "flow" in related


def test_best_is_what_the_policy_ranks_first_whatever_attempt_it_is_of(training):
    """0.5 is the first; 0.7 is worse; NaN never is; 0.4 is; then 0.45 is not, 0.4 is newer, and no score never is."""
    assert [event.resource["is_best"] for event in committed(training)] == [
        "true",
        "false",
        "false",
        "true",
        "false",
        "true",
        "false",
    ]


def test_a_score_that_is_no_number_is_never_the_best():
    best = observer._Best(RetentionPolicy(checkpoint_score_attribute="loss", checkpoint_score_order="min"))
    assert [best.record(metrics) for metrics in ({}, {"loss": math.nan}, {"loss": math.inf}, {"loss": 1.0}, {})] == [
        *(False, False, True, True, False)
    ]


def test_a_preemption_is_told_like_a_failure(training):
    _, preempted = events_about(f"prefect-torch.run.{training[1].storage.url}/unscored", 2)
    assert preempted.event == "prefect-torch.attempt.failed"
    assert preempted.resource["ending"] == "preempted"
    assert preempted.payload == {"ending": "preempted", "kind": "preemption", "error": "terminated (SIGTERM)"}


def test_a_failure_says_why_in_bounds(training):
    failed = training[3][1]
    assert failed.resource["ending"] == "failed"
    assert failed.payload["kind"] == "user"
    assert failed.payload["error"] == f"{'boom' * 500} [4000 characters left out] {'boom' * 500}"


def test_without_a_score_the_newest_is_best(training):
    events = events_about(f"prefect-torch.checkpoint.{training[1].storage.url}/unscored", 2)
    assert [event.resource["is_best"] for event in events] == ["true", "true"]


def event(number: int, name: str = "prefect-torch.test", about: str = "test") -> Event:
    return Event(event=name, resource={"prefect.resource.id": f"{about}.{number:03}"})


@pytest.fixture
def patient(monkeypatch):
    """The server may take its time for the last request, too, which is not tried again."""
    monkeypatch.setattr(module, "_REQUEST_S", 60.0)


@flow(name="posting")
def posting(use):
    use(EventOutbox())


def test_the_first_is_sent_at_once_and_the_next_only_after_a_pause(monkeypatch):
    sent, is_sent = [], threading.Event()

    def send(self, events):
        sent.append(len(events))
        is_sent.set()

    monkeypatch.setattr(EventOutbox, "_send", send)
    monkeypatch.setattr(module, "PERIOD_S", 60)

    def use(outbox):
        outbox.put(event(0))
        assert is_sent.wait(10)
        is_sent.clear()
        for number in range(450):
            outbox.put(event(number))
        assert not is_sent.wait(0.3)
        outbox.close(10)

    posting(use)
    assert sent == [1, 200, 200, 50]


def test_what_happens_while_the_api_is_away_arrives_once_when_it_is_back(patient, monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.1)
    proxy = Proxy(int(PREFECT_API_URL.value().split(":")[2].partition("/")[0]))
    failed = threading.Event()
    deliver = EventOutbox._deliver

    def watched(self, batch):
        if not (is_delivered := deliver(self, batch)):
            failed.set()
        return is_delivered

    monkeypatch.setattr(EventOutbox, "_deliver", watched)

    def use(_):
        with temporary_settings({PREFECT_API_URL: proxy.api}):
            outbox = EventOutbox()
        outbox.put(*(event(number, about="away") for number in range(20)))
        assert failed.wait(10)
        proxy.accept()
        outbox.put(event(20, about="away"))
        outbox.close(120)

    try:
        posting(use)
    finally:
        proxy.refuse()
    found = events_about("away.", 21)
    assert [it.resource.id for it in found] == [f"away.{number:03}" for number in range(21)]


def test_an_api_that_stays_away_holds_the_end_up_for_seconds_and_the_loss_is_told(caplog):
    def use(_):
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
            outbox = EventOutbox()
        outbox.put(*map(event, range(300)))
        begun_s = time.monotonic()
        outbox.close(20)
        assert time.monotonic() - begun_s < 15

    posting(use)
    assert "300 events of this training could not be sent to Prefect (" in caplog.text


def test_a_key_that_has_expired_is_told_once_with_the_number_of_events(monkeypatch, caplog):
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    refused, is_enough = [], threading.Event()

    def refuse(self, events):
        refused.append(len(events))
        if len(refused) >= 3:
            is_enough.set()
        request = httpx.Request("POST", "http://host/api/events")
        raise httpx.HTTPStatusError("expired", request=request, response=httpx.Response(401, request=request))

    monkeypatch.setattr(EventOutbox, "_send", refuse)

    def use(outbox):
        outbox.put(event(0), event(1))
        assert is_enough.wait(10)
        outbox.close(10)

    posting(use)
    assert caplog.text.count("events of this training") == 1
    assert "2 events of this training could not be sent to Prefect (HTTPStatusError('expired'))" in caplog.text


@pytest.mark.parametrize("faulty", [event(0, "x" * 2000), event(0).model_copy(update={"payload": {"x": object()}})])
def test_an_event_that_is_refused_or_has_no_form_in_json_costs_no_other_one(patient, caplog, faulty):
    about = f"beside-{len(faulty.event)}"

    def use(outbox):
        outbox.put(event(0, about=about), faulty, *(event(number, about=about) for number in (1, 2)))
        outbox.close(120)

    posting(use)
    assert caplog.text.count("Prefect refuses 1 events of this training") == 1
    found = events_about(f"{about}.", 3)
    assert [it.resource.id for it in found] == [f"{about}.{number:03}" for number in range(3)]


def test_what_a_database_cannot_hold_and_the_server_would_drop_is_told_in_another_form(patient, caplog):
    """PostgreSQL takes no NUL, and the server drops an event of 1.5 MB while it answers that it has it."""
    about = "large"
    payloads = [
        {"text": "a\0b\ud800", "a\0": [1, "\0"], "caf\udce9": 1},
        {"samples": "x" * 3_000_000},
        {f"sample {number}": "x" * 3000 for number in range(1000)},
        {f"sample {number}": number for number in range(100_000)},
    ]

    def use(outbox):
        outbox.put(*(event(number, about=about).model_copy(update={"payload": it}) for number, it in enumerate(payloads)))
        outbox.close(120)

    posting(use)
    odd, long, many, most = (it.payload for it in events_about(f"{about}.", 4))
    assert odd == {"text": "a\\x00b\\ud800", "a\\x00": [1, "\\x00"], "caf\\udce9": 1}
    assert "2996000 characters left out" in long["samples"]
    assert len(many) == 1000
    assert all("characters left out" in it for it in many.values())
    assert most == {}
    assert caplog.text.count("sent without its payload") == 1


def test_a_paused_trial_that_goes_on_from_another_ones_checkpoint_is_told_as_cloned(monkeypatch):
    told = []
    monkeypatch.setattr(sweep_events, "EventOutbox", lambda: SimpleNamespace(put=told.append))
    sweep = SweepEvents(Run.open("memory://", "sweep"), "loss", "min", {})
    for cloned in (None, Cloned("sweep/clone", {"lr": 3}, Source(1, "sweep/best", "an-id"))):
        sweep.observe(TrialResumed(0, 3, cloned), {0: TrialRecord(0, "sweep/clone", {"lr": 3}, 0)})
    assert [it.event for it in told] == ["prefect-torch.trial.resumed", "prefect-torch.trial.cloned"]
