"""Prefect servers that a test starts and stops, on SQLite or PostgreSQL, and what stands before one or for one."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from forked_programs import Popen
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)
from prefect_home import PREFECT, prepared_home
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts
from servers import free_port
from tcp_relay import TcpRelay

_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
_PATIENCE_S = 120  # for what takes seconds on an idle machine


def wait_until(condition: Callable[[], object], what: object, longest_s: float = _PATIENCE_S, *, every_s: float = 0.1) -> None:
    deadline_s = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come to pass in {longest_s} s: {what() if callable(what) else what}"
        time.sleep(every_s)


def rows(api: str, kind: str, **filters: object) -> list[dict]:
    """Return all objects of a kind ("flow_runs", "logs") that an API knows and the filters choose."""
    found: list[dict] = []
    while True:
        body = json.dumps({**filters, "limit": 200, "offset": len(found)}).encode()
        request = urllib.request.Request(f"{api}/{kind}/filter", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            more = json.load(response)
        found.extend(more)
        if len(more) < 200:
            return found


def _drain_senders() -> None:
    for kind in (EventsWorker, APILogWorker):
        kind.instance().drain()


def _begin_senders() -> None:
    _drain_senders()
    for kind in (EventsWorker, APILogWorker):
        kind.instance()


@contextmanager
def senders_follow(change: AbstractContextManager[object]) -> Iterator[None]:
    """Let events and log lines of this process go to the server of the settings that hold within a context.

    Prefect's senders keep the server that they began with, even after its end: what they are given then is lost.
    """
    with change:
        _begin_senders()
        try:
            yield
        finally:
            _drain_senders()
    if PREFECT_API_URL.value() is not None:  # another server's context is around this one
        _begin_senders()


class PrefectServer:
    """`prefect server start` with a home of its own; started again, it has the same port and database."""

    def __init__(self, home: Path, database_url: str | None = None, *, with_ui: bool = False, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.api = f"{self.url}/api"
        self._home = home
        self._environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", **variables}
        if with_ui:
            self._environment["PREFECT_UI_API_URL"] = self.api  # else pages ask the usual port
        self._arguments = ("server", "start", "--ui" if with_ui else "--no-ui")
        self._has_own_database = database_url is None and "PREFECT_API_DATABASE_CONNECTION_URL" not in os.environ
        if database_url is not None:
            self._environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once the server answers."""
        if self._has_own_database:
            prepared_home(self._home)
        self._home.mkdir(exist_ok=True)
        command = [PREFECT, *self._arguments]
        with (self._home / "output.txt").open("ab") as output:
            self._process = Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                env=self._environment,
                stdout=output,
                stderr=output,
            )
        wait_until(self._answers, f"Prefect's server on port {self.port}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Return once the process is gone and nobody listens at its port; harmless when it is."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_PATIENCE_S)
            self._process = None

    def output(self) -> str:
        """Return what the server has said."""
        return (self._home / "output.txt").read_text()

    def delete_blocks(self) -> None:
        """Delete all saved blocks at once, in its SQLite: a request for each takes a tenth of a second."""
        with closing(sqlite3.connect(self._home / "prefect.db", timeout=_PATIENCE_S)) as database, database:
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("DELETE FROM block_document WHERE NOT is_anonymous")

    def lost_events(self) -> int:
        """Return how many events, of which it makes task runs, the server has given up to write.

        Its services read before they write in one transaction, which SQLite may refuse at any time; they try again, five times.
        """
        counts = re.findall(r"Error flushing \d+ events \(\d+ to retry, (\d+) dropped\)", self.output())
        return sum(int(count) for count in counts)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.output()[-2000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.api}/health", timeout=5).close()
            return True
        return False


@contextmanager
def server_in_use(home: Path, database_url: str | None = None, **variables: str) -> Iterator[PrefectServer]:
    """Let clients in this process talk to a server of their own, with more variables; its `api` is for other processes.

    Flows send no heartbeats: at the end of each flow Prefect waits until the thread that does wakes up, up to a second.
    """
    server = PrefectServer(home, database_url, **variables)
    try:
        server.start()
        with senders_follow(temporary_settings({PREFECT_API_URL: server.api, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})):
            yield server
    finally:
        server.stop()


