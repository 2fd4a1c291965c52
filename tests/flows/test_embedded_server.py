import os
import subprocess
import sys
import threading

import pytest
from prefect import flow
from prefect.logging import disable_run_logger
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, get_current_settings, temporary_settings
from prefect_torch.flows import embedded_server
from prefect_torch.flows.embedded_server import ServerKeeper, _start_tied
from prefect_torch.flows.prefect_settings import using
from prefect_torch.flows.short_tracebacks import short_tracebacks


def test_the_server_runs_as_a_module_does_but_looks_in_the_working_folder_last(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/program.py").write_text(
        "import queue, sys, beside\nassert __name__ == '__main__'\n"
        "sys.exit([sys.argv[1:], queue.Queue.__module__, beside.VALUE] != [['--port', '1'], 'queue', 7])\n"
    )
    (tmp_path / "beside.py").write_text("VALUE = 7")
    for name in ("queue", "runpy", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "program", "--port", "1"]
    assert _start_tied(command, {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}).wait(60) == 0


def test_a_service_of_the_server_that_fails_and_is_tried_again_is_one_line(tmp_path, capfd):
    (tmp_path / "service.py").write_text(
        "import logging\nlogging.basicConfig(level='INFO', format='%(levelname)s %(message)s')\n"
        "try:\n    raise ValueError('database is locked\\n[SQL: INSERT]')\n"
        "except ValueError:\n    logging.getLogger('docket.dependencies').exception('%s failed', 'telemetry')\n"
        "logging.getLogger('docket.worker').info('two\\nlines')\n"
    )
    assert _start_tied([sys.executable, "-m", "service"], {**os.environ, "PYTHONPATH": str(tmp_path)}).wait(60) == 0
    assert capfd.readouterr().err == "ERROR telemetry failed: ValueError: database is locked\nINFO two\nlines\n"


@pytest.fixture
def mortal(monkeypatch) -> list[int]:
    """A server that ends as soon as it is started, and how many were started."""
    starts: list[int] = []

    def run(_server: SubprocessASGIServer) -> "subprocess.Popen[bytes]":
        starts.append(1)
        ended = subprocess.Popen(["false"])
        ended.wait()
        return ended

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", run)
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setattr(embedded_server, "_POLL_S", 0.0)
    server = SubprocessASGIServer()
    server.server_process = run(server)
    return starts


def test_a_server_that_dies_again_and_again_is_given_up(mortal):
    keeper = ServerKeeper()
    with disable_run_logger():
        keeper.keep(threading.Event())  # for ever, unless it gives up
    assert keeper.has_given_up
    assert len(mortal) == 1 + 3


def test_a_server_that_dies_now_and_then_is_started_each_time(mortal, monkeypatch):
    monkeypatch.setattr(embedded_server, "_RESTART_PERIOD_S", 0.0)
    keeper, ended = ServerKeeper(), threading.Event()
    with disable_run_logger():
        thread = threading.Thread(target=keeper.keep, args=(ended,))
        thread.start()
        while len(mortal) < 20:
            assert thread.is_alive()
        ended.set()
        thread.join()
    assert not keeper.has_given_up


def test_a_slow_first_start_has_a_minute_unless_a_setting_says_how_long():
    startup = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

    @short_tracebacks
    @flow(validate_parameters=False)
    def tell():
        return startup.value()

    settings = get_current_settings()
    ephemeral = type(settings.server.ephemeral).model_construct(enabled=True)
    server = settings.server.model_copy(update={"ephemeral": ephemeral})
    with using(settings.model_copy(update={"server": server})):
        assert startup.value() == 20
        assert tell() == 60
    with temporary_settings({startup: 7}):
        assert tell() == 7
