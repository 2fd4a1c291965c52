"""Ties Prefect's embedded server to the process that started it: it survives a Ctrl-C, and ends when the process is killed."""

import atexit
import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import requires, version
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from prefect.settings import get_current_settings
from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks
from prefect_torch.tasks.prefect_api.settings import unusable_home, unused_key
from prefect_torch.tasks.run_logs import get_run_logger

from .database import migrated_by_one, newer_database

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

restarting = threading.Lock()  # held while a server that has died is started again, and while one is being stopped
_PROGRAM, _WATCHER = (str(Path(__file__).with_name(name)) for name in ("program.py", "watcher.py"))
_SERVER_MODULE = "prefect.server.api.server"
_STARTUP_TIMEOUT_S = 60
_tied: "weakref.WeakSet[subprocess.Popen[Any]]" = weakref.WeakSet()
_starters: "weakref.WeakKeyDictionary[subprocess.Popen[Any], int]" = weakref.WeakKeyDictionary()  # the pid of who started each
_beginning, _starting = threading.Lock(), threading.Lock()  # trainings in threads of one process share one server
_has_begun = threading.Event()


def tie_new_servers() -> None:
    """Tie each embedded server that this process starts from now on to it, from the server's first instruction on.

    Prefect stops it at a normal exit only: the server of a killed flow would keep running, with its database locked. A Ctrl-C
    at the terminal ends this process alone, since the final state is yet to be recorded.

    Costs nothing until Prefect imports its server, and nothing when it is called again.
    """
    with _beginning:
        if not _has_begun.is_set():
            os.register_at_fork(after_in_child=_release_in_this_fork)
            _when_server_is_imported(_tie_from_the_start)
            _has_begun.set()


def tie_running_servers() -> None:
    """Let no embedded server of this process outlive it: one that was started before `tie_new_servers` gets a watcher process.

    Costs nothing with a separate server. Logs a warning if a key of Prefect Cloud is set but not used.
    """
    if (unused := unused_key()) is not None:
        get_run_logger().warning("%s: %s", *unused)
    for server in embedded_servers():
        process = server.server_process
        if process is not None and process not in _tied:
            _tied.add(process)
            _watch(process)


def embedded_servers() -> "set[SubprocessASGIServer]":
    """Return the embedded servers that this process has started; in a fork, those of the parent look as if they had died."""
    module = sys.modules.get(_SERVER_MODULE)
    known = [] if module is None else [*module.SubprocessASGIServer._instances.values()]  # noqa: SLF001 - Prefect offers no other way
    return {server for server in known if _is_of_this_process(server.server_process)}


def _is_of_this_process(process: "subprocess.Popen[Any] | None") -> bool:
    """Return whether this process has started `process`; also if it has none, or one that was gone when it was first seen.

    The kernel's word is remembered: the server that a parent has stopped, and started again, is no lost one of its fork.
    """
    if process is None:
        return True
    if process not in _starters:
        try:
            _, parent, *_ = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            _starters[process] = int(parent)
        except OSError:  # it is gone, or there is no /proc
            _starters[process] = os.getpid()
    return _starters[process] == os.getpid()


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
        with restarting:
            stop(self)

    server.start, server.stop = start_once, stop_for_good


def _release_in_this_fork() -> None:
    """Release what another thread held at the fork: that thread is not in this process, and nobody else would."""
    for lock in (_beginning, _starting, restarting):
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
                [python, _PROGRAM, str(lifeline), *module],
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
        [sys.executable, "-S", "-E", _WATCHER, str(process.pid)],
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
