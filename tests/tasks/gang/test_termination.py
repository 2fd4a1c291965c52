"""The exception that terminates a flow run is raised anywhere in the thread that waits, never in the one that leads."""

import ctypes
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from prefect._internal.concurrency.cancellation import CancelledError, WatcherThreadCancelScope
from prefect.exceptions import TerminationSignal
from prefect_torch.tasks.gang import termination as termination_module
from prefect_torch.tasks.gang.termination import TERMINATIONS, TerminatedError, Termination, TerminationSwitch


def throw(kind, thread):
    """Raise an exception in another thread, as Prefect does when a lease is lost."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind)) == 1


def led_until_told(termination, begun, done):
    def lead():
        begun.set()
        while not termination.is_requested:
            time.sleep(0.001)
        done.set()
        termination.raise_if_requested()

    return lead


def test_what_prefect_throws_when_a_lease_is_lost_is_an_end_from_outside():
    def wait():
        with WatcherThreadCancelScope() as scope:
            threading.Timer(0.0, scope.cancel).start()
            while True:
                time.sleep(0.001)

    with pytest.raises(TERMINATIONS) as ended:
        wait()
    assert type(ended.value) is CancelledError


@pytest.mark.parametrize("kind", [CancelledError, KeyboardInterrupt])
def test_work_ends_by_itself_before_the_end_is_raised(kind):
    termination, begun, done, raised = Termination(grace_s=30), threading.Event(), threading.Event(), []

    def wait():
        try:
            termination.outlast(led_until_told(termination, begun, done))
        except TERMINATIONS as exc:
            raised.append((exc, done.is_set()))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(30)
    throw(kind, waiting)
    waiting.join(30)
    assert [(type(exc), exc is termination.cause, was_done) for exc, was_done in raised] == [(kind, True, True)]


def test_a_sleep_lasts_until_termination_is_requested():
    termination = Termination(grace_s=30)
    began_s = time.monotonic()
    termination.sleep(0.1)
    assert time.monotonic() >= began_s + 0.1
    threading.Timer(0.1, termination.request, [KeyboardInterrupt()]).start()
    for _ in range(2):
        with pytest.raises(TerminatedError):
            termination.sleep(3600)


def test_what_was_requested_before_the_work_begins_is_known_to_it():
    """As of an await that was cancelled while the attempt waited for the slot of a tag: it was begun, and recorded."""
    switch, seen = TerminationSwitch(), []
    with switch.governs():
        termination = Termination(grace_s=30)
    switch.cause = CancelledError()
    with pytest.raises(CancelledError):
        termination.outlast(lambda: seen.append(termination.is_requested))
    assert seen == [True]


def test_an_exception_that_requests_nothing_leaves_the_work_no_more_than_the_grace():
    """As a limit of the caller's own that a signal raises: what it starts must not go on for hours."""
    termination, begun, over, raised = Termination(grace_s=0.2), threading.Event(), threading.Event(), []

    def lead():
        begun.set()
        deadline_s = time.monotonic() + 30
        while not (termination.is_requested and termination.grace_left_s == 0) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if time.monotonic() < deadline_s:
            over.set()

    def wait():
        try:
            termination.outlast(lead)
        except TimeoutError as exc:
            raised.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(30)
    throw(TimeoutError, waiting)
    waiting.join(30)
    assert over.wait(30)
    assert raised == [termination.cause]


@pytest.mark.parametrize("line", range(1, 40))
def test_wherever_it_lands_nothing_is_led_on(line):
    """At each line of the module that the waiting thread runs, one after the other."""
    termination, begun, done, lines = Termination(grace_s=30), threading.Event(), threading.Event(), []

    def land(frame, event, _):
        if frame.f_code.co_filename != termination_module.__file__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise CancelledError
        return land

    def outlast():
        sys.settrace(land)
        termination.outlast(led_until_told(termination, begun, done))

    try:
        with pytest.raises(CancelledError):
            outlast()
    finally:
        sys.settrace(None)
    assert len(lines) == line
    assert done.is_set() or not begun.is_set()


def test_an_end_is_raised_though_the_work_fails_at_it():
    """With the storage away, whatever ends the work is no reason for another attempt."""
    termination = Termination(grace_s=0)

    def lead():
        raise ConnectionError("the storage is away")

    termination.cause = TerminationSignal(15)
    with pytest.raises(TerminationSignal):
        termination.outlast(lead)


def test_a_second_ctrl_c_ends_the_grace():
    termination = Termination(grace_s=600)
    termination.request(TerminationSignal(15))
    assert 0 < termination.grace_left_s <= 600
    termination.request(TerminationSignal(15))
    assert termination.grace_left_s > 0
    termination.request(KeyboardInterrupt())
    assert termination.grace_left_s == 0


def test_further_ctrl_cs_do_not_prolong_the_wait_for_work_that_hangs(monkeypatch):
    """Whoever pressed it twice a minute never got the program back."""
    termination, presses, over = Termination(grace_s=0), [], threading.Event()

    def press(_):
        presses.append(KeyboardInterrupt())
        termination.request(presses[-1])
        assert len(presses) < 10

    clock = SimpleNamespace(monotonic=lambda: 30.0 * len(presses), sleep=press)
    monkeypatch.setattr(termination_module, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        termination.outlast(over.wait)
    over.set()
    assert len(presses) == 3


@pytest.mark.parametrize("grace_s", [0, 600])
def test_ranks_have_the_grace_that_was_configured(grace_s):
    termination = Termination(grace_s)
    assert termination.grace_left_s == grace_s
    termination.request(TerminationSignal(15))
    assert min(grace_s, 300) <= termination.grace_left_s <= grace_s


def test_undisturbed_work_returns_its_value_or_raises_its_error():
    termination = Termination(grace_s=30)
    assert termination.outlast(lambda: 7) == 7
    with pytest.raises(ValueError, match="boom"):
        termination.outlast(lambda: int("boom"))
    assert termination.outlast(lambda: termination.is_requested) is False
    termination.cause = KeyboardInterrupt()
    with pytest.raises(TerminatedError, match="KeyboardInterrupt"):
        termination.raise_if_requested()
