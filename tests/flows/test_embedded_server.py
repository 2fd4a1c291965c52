import os
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)
from prefect_servers import wait_until
from prefect_torch.deployments import work_pools
from prefect_torch.tasks.prefect_api.embedded_server import keeping, tying
from prefect_torch.tasks.prefect_api.embedded_server.database import _newest_revision, migrated_by_one, newer_database
from prefect_torch.tasks.prefect_api.embedded_server.keeping import ServerKeeper, embedded_server_kept_running
from prefect_torch.tasks.prefect_api.embedded_server.tying import _start_tied, tie_new_servers
from prefect_torch.tasks.prefect_api.settings import unusable_home, using


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


def test_no_server_is_started_that_could_not_keep_its_database(tmp_path):
    (tmp_path / "file").touch()
    for home, is_usable in ((tmp_path, True), (tmp_path / "new", True), (tmp_path / "file/home", False)):
        with temporary_settings({PREFECT_HOME: home}):
            assert (unusable_home() is None) == is_usable, home
            if not is_usable:
                with pytest.raises(PermissionError, match=r"/file/home, where this user cannot write: set PREFECT_HOME"):
                    _start_tied([sys.executable, "-m", "nothing"], {})
            with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: "postgresql+asyncpg://host/prefect"}):
                assert unusable_home() is None


def test_no_server_is_started_on_the_database_of_a_newer_prefect(tmp_path):
    for revision, is_usable in ((None, True), ("9725c1cbee35", True), ("fffffffffff0", False)):  # its first one
        if revision is not None:
            with closing(sqlite3.connect(tmp_path / "prefect.db")) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num)")
                connection.execute("DELETE FROM alembic_version")
                connection.execute("INSERT INTO alembic_version VALUES (?)", [revision])
        with temporary_settings({PREFECT_HOME: tmp_path}):
            assert (newer_database() is None) == is_usable, revision
            if not is_usable:
                with pytest.raises(RuntimeError, match=r"/prefect.db was used by a newer Prefect than .*: set PREFECT_HOME"):
                    _start_tied([sys.executable, "-m", "nothing"], {})
            with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: "postgresql+asyncpg://host/prefect"}):
                assert newer_database() is None


def test_the_tables_of_a_new_database_are_made_by_one_server_at_a_time(tmp_path):
    """Of several flows that begin with a new home directory, some failed: "table ... already exists"."""
    servers, has_begun = [], threading.Event()

    def start():
        servers.append(subprocess.Popen(["sleep", "600"]))
        has_begun.set()
        return servers[-1]

    def start_another():
        with temporary_settings({PREFECT_HOME: tmp_path}):
            migrated_by_one(start)

    try:
        for ends_by in ("its own end", "its tables"):
            has_begun.clear()
            other = threading.Thread(target=start_another)
            if not servers:
                start_another()
                has_begun.clear()
            other.start()
            assert not has_begun.wait(0.5), ends_by
            if ends_by == "its own end":
                servers[-1].kill()
            else:
                with closing(sqlite3.connect(tmp_path / "prefect.db")) as connection, connection:
                    connection.execute("CREATE TABLE alembic_version (version_num)")
                    connection.execute("INSERT INTO alembic_version VALUES (?)", [_newest_revision()])
            assert has_begun.wait(60), ends_by
            other.join()
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_a_service_of_the_server_that_fails_and_is_tried_again_is_one_line(tmp_path, capfd):
    (tmp_path / "service.py").write_text(
        "import logging\nlogging.basicConfig(level='INFO', format='%(levelname)s %(message)s')\n"
        "try:\n    raise ValueError('database is locked\\n[SQL: INSERT]')\n"
        "except ValueError:\n    logging.getLogger('docket.dependencies').exception('%s failed', 'telemetry')\n"
        "logging.getLogger('docket.worker').info('two\\nlines')\n"
    )
    assert _start_tied([sys.executable, "-m", "service"], {**os.environ, "PYTHONPATH": str(tmp_path)}).wait(60) == 0
    assert capfd.readouterr().err == "ERROR telemetry failed: ValueError: database is locked\nINFO two\nlines\n"


