"""Decisions on trials in other processes, asked and answered through a storage."""

import logging
import math
import threading

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.reporting.decisions import DecisionPoints, Verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.layout import Layout, stem
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows import RunConfig, SearchConfig, StorageNotSeenError, train, uniform
from prefect_torch.flows.sweeps.asked_decisions import (
    AskedDecisions,
    answer_questions,
    asked_decisions,
    expect_questions,
    forget_questions,
)
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.events import decode_event
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.search import Search

TRIAL = "trial-0000-0123abcd"
REQUEST = DecisionRequest(0, 3, 4, {"loss": math.nan, "deep": {"a": math.inf}}, "some-checkpoint")


@pytest.fixture(autouse=True)
def run_log(monkeypatch):
    """The log of a flow run: Prefect shows no other."""
    monkeypatch.setattr("prefect_torch.flows.sweeps.asked_decisions.get_run_logger", lambda: logging.getLogger("run"))


@pytest.fixture
def sweep():
    storage = MemoryStorage()
    return Run(storage, Layout("sweep"), StorageSpec(storage.url))


class Deciding:
    """Decides, and records what it was asked."""

    def __init__(self):
        self.requests = []

    def points(self):
        return DecisionPoints("training_iteration", 2.5, stop={"loss": math.inf}, reports_before=7)

    def decide(self, request):
        self.requests.append(request)
        return Verdict(goes_on=True, milestone=9.0)


def asked_while_answered(sweep, ask, decides_on):
    """Return what `ask` returns in a thread while this one answers."""
    results = []
    asking = threading.Thread(target=lambda: results.append(ask()))
    asking.start()
    while asking.is_alive():
        answer_questions(sweep, decides_on)
        asking.join(0.01)
    return results


def test_a_sweep_that_expects_no_question_begins_without_the_right_to_delete():
    class Refusing(MemoryStorage):
        def delete(self, keys):
            if list(keys):
                raise PermissionError("access is refused")

    storage = Refusing()
    expect_questions(Run(storage, Layout("sweep"), StorageSpec(storage.url)), are_expected=False)


def test_a_question_is_answered_once_and_leaves_nothing(sweep):
    deciding, trial = Deciding(), AskedDecisions(sweep, TRIAL)
    assert asked_while_answered(sweep, trial.points, {TRIAL: deciding}.get) == [deciding.points()]
    assert asked_while_answered(sweep, lambda: trial.decide(REQUEST), {TRIAL: deciding}.get) == [Verdict(True, 9.0)]
    (request,) = deciding.requests
    assert math.isnan(request.metrics["loss"])
    assert request.metrics["deep"] == {"a": math.inf}
    assert (request.step, request.num_reports, request.checkpoint) == (3, 4, "some-checkpoint")
    assert sweep.keys("") == []


@pytest.mark.parametrize("odd", [{"request": {}}, {"request": {"__float__": "nan"}}, {"__float__": "nan"}])
def test_a_question_that_cannot_be_read_is_refused_and_the_others_are_answered(sweep, caplog, odd):
    deciding, trial = Deciding(), AskedDecisions(sweep, TRIAL)
    sweep.records.put_json(sweep.layout.asked(f"{TRIAL}-odd"), odd)
    assert asked_while_answered(sweep, trial.points, {TRIAL: deciding}.get) == [deciding.points()]
    assert f"{TRIAL}-odd.json of a trial cannot be answered" in caplog.text
    assert {it.name for it in caplog.records} == {"run"}


def test_a_trial_whose_question_is_refused_says_so(sweep):
    def refuse(_):
        (key,) = sweep.keys(sweep.layout.all_asked)
        sweep.records.put_json(sweep.layout.answered(stem(key)), {"refused": "it is of a newer version"})

    with pytest.raises(MalformedRecordError, match=f"'sweep' cannot answer trial '{TRIAL}': it is of a newer version"):
        AskedDecisions(sweep, TRIAL, sleep=refuse).points()


def test_an_answer_that_is_read_at_this_moment_is_not_given_again():
    class ReadMeanwhile(MemoryStorage):
        def get_bytes(self, key):
            data = super().get_bytes(key)
            if list(self.list(answered)):
                self.delete([asked, answered])  # as the trial does
            return data

    asked, answered = (f"sweep/{kind}/{TRIAL}-0123456789abcdef.json" for kind in ("asked", "answered"))
    storage = ReadMeanwhile()
    sweep = Run(storage, Layout("sweep"), StorageSpec(storage.url))
    sweep.records.put_json(asked, {"points": True})
    assert answer_questions(sweep, {TRIAL: Deciding()}.get) == 1
    assert answer_questions(sweep, {TRIAL: Deciding()}.get) == 0
    assert sweep.keys("") == []


def test_no_answer_is_left_for_a_trial_that_waits_no_longer(sweep):
    asked, answered = (f"sweep/{kind}/{TRIAL}-0123456789abcdef.json" for kind in ("asked", "answered"))

    class Late(Deciding):
        def points(self):
            sweep.storage.delete([asked, answered])  # as a trial does that is terminated
            return super().points()

    sweep.records.put_json(asked, {"points": True})
    assert answer_questions(sweep, {TRIAL: Late()}.get) == 1
    assert sweep.keys("") == []


def test_a_sweep_begins_without_answers_that_nobody_has_read(sweep):
    answer, question, unanswered = (
        f"sweep/{name}.json"
        for name in (f"answered/{TRIAL}-0123456789abcdef", f"asked/{TRIAL}-0123456789abcdef", f"asked/{TRIAL}-fedcba9876543210")
    )
    for key in (answer, question, unanswered, f"sweep/answered/{TRIAL}-ffffffffffffffff.json"):
        sweep.records.put_json(key, {"points": True})
    expect_questions(sweep, are_expected=False)
    assert sweep.keys("") == [answer, unanswered], "a leader that still waits reads the answer"
    expect_questions(sweep, are_expected=False)
    assert sweep.keys("") == [unanswered]


