"""Programs that ask a driver which may hang."""

import os
import signal
import subprocess
import sys
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import pytest
from prefect_torch.tasks.gang.gpus import driver_programs
from prefect_torch.tasks.gang.gpus.driver_programs import DriverHangsError, ask_driver

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


class Started(subprocess.Popen):
    """A process that is started for a driver; `kill` may have no effect, as on one that waits in the kernel."""

    processes: ClassVar = []
    is_killable = True

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.processes.append(self)

    def kill(self):
        if self.is_killable:
            super().kill()


@pytest.fixture
def started(monkeypatch):
    """The processes that are started; what is left of them is ended."""
    monkeypatch.setattr(Started, "processes", [])
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(driver_programs, "_POLL_S", 0.02)
    yield Started.processes
    for process in Started.processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_what_a_program_prints_is_returned_however_long_it_is(started):
    program = "import sys; print('x' * 200_000); print('y' * 200_000, file=sys.stderr); sys.exit(3)"
    done = ask_driver([sys.executable, "-c", program], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "x" * 200_000 + "\n", "y" * 200_000 + "\n")


def test_a_program_that_takes_too_long_is_killed(started, monkeypatch):
    waited = []
    looks = count(0.0, 0.25)  # a clock that goes on with each look, however long the start of the program takes
    monkeypatch.setattr(driver_programs, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        ask_driver(SLEEPS, 1.0, waited.append)
    assert raised.type is subprocess.TimeoutExpired
    assert started[0].returncode == -signal.SIGKILL
    assert waited == [0.25, 0.5, 0.75]


def test_what_is_raised_while_it_runs_ends_it(started):
    with pytest.raises(ZeroDivisionError):
        ask_driver(SLEEPS, 60, lambda _: 1 / 0)
    assert started[0].returncode == -signal.SIGKILL


def test_a_program_that_no_signal_ends_is_not_waited_for(started, monkeypatch):
    monkeypatch.setattr(driver_programs, "_LONGEST_END_S", 0.1)
    monkeypatch.setattr(Started, "is_killable", False)
    with pytest.raises(DriverHangsError):
        ask_driver(SLEEPS, 0.2)
    assert started[0].poll() is None