def postgres_program(name: str) -> str | None:
    """Return the newest PostgreSQL's program of that name, or None; Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return str(found[-1]) if found else shutil.which(name)


@contextmanager
def postgres() -> Iterator[str]:
    """Run PostgreSQL on loopback with a new database, and give its URL."""
    # It refuses to run as root, and another user cannot look into pytest's folders.
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    folder, port = tempfile.mkdtemp(prefix="prefect-torch-postgres-"), free_port()
    if user:
        shutil.chown(folder, "postgres", "postgres")

    output = Path(folder, "output.txt")

    def run(name: str, *arguments: str) -> None:
        program = postgres_program(name)
        assert program is not None
        with output.open("ab") as file:
            ended = subprocess.run([program, *arguments], cwd=folder, stdout=file, stderr=file, check=False, **user)
        assert ended.returncode == 0, output.read_text()

    data = ("--pgdata", f"{folder}/data")
    options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -p {port}"
    try:
        run("initdb", *data, "--auth=trust", "--username=prefect", "--no-sync")
        run("pg_ctl", *data, "--wait", "--options", options, "start")
        try:
            run("createdb", "--host=127.0.0.1", f"--port={port}", "--username=prefect", "prefect")
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"
        finally:
            run("pg_ctl", *data, "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder)


class Proxy(TcpRelay):
    """A relay before an API, each chunk `delay_s` late.

    Attributes:
        api: The URL of the API behind it.
        delay_s: How late a chunk is.
        num_late: How many chunks were.

    """

    def __init__(self, server_port: int) -> None:
        super().__init__(server_port)
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.delay_s = 0.0
        self.num_late = 0

    def change(self, data: bytes, *, is_answer: bool) -> bytes:
        del is_answer
        if self.delay_s:
            self.num_late += 1
            time.sleep(self.delay_s)  # this lateness is the fault
        return data


def assert_ranks_ended(flow_run_id: str, **states: str) -> None:
    """Wait until the API shows each rank's task run of a flow run in this state, by name, with "-" as "_"."""

    def found() -> dict[str, str]:
        task_runs = rows(PREFECT_API_URL.value(), "task_runs", flow_runs={"id": {"any_": [flow_run_id]}})
        return {it["name"].replace("-", "_"): it["state_name"] for it in task_runs if it["name"].startswith("rank-")}

    wait_until(lambda: found() == states, found)


def assert_task_runs_of_ranks_are_final(storage: str, num_attempts: int | None = None) -> None:
    """Wait until the API shows each rank of each attempt of the run "run" once, in a final state.

    Args:
        storage: The storage of the run.
        num_attempts: How many of the attempts have started ranks; None for all.

    """
    attempts = list(list_attempts(CheckpointStore.open(storage, "run")))[:num_attempts]
    flow_runs = sorted({attempt.owner.flow_run_id for attempt in attempts})
    expected = sorted(f"rank-{rank}" for attempt in attempts for rank in range(attempt.world_size))

    def states() -> list[tuple[str, str]]:
        found = rows(PREFECT_API_URL.value(), "task_runs", flow_runs={"id": {"any_": flow_runs}})
        return sorted((it["name"], it["state_type"]) for it in found if it["name"].startswith("rank-"))

    def are_final() -> bool:
        found = states()
        return [name for name, _ in found] == expected and {state for _, state in found} <= _FINAL

    wait_until(are_final, states)


@contextmanager
def api_that_answers(status: int, body: bytes = b"[]") -> Iterator[None]:
    """Let clients in this process use an API that answers whatever is asked with `status` and `body`, an empty list."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - as http.server names it

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        api = f"http://user:secret@127.0.0.1:{http.server_port}/api"
        with temporary_settings(
            {PREFECT_API_URL: api, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False, PREFECT_CLIENT_MAX_RETRIES: 0}
        ):
            yield
        http.shutdown()