def test_an_answered_question_of_a_trial_that_was_killed_is_forgotten(sweep):
    other = "trial-0001-0123abcd"
    for trial in (TRIAL, other):
        sweep.records.put_json(f"sweep/asked/{trial}-0123456789abcdef.json", {"points": True})
    assert answer_questions(sweep, {TRIAL: Deciding(), other: Deciding()}.get) == 2
    sweep.records.put_json(f"sweep/asked/{TRIAL}-fedcba9876543210.json", {"points": True})
    forget_questions(sweep, TRIAL)
    assert [stem(key) for key in sweep.keys("sweep/asked/")] == [f"{TRIAL}-fedcba9876543210", f"{other}-0123456789abcdef"]
    assert len(sweep.keys("sweep/answered/")) == 2


def test_what_cannot_be_answered_is_no_reason_to_look_again_at_once(sweep):
    expect_nothing = answer_questions(sweep, {}.get)
    sweep.records.put_json(f"sweep/asked/{TRIAL}-0123456789abcdef", {"points": True})  # its trial was killed
    assert (expect_nothing, answer_questions(sweep, {}.get)) == (0, 0)
    assert (answer_questions(sweep, {TRIAL: Deciding()}.get), answer_questions(sweep, {TRIAL: Deciding()}.get)) == (1, 0)


def test_a_trial_whose_sweep_does_not_answer_ends_at_its_checkpoint(sweep, caplog):
    waits, pauses = AskedDecisions(sweep, TRIAL, longest_wait_s=0.2), []
    assert not waits.decide(REQUEST).goes_on
    assert [(it.name, it.getMessage().partition(";")[0]) for it in caplog.records] == [("run", "sweep 'sweep' does not answer")]
    terminated = AskedDecisions(sweep, TRIAL, lambda: len(pauses) == 3, sleep=pauses.append)
    assert not terminated.decide(REQUEST).goes_on
    assert len(pauses) == 3
    with pytest.raises(TimeoutError, match=f"sweep 'sweep' has not answered trial '{TRIAL}' in time"):
        terminated.points()
    assert sweep.keys("") == []


def test_a_trial_whose_sweep_does_not_tell_where_it_decides_ends_at_its_first_report(sweep):
    waits = AskedDecisions(sweep, TRIAL, longest_wait_s=0.2)
    assert waits.points().includes(0, 1, {}, has_checkpoint=False)
    waits.longest_wait_s = 60.0
    decided = Deciding()
    for ask, answers in [
        (lambda: waits.decide(REQUEST), [Verdict(goes_on=False)]),  # by the points of no sweep
        (waits.points, [decided.points()]),  # of the next attempt
        (lambda: waits.decide(REQUEST), [Verdict(goes_on=True, milestone=9.0)]),
    ]:
        assert asked_while_answered(sweep, ask, {TRIAL: decided}.get) == answers


def test_only_the_trials_of_a_sweep_that_leads_them_elsewhere_ask(tmp_path):
    sweep, trial = Run.open(tmp_path, "sweep"), Run.open(tmp_path, f"sweep/{TRIAL}")

    def asks(run):
        return asked_decisions(run, lambda: False) is not None

    claimed = claim_attempt(sweep, Owner.current(), world_size=0)
    assert not asks(trial)
    expect_questions(sweep, are_expected=True)
    assert asks(trial)
    assert not asks(sweep)
    write_outcome(sweep, Outcome(claimed.number, "preempted"))  # it goes on later, with the trial
    assert asks(trial)
    write_outcome(sweep, Outcome(claim_attempt(sweep, Owner.current(), world_size=0).number, "completed"))
    assert not asks(trial)
    claim_attempt(sweep, Owner.current(), world_size=0)
    expect_questions(sweep, are_expected=False)
    assert not asks(trial)


def test_a_trial_whose_machine_does_not_see_its_sweep_is_refused_before_it_trains(tmp_path):
    """As with the default storage, a directory: each machine has its own, and nothing would end the trial."""
    sweep, trial = Run.open(tmp_path, "sweep"), Run.open(tmp_path, f"sweep/{TRIAL}")
    with pytest.raises(StorageNotSeenError, match=f"cannot see sweep 'sweep' of trial '{TRIAL}' in .*{tmp_path}: "):
        train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name=trial.name, storage=str(tmp_path), takeover=True))
    assert list(tmp_path.iterdir()) == []
    assert asked_decisions(trial, lambda: False) is None, "somebody trains it alone"
    sweep.records.put(sweep.layout.sweep, {"format": 1})
    assert asked_decisions(trial, lambda: False, is_takeover=True) is None, "the sweep leads its trials itself now"


def test_a_question_that_a_killed_sweep_has_decided_has_the_same_answer_from_the_next():
    config = SearchConfig(metric="loss", num_trials=4, seed=0, sampler="random", scheduler="asha", max_t=9)
    entries, space = [], parse_space({"lr": uniform(0, 1)})
    search = Search(config, space, 0, RecordedTrials([], entries.append), "sweep")
    number = search.next_trial().number
    request = DecisionRequest(0, 1, 1, {"loss": 0.5}, "a-checkpoint")
    verdict = search.decide(number, request)
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    again = Search(config, space, 0, RecordedTrials(events, entries.append), "sweep")
    recorded = len(entries)
    assert again.decide(number, request) == verdict
    assert len(entries) == recorded
    assert len(again.trials[number].reports) == 1
