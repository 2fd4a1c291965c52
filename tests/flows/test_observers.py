"""Observers see everything in order, and can neither stop nor hold up what they look at."""

import threading

import httpx
from prefect import flow
from prefect_servers import wait_until
from prefect_torch.ckpt.runs.attempts.attempt import Outcome
from prefect_torch.flows import train
from prefect_torch.tasks.training import observers as module
from prefect_torch.tasks.training.observers import AttemptEnded, Observers

LATER = AttemptEnded(Outcome(2, "completed"))
FIRST = AttemptEnded(Outcome(1, "failed"))


class Recorder:
    def __init__(self):
        self.seen = []
        self.refreshed = threading.Event()

    def observe(self, event):
        self.seen.append(event)

    def refresh(self, *, final):
        self.refreshed.set()  # first: a test that has seen enough clears it
        self.seen.append("last" if final else "refreshed")


class Broken(Recorder):
    def observe(self, event):
        raise ValueError("no such page")

    def refresh(self, *, final):
        raise ValueError("no such page")


class Named(Recorder):
    def __init__(self, name, told):
        super().__init__()
        self.name, self.told = name, told

    def observe(self, event):
        self.told.append((self.name, event))

    def refresh(self, *, final):
        self.told.append((self.name, "refreshed"))


def test_events_are_on_their_way_before_a_page_begins_to_show_anything(run, monkeypatch):
    """The past of a run with very many attempts kept its page, and with it every event, until the training had ended."""
    told = []
    for name in ("PageObserver", "EventObserver"):
        monkeypatch.setattr(f"prefect_torch.flows.training.{name}", lambda *_, name=name: Named(name, told))
    train("trainings:tell_environment", run=run)
    assert len(told) > 4
    assert [name for name, _ in told] == ["EventObserver", "PageObserver"] * (len(told) // 2)
    assert [what for _, what in told[::2]] == [what for _, what in told[1::2]]


def test_all_see_everything_in_order_and_a_refresh_at_the_end():
    both = [Recorder(), Recorder()]
    observers = Observers(both)
    observers.notify(FIRST)
    observers.notify(LATER)
    observers.close()
    for observer in both:
        assert [it for it in observer.seen if it != "refreshed"] == [FIRST, LATER, "last"]


def test_news_is_shown_about_every_second_and_nothing_without_news(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    observer = Recorder()
    observers = Observers([observer])
    observers.notify(FIRST)
    assert observer.refreshed.wait(10)
    observer.refreshed.clear()
    assert not observer.refreshed.wait(0.1)
    observers.close()
    assert observer.seen == [FIRST, "refreshed", "last"]


def test_an_observer_that_raises_is_logged_once_and_the_others_go_on(caplog):
    seen = Recorder()

    @flow
    def training():
        observers = Observers([Broken(), seen])
        observers.notify(FIRST)
        observers.notify(LATER)
        observers.close()

    training()
    assert seen.seen[-1] == "last"
    assert caplog.text.count("what is shown of the training is not up to date: ValueError('no such page')") == 1


def test_a_page_for_which_prefects_api_is_too_slow_is_one_line_of_the_log(caplog):
    class Late(Recorder):
        def observe(self, event):
            raise httpx.ReadTimeout("timed out")

    @flow
    def training():
        observers = Observers([Late()])
        observers.notify(FIRST)
        observers.close()

    training()
    assert "is not up to date: ReadTimeout('timed out')" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_observer_that_hangs_delays_the_end_no_longer_than_allowed(caplog):
    ends = threading.Event()

    class Hanging(Recorder):
        def observe(self, event):
            ends.wait(60)

    @flow
    def training():
        observers = Observers([Hanging()])
        observers.notify(FIRST)
        observers.close(longest_s=0.01)

    training()
    assert "may lack its end" in caplog.text
    ends.set()


def test_an_observer_that_shows_something_later_is_called_again_without_an_event(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.01)

    class Patient(Recorder):
        def refresh(self, *, final):
            super().refresh(final=final)
            return 0.05 if self.seen.count("refreshed") < 3 else None

    observer = Patient()
    observers = Observers([observer, Recorder()])
    observers.notify(FIRST)
    wait_until(lambda: observer.seen.count("refreshed") == 3, "it is called three times")
    observer.refreshed.clear()
    assert not observer.refreshed.wait(0.2)
    observers.close()
    assert observer.seen == [FIRST, "refreshed", "refreshed", "refreshed", "last"]
