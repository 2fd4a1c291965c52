"""The observer of a sweep: its page on a real server, its table at a terminal, and what it does when these fail."""

import io
import re
import time
from types import SimpleNamespace
from uuid import UUID

import pytest
from memory_storage import MemoryStorage
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect_servers import wait_until
from prefect_torch.ckpt import StorageError
from prefect_torch.flows.monitoring.pages.live_artifact import LiveArtifact
from prefect_torch.flows.monitoring.sweeps import observer
from prefect_torch.flows.monitoring.sweeps.observer import SweepObserver
from prefect_torch.flows.monitoring.sweeps.page import SweepContext
from prefect_torch.flows.monitoring.sweeps.trial_table import TrialTable
from prefect_torch.flows.monitoring.sweeps.view import SweepView
from prefect_torch.flows.sweeps.journal.history import history_of
from rich.console import Console
from stored_sweeps import events_of_a_sweep, store_sweep

CONTEXT = SweepContext("./checkpoints", 5, has_rungs=True)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def view():
    return SweepView(*store_sweep(MemoryStorage()))


def trials():
    return history_of(events_of_a_sweep())


def lead(view, body=lambda: None) -> UUID:
    """Observe a sweep in a flow run; return the id of that."""
    led = []

    @flow(name="observed")
    def observed() -> None:
        led.append(UUID(flow_run.id))
        with SweepObserver(view, trials, CONTEXT, led[0]):
            body()

    observed()
    return led[0]


def pages_of(flow_run_id):
    with get_client(sync_client=True) as client:
        of_flow_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return [it for it in client.read_artifacts(artifact_filter=of_flow_run) if it.key]  # Prefect's own result has no key


def test_the_last_page_shows_how_the_sweep_has_ended(view):
    (page,) = pages_of(lead(view))
    assert re.fullmatch(r"digits-[0-9a-f]{6}-sweep", page.key)
    assert "**completed** · 5 of 5 trials" in page.data
    assert "loss 0.5" in page.data


def test_a_flow_run_that_runs_again_has_one_page(view):
    led = []

    @flow(name="observed", retries=1)
    def observed() -> None:
        led.append(UUID(flow_run.id))
        with SweepObserver(view, trials, CONTEXT, led[-1]):
            if len(led) == 1:
                raise ValueError("no")

    observed()
    assert led[0] == led[1]
    (page,) = pages_of(led[0])
    assert "**completed**" in page.data


def test_the_last_page_is_tried_again_and_the_ones_before_it_once(view, monkeypatch):
    """Refused once, as by a busy server, the last page showed the sweep as running for ever."""
    shown = {}

    def show(_artifact, _client, _flow_run_id, _data, _about, news):
        shown.setdefault(news[-1], PREFECT_CLIENT_MAX_RETRIES.value())

    monkeypatch.setattr(LiveArtifact, "show", show)
    monkeypatch.setattr(observer, "_LOOK_S", 0.01)
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 7}):
        lead(view, lambda: wait_until(lambda: "running" in shown, "a page"))
    assert shown == {"running": 0, "completed": 7}


@pytest.mark.parametrize(("error", "state"), [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_a_sweep_that_does_not_complete_says_so(view, error, state):
    flow_runs = []

    def fail():
        flow_runs.append(UUID(flow_run.id))
        raise error

    with pytest.raises(type(error)):
        lead(view, fail)
    (page,) = pages_of(flow_runs[0])
    assert f"**{state}**" in page.data


def test_a_storage_that_does_not_answer_costs_the_page_and_not_the_sweep(view, monkeypatch, caplog):
    def refuse(self):
        raise StorageError("gone")

    monkeypatch.setattr(SweepView, "read", refuse)
    assert pages_of(lead(view)) == []
    assert caplog.text.count("the page of the sweep is not up to date: StorageError('gone')") == 1


def test_the_reads_of_looks_take_a_tenth_of_the_time_or_one_is_made_each_half_minute(view, monkeypatch):
    now_s, waits, reads_s = [0.0], [], iter([0.1, 1.0, 7.0, 0.1])

    def read(_):
        now_s[0] += next(reads_s)

    class Closing:
        def wait(self, seconds):
            waits.append(seconds)
            return len(waits) == 4

    monkeypatch.setattr(SweepView, "read", read)
    monkeypatch.setattr(LiveArtifact, "show", lambda *_: None)
    monkeypatch.setattr(observer, "has_run_before", lambda: False)
    made = SweepObserver(view, trials, CONTEXT, None, TrialTable(Console(file=io.StringIO()), 5, has_rungs=True))
    monkeypatch.setattr(observer, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))
    made._is_closing = Closing()
    made._run()
    assert waits == pytest.approx([2.0, 2.0, 9.0, 30.0])


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_has_the_running_and_the_best_trials(view, width):
    output = io.StringIO()
    table = TrialTable(Console(file=output, force_terminal=True, width=width), 5, has_rungs=True)
    view.record(trials())
    view.read()
    table.show(view)
    table.close()
    shown = ESCAPE.sub("", output.getvalue())
    lines = [line.rstrip() for line in shown[shown.rindex("digits  ") :].splitlines()]
    assert lines[0].startswith("digits  5 of 5 trials: 1 running, 2 completed, 1 paused, 1 failed")
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[2:7]] == ["3", "4", "0", "1", "2"]
    assert lines[2].split()[:6] == ["3", "completed", "0.5", "2", "at", "1"]
    assert ("why" in lines[1]) == (width == 120)
