"""Ties Prefect's embedded server to the process that started it: it survives a Ctrl-C, and ends when the process is killed."""

import atexit
import importlib
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import requires, version
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from prefect.settings import get_current_settings
from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks
from prefect_torch.tasks.run_logs import get_run_logger

from .embedded_database import migrated_by_one, newer_database
from .settings import unusable_home, unused_key, using

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

# Collects a server's garbage in a thread of its own. A cursor that is collected waits for its connection's thread, which may
# wait for the lock of the main thread's transaction: if the main thread collects, all stands still for SQLite's timeout, 60 s.
COLLECTED_ELSEWHERE = """
import gc, threading, time

def collect_garbage():
    whole_s = time.monotonic()
    while True:
        time.sleep(0.1)
        if gc.get_count()[0] > 10_000:
            is_whole = time.monotonic() - whole_s > 60
            gc.collect(2 if is_whole else 1)
            whole_s = time.monotonic() if is_whole else whole_s

gc.disable()
threading.Thread(target=collect_garbage, daemon=True).start()
"""

# Runs a module in the server's process, as "python -m" does, but searches the working directory last: a queue.py there would
# end the server. The kernel closes the lifeline however the process at its other end died; end-of-file means that no process
# is left to stop the server. A failure of its services, which they retry, is one line at a training's terminal: else the first
# start shows a traceback of 90 lines when SQLite refuses the record of its telemetry.
_SEARCHES_HERE_LAST = """
import os, sys
sys.path[:] = [*filter(None, sys.path), os.getcwd()]
"""
_TIED = (
    _SEARCHES_HERE_LAST
    + COLLECTED_ELSEWHERE
    + """
import logging, runpy, signal

def in_one_line(record):
    if record.exc_info:
        kind, error, _ = record.exc_info
        record.msg, record.args = f"{record.getMessage()}: {kind.__name__}: {error}".partition("\\n")[0], ()
        record.exc_info = record.exc_text = None
    return True

def end_with_parent():
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    os._exit(1)

for name in ("docket.dependencies", "docket.worker"):
    logging.getLogger(name).addFilter(in_one_line)
lifeline, module, sys.argv[1:] = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
)
_WATCHER = """
import contextlib, os, signal, sys
if not os.read(0, 1):
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
_POLL_S = 1.0
_STARTUP_TIMEOUT_S = 60
_MAX_RESTARTS = 3  # within the period; whatever ended the server that often would end it again
_RESTART_PERIOD_S = 600.0
_tied: "weakref.WeakSet[subprocess.Popen[Any]]" = weakref.WeakSet()
_starting, _restarting = threading.Lock(), threading.Lock()  # trainings in threads of one process share one server
_left: set[threading.Event] = set()  # they end the keepers whose bodies have ended
_SERVER_MODULE = "prefect.server.api.server"


def tie_embedded_server() -> None:
    """Ensure that this process's embedded server does not outlive it; costs nothing with a separate server.

    Prefect stops it at a normal exit only: the server of a killed flow would keep running, with its database locked. A server
    started after this module's import is tied from its first instruction on; a server started before gets a watcher process.
    Logs a warning if a key of Prefect Cloud is set but not used.
    """
    if (unused := unused_key()) is not None:
        get_run_logger().warning("%s: %s", *unused)
    for server in _embedded_servers():
        process = server.server_process
        if process is not None and process not in _tied:
            _tied.add(process)
            _watch(process)


class ServerKeeper:
    """Restarts an embedded server that died, at the same port and with the same database.

    Attributes:
        has_given_up: Whether the server died too often to be restarted once more.

    """

    def __init__(self) -> None:
        self.has_given_up = False
        self._restarts_s: deque[float] = deque(maxlen=_MAX_RESTARTS)

    def keep(self, ended: threading.Event) -> None:
        """Restart the servers of this process that die until `ended` is set."""
        while not ended.wait(_POLL_S) and not self.has_given_up:
            for server in _embedded_servers():
                process = server.server_process
                with _restarting:
                    if process is not None and process.poll() is not None and server.server_process is process:
                        self._restart(server, process.returncode)

    def _restart(self, server: "SubprocessASGIServer", returncode: int) -> None:
        now_s = time.monotonic()
        if len(self._restarts_s) == _MAX_RESTARTS and now_s - self._restarts_s[0] < _RESTART_PERIOD_S:
            self.has_given_up = True
            return
        self._restarts_s.append(now_s)
        get_run_logger().warning("Prefect's embedded server has died (exit code %d): starting it again", returncode)
        try:
            server.server_process = server._run_uvicorn_command()  # noqa: SLF001 - `start` waits, and takes another port
        except (OSError, RuntimeError) as exc:  # the latter for a database that a newer Prefect has migrated meanwhile
            get_run_logger().warning("Prefect's embedded server cannot be started: %s", exc)


@contextmanager
def embedded_server_kept_running() -> Iterator[ServerKeeper]:
    """Restart this process's embedded server whenever it dies, until the process ends; costs nothing with a separate server.

    The flow's end needs it after the body: Prefect waits for minutes to send the final state and the last log lines.
    """
    _end_keepers()
    keeper, ended = ServerKeeper(), threading.Event()
    if not _embedded_servers():
        yield keeper
        return
    # In this context, so that the server gets Prefect's current settings and log lines go to this flow run.
    thread = threading.Thread(target=copy_context().run, args=(keeper.keep, ended), daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        ended.set()
        thread.join()
        _keep_on(keeper)


def _keep_on(keeper: ServerKeeper) -> None:
    """Restart the servers that die until a body like the one that has ended begins, or Prefect stops the server at exit.

    Not in this context, which would keep the flow run's result, and whose log lines Prefect refuses once the process ends.
    """
    settings, ended = get_current_settings(), threading.Event()

    def keep() -> None:
        with using(settings):
            keeper.keep(ended)

    _left.add(ended)
    with suppress(RuntimeError):  # no thread is left: the flow ends all the same, unless its server dies just then
        threading.Thread(target=keep, daemon=True).start()


def _end_keepers() -> None:
    for ended in tuple(_left):
        ended.set()
        _left.discard(ended)


def _embedded_servers() -> "set[SubprocessASGIServer]":
    module = sys.modules.get(_SERVER_MODULE)
    return set() if module is None else set(module.SubprocessASGIServer._instances.values())  # noqa: SLF001 - Prefect offers no other way


def _tie_from_the_start(module: ModuleType) -> None:
    """Replace `subprocess.Popen` for the one method of Prefect that starts the server, which builds the command itself.

    Threads that need the server at the same time start one, and all wait for it; Prefect would start one for each, at one port.
    It has a minute, unless a setting says how long: Prefect gives up after 20 s, and the first start, which makes the tables of
    the database, takes 18 s on an idle machine. A server that is being stopped is none that has died.
    """
    server = module.SubprocessASGIServer
    run = server._run_uvicorn_command  # noqa: SLF001 - Prefect offers no other way
    seen = {**run.__globals__, "subprocess": SimpleNamespace(Popen=_start_tied)}
    server._run_uvicorn_command = FunctionType(run.__code__, seen)  # noqa: SLF001
    start = server.start

    def start_once(self: "SubprocessASGIServer", timeout: int | None = None) -> None:
        is_set = "startup_timeout_seconds" in get_current_settings().server.ephemeral.model_fields_set
        with _starting:
            start(self, timeout if timeout or is_set else _STARTUP_TIMEOUT_S)

    stop = server.stop

    def stop_for_good(self: "SubprocessASGIServer") -> None:
        with _restarting:
            stop(self)

    server.start, server.stop = start_once, stop_for_good


def _release_in_this_fork() -> None:
    """Release what another thread held at the fork: that thread is not in this process, and nobody else would."""
    for lock in (_starting, _restarting):
        if lock.locked():
            lock.release()


def _start_tied(args: list[str], env: dict[str, str]) -> "subprocess.Popen[Any]":
    if (why := unusable_home()) is not None:  # else Prefect starts it again and again, with 200 lines of traceback each time
        raise PermissionError(": ".join(why))
    if (why := newer_database()) is not None:  # else Prefect starts it again and again, too
        raise RuntimeError(": ".join(why))
    _reach_without_proxy("127.0.0.1")
    python, _, *module = args  # python -m uvicorn ...
    lifeline, own_end = os.pipe()
    close_in_forks(lifeline, own_end)
    try:
        process = migrated_by_one(
            partial(
                subprocess.Popen,
                [python, "-c", _TIED, str(lifeline), *module],
                env=env,
                pass_fds=[lifeline],
                # A terminal sends Ctrl-C to this process's session; without the server, the final state could not be recorded.
                start_new_session=True,
            )
        )
    except BaseException:
        close_here(own_end)
        raise
    finally:
        close_here(lifeline)
    weakref.finalize(process, close_here, own_end).atexit = False  # Prefect itself stops the server first
    _tied.add(process)
    return process


def _reach_without_proxy(host: str) -> None:
    """Let no proxy of the environment stand between this process, or what it starts, and a host."""
    for name in [it for it in ("no_proxy", "NO_PROXY") if it in os.environ] or ["NO_PROXY"]:  # the first counts
        others = [it.strip() for it in os.environ.get(name, "").split(",") if it.strip()]
        if not {host, "*"} & {*others}:
            os.environ[name] = ",".join([*others, host])


def _watch(process: "subprocess.Popen[Any]") -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCHER, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert watcher.stdin is not None
    close_in_forks(watcher.stdin.fileno())
    atexit.register(_release, watcher)  # runs before Prefect's own, which then stops the server


def _release(watcher: "subprocess.Popen[bytes]") -> None:
    watcher.communicate(b".")


def _when_server_is_imported(act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module of Prefect's embedded server once it is imported, or immediately if it has been.

    An import here would cost every process a second, and fail where only a remote API is used and the server's libraries are
    incompatible. Where an embedded server is needed and its libraries are incompatible, the import raises an ImportError that
    says what to install.
    """
    if _SERVER_MODULE in sys.modules:
        act(importlib.import_module(_SERVER_MODULE))  # waits for another thread that imports it
    else:
        sys.meta_path.insert(0, _Finder(act))


class _Finder(MetaPathFinder):
    """Finds the server's module as Python does, and calls `act` once the module has been executed."""

    def __init__(self, act: Callable[[ModuleType], None]) -> None:
        self._act = act

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _SERVER_MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            try:
                execute(module)
            except Exception as exc:
                raise ImportError(_advice(exc)) from exc
            self._act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this one loader, which is the module's own
        return spec


def _advice(exc: Exception) -> str:
    fitting = [Requirement(line) for line in requires("prefect-torch") or () if 'extra == "server"' in line]
    installed = " and ".join(f"{one.name} {version(one.name)}" for one in fitting)
    wanted = " ".join(f"'{one.name}{one.specifier}'" for one in fitting)
    return (
        f"the server of prefect {version('prefect')}, which a flow starts unless PREFECT_API_URL names another, does not run "
        f"with {installed} ({type(exc).__name__}: {exc}): pip install {wanted}, or set PREFECT_API_URL"
    )


os.register_at_fork(after_in_child=_release_in_this_fork)
atexit.register(_end_keepers)  # runs before Prefect stops a server that was started before this module's import
_when_server_is_imported(_tie_from_the_start)