def test_the_garbage_of_the_server_is_collected_in_a_thread_that_no_request_waits_for(tmp_path):
    """A collected cursor waits for its connection's thread, and that one, here, for the main thread's transaction."""
    (tmp_path / "collecting.py").write_text(
        """
import sqlite3, sys, threading, time

class Request:
    def __init__(self, **kept):
        self.kept, self.itself = kept, self

    def __del__(self):
        deleted_in.append(threading.current_thread())

deleted_in = []
writing, waiting = (sqlite3.connect(sys.argv[1], 20, isolation_level=None, check_same_thread=False) for _ in range(2))
writing.execute("CREATE TABLE kept (number)")
writing.execute("BEGIN IMMEDIATE")
cursor = waiting.execute("SELECT 1 UNION ALL SELECT 2")
cursor.fetchone()
Request(cursor=cursor)
del cursor
insert = threading.Thread(target=lambda: waiting.execute("INSERT INTO kept VALUES (1)"))
insert.start()
time.sleep(0.5)
begun_s = time.monotonic()
for _ in range(20):
    for _ in range(2_000):
        Request()
    time.sleep(0.1)
writing.execute("COMMIT")
insert.join()
assert time.monotonic() - begun_s < 15, "the main thread stood still until SQLite's timeout"
assert writing.execute("SELECT number FROM kept").fetchall() == [(1,)]
deadline_s = time.monotonic() + 30
while len(deleted_in) < 40_001 - 12_000 and time.monotonic() < deadline_s:
    time.sleep(0.1)
assert len(deleted_in) >= 40_001 - 12_000, "garbage stays"
assert threading.main_thread() not in deleted_in
"""
    )
    command = [sys.executable, "-m", "collecting", str(tmp_path / "database")]
    assert _start_tied(command, {**os.environ, "PYTHONPATH": str(tmp_path)}).wait(60) == 0


HEALTHY = """
import http.server, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_threads_that_need_a_server_at_the_same_time_start_one(monkeypatch):
    together, ports = threading.Barrier(3), []
    find = SubprocessASGIServer.find_available_port

    def found_together(server: SubprocessASGIServer) -> int:
        with suppress(threading.BrokenBarrierError):  # where no other thread comes
            together.wait(0.5)
        return find(server)

    def run(server: SubprocessASGIServer) -> "subprocess.Popen[bytes]":
        ports.append(server.port)
        return subprocess.Popen([sys.executable, "-c", HEALTHY, str(server.port)], stderr=subprocess.DEVNULL)

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", run)
    monkeypatch.setattr(SubprocessASGIServer, "find_available_port", found_together)
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    server = SubprocessASGIServer()
    try:
        with ThreadPoolExecutor(3) as pool:
            for started in [pool.submit(server.start, 30) for _ in range(3)]:
                started.result()
    finally:
        server.stop()
    assert len(ports) == 1


FORKED = """
import os, threading
from prefect.server.api.server import SubprocessASGIServer
from prefect_torch.tasks.prefect_api.embedded_server import tying

tying.tie_new_servers()
is_held, may_end = threading.Event(), threading.Event()

def hold():
    with tying._starting, tying.restarting:
        is_held.set()
        may_end.wait()

holder = threading.Thread(target=hold)
holder.start()
is_held.wait()
server = SubprocessASGIServer()
server.running = True
if (forked := os.fork()) == 0:
    server.start()
    os._exit(not tying.restarting.acquire(blocking=False))
_, status = os.waitpid(forked, 0)
may_end.set()
holder.join()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_waits_for_no_thread_that_starts_a_server_in_its_parent():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


SERVED_BY_PARENT = """
import os, subprocess, sys
from prefect.server.api.server import SubprocessASGIServer

if sys.argv[1] == "before":
    from prefect_torch.tasks.prefect_api.embedded_server import tying
    tying.tie_new_servers()
server = SubprocessASGIServer()
server.server_process = own = subprocess.Popen(["sleep", "600"])
reaped, has_reaped = os.pipe()
forked = os.fork()
from prefect_torch.tasks.prefect_api.embedded_server import tying
tying.tie_new_servers()
if forked == 0:
    try:
        assert own.poll() == 0  # what Python says of another process's child
        assert tying.embedded_servers() == set()
    finally:
        os.kill(own.pid, 9)
    os.read(reaped, 1)
    assert tying.embedded_servers() == set()
    server.server_process = subprocess.Popen(["true"])
    assert tying.embedded_servers() == {server}
    os._exit(0)
is_kept = tying.embedded_servers() == {server}
own.wait()
is_kept = is_kept and tying.embedded_servers() == {server}
os.write(has_reaped, b".")
_, status = os.waitpid(forked, 0)
raise SystemExit(os.waitstatus_to_exitcode(status) or not is_kept)
"""


@pytest.mark.parametrize("imports", ["before", "after"])
def test_a_fork_leaves_its_parents_server_to_the_parent(imports):
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVED_BY_PARENT, imports], check=True, timeout=120)


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
    monkeypatch.setattr(keeping, "_POLL_S", 0.0)
    server = SubprocessASGIServer()
    server.server_process = run(server)
    return starts


def test_a_server_that_dies_again_and_again_is_given_up(mortal):
    keeper = ServerKeeper()
    with disable_run_logger():
        keeper.keep(threading.Event())  # for ever, unless it gives up
    assert keeper.has_given_up
    assert len(mortal) == 1 + 3


def test_a_server_whose_database_a_newer_prefect_has_migrated_meanwhile_is_given_up(mortal, monkeypatch):
    """Which ends it; the end of the training would wait ten minutes for it."""

    def run(_server):
        mortal.append(1)
        raise RuntimeError("a newer Prefect has changed the database")

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", run)
    keeper = ServerKeeper()
    with disable_run_logger():
        keeper.keep(threading.Event())
    assert keeper.has_given_up
    assert len(mortal) == 1 + 3


def test_a_server_that_dies_now_and_then_is_started_each_time(mortal, monkeypatch):
    monkeypatch.setattr(keeping, "_RESTART_PERIOD_S", 0.0)
    keeper, ended = ServerKeeper(), threading.Event()
    with disable_run_logger():
        thread = threading.Thread(target=keeper.keep, args=(ended,))
        thread.start()
        while len(mortal) < 20:
            assert thread.is_alive()
        ended.set()
        thread.join()
    assert not keeper.has_given_up


@pytest.fixture
def settled(monkeypatch):
    """An embedded server whose keeper looks all the time, after the body of a flow, until the test ends."""
    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", lambda _: subprocess.Popen(["sleep", "600"]))
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setattr(keeping, "_POLL_S", 0.01)
    server = SubprocessASGIServer()
    server.server_process = server._run_uvicorn_command()
    with embedded_server_kept_running():
        pass
    yield server
    keeping._end_keepers()
    server.stop()


def test_a_flow_ends_as_it_does_if_no_thread_is_left_that_keeps_its_server(settled, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with embedded_server_kept_running():
        monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_server_that_dies_after_the_body_of_a_flow_is_started_again(settled):
    """For the final state and the last log lines: Prefect waited for minutes, and the process with it."""
    first = settled.server_process
    first.kill()
    wait_until(lambda: settled.server_process is not first, "a second server")
    assert settled.server_process.poll() is None


def test_a_server_that_is_being_stopped_has_not_died(settled, monkeypatch):
    """Though its process has ended a while before the one who stops it goes on."""
    restarted, process = threading.Event(), settled.server_process
    wait = process.wait
    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", lambda _: restarted.set())
    monkeypatch.setattr(process, "wait", lambda timeout: (wait(timeout), restarted.wait(0.5)))
    settled.stop()
    assert not restarted.is_set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"NO_PROXY": "127.0.0.1"}),
        ({"NO_PROXY": "a.b, c"}, {"NO_PROXY": "a.b,c,127.0.0.1"}),
        ({"no_proxy": "a", "NO_PROXY": "*"}, {"no_proxy": "a,127.0.0.1", "NO_PROXY": "*"}),
    ],
)
def test_no_proxy_stands_before_the_server_of_this_process(monkeypatch, before, after):
    monkeypatch.setattr(os, "environ", {**before, "HTTP_PROXY": "http://proxy:3128"})
    tying._reach_without_proxy("127.0.0.1")
    assert os.environ == {**after, "HTTP_PROXY": "http://proxy:3128"}
    assert urllib.request.proxy_bypass_environment("127.0.0.1", urllib.request.getproxies_environment())


def test_a_slow_first_start_has_a_minute_unless_a_setting_or_the_caller_says_how_long():
    """Whatever starts it: only flows, plans and commands waited for longer than Prefect's 20 s."""
    timeouts, startup = [], PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

    class Server:
        def _run_uvicorn_command(self):
            pass

        def start(self, timeout=None):
            timeouts.append(timeout or startup.value())

        def stop(self):
            pass

    tying._tie_from_the_start(SimpleNamespace(SubprocessASGIServer=Server))
    settings = get_current_settings()
    ephemeral = type(settings.server.ephemeral).model_construct(enabled=True)
    server = settings.server.model_copy(update={"ephemeral": ephemeral})
    with using(settings.model_copy(update={"server": server})):
        assert startup.value() == 20
        Server().start()
        Server().start(5)
    with temporary_settings({startup: 7}):
        Server().start()
    assert timeouts == [60, 5, 7]


def test_a_server_that_a_call_about_work_pools_starts_is_tied_to_this_process_too(monkeypatch):
    order = []

    def refuse(**_):
        order.append("client")
        raise PermissionError

    monkeypatch.setattr(work_pools, "tie_new_servers", lambda: order.append("tied"))
    monkeypatch.setattr(work_pools, "get_client", refuse)
    for call in (partial(work_pools.read_work_pool, "pool"), partial(work_pools.create_work_pool, "pool", "docker")):
        with pytest.raises(PermissionError):
            call()
    assert order == ["tied", "client"] * 2


def test_servers_are_tied_once_however_often_that_is_said():
    tie_new_servers()
    run = SubprocessASGIServer._run_uvicorn_command
    finders = [it for it in sys.meta_path if type(it).__module__ == tying.__name__]
    with ThreadPoolExecutor(3) as pool:
        for said in [pool.submit(tie_new_servers) for _ in range(3)]:
            said.result()
    assert SubprocessASGIServer._run_uvicorn_command is run
    assert [it for it in sys.meta_path if type(it).__module__ == tying.__name__] == finders


def test_to_import_the_module_that_ties_servers_changes_nothing():
    program = """
import sys
from prefect_torch.tasks.prefect_api.embedded_server import keeping, tying
assert not [it for it in sys.meta_path if type(it).__module__ == tying.__name__]
tying.tie_new_servers()
assert len([it for it in sys.meta_path if type(it).__module__ == tying.__name__]) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)
