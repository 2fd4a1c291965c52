"""The fork servers of this process, one for each context in which ranks are forked; imports neither torch nor prefect.

Linux only: elsewhere libraries of the system may have threads, or connections to devices, that a fork would break.
"""

import atexit
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import prefect_torch
from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks
from prefect_torch.tasks.rank.starting.fork_server import FORKED, READY, Descriptors
from prefect_torch.tasks.rank.user_code.shadowing import standard_library

RANK_PROGRAM = "prefect_torch.tasks.rank.main"  # what is forked
# Not "-m", which looks in the working directory first: a file there named queue.py would be the `queue` of every module.
# The search path of this process, to which a PEX or `site.addsitedir` has added the package, is taken only where another
# package, or none, is found without it: before its function, a rank imports no file of the user's.
_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); from importlib import import_module, util; "
    "spec = util.find_spec('prefect_torch'); sys.path[:] = sys.path if spec and spec.origin == {!a} else {!a}; "
    "import_module(sys.argv[1]).{}()"
)
# No library reads these variables when it is imported: those of a rank, of the GPUs that an initialized driver shows, of NCCL's
# flight recorder, of clouds, of Prefect, and those that pytest changes with each test.
_NOT_READ_AT_IMPORT = re.compile(
    r"((LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w+"
    r"|[A-Z]+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|TORCH_NCCL_\w+|TORCH_FR_\w+|(AWS|AZURE|GCS|GOOGLE|PREFECT|PYTEST)_\w+)"
)
# What a process inherits beside its environment: limits, the user's rights, the CPUs, ignored signals.
_INHERITED = re.compile(
    r"^(?:Umask|Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|SigBlk|SigIgn|Cpus_allowed|Mems_allowed):.*$", re.MULTILINE
)
_ANSWERS_WITHIN_S = 120.0  # imports from a slow disk are the longest wait; a rank started by its command has the same ones
_MOST_SERVERS = 2  # a training's and that of an evaluation beside it, which may have other numbers of threads


def python_command(module: str, function: str = "main") -> list[str]:
    """Return the command that runs a function of a module of this package, as it is imported here, in a new interpreter."""
    standard, search_path = standard_library(), [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the working directory
    search_path.sort(key=lambda path: path not in standard)
    return [sys.executable, "-u", "-c", _RUN.format(prefect_torch.__file__, search_path, function), module]


def check_interpreter() -> None:
    """Raise RuntimeError in a frozen program (PyInstaller), which each command for Python would start once more."""
    if getattr(sys, "frozen", False):
        raise RuntimeError(
            f"{sys.executable} is a frozen program and no Python, which ranks and Prefect's server are started by: "
            "start the training in an environment with Python"
        )


def fill_closed_streams() -> None:
    """Let no pipe have the number of a standard stream that is closed (`2>&-`), which a new process would overwrite."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr
        pass
    os.close(number)


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Everything that a process inherits from its parent; a rank may be forked only if a new process would inherit the same.

    Attributes:
        environment: The variables that libraries may read when they are imported.
        inherited: The attributes that the kernel passes on, such as limits.
        torch_place: The file from which torch is imported; empty if it is not on the search path itself.
        client: The process that may use the server.

    """

    environment: tuple[tuple[str, str], ...]
    inherited: str
    torch_place: str
    client: int

    @classmethod
    def of_rank(cls, environment: Mapping[str, str]) -> "ProcessContext":
        """Return the context of a rank with `environment` that the calling thread would start."""
        kept = sorted((name, value) for name, value in environment.items() if not _NOT_READ_AT_IMPORT.fullmatch(name))
        thread = Path("/proc/thread-self")
        inherited = [os.fsdecode((thread / name).read_bytes()) for name in ("limits", "cgroup", "status")]
        spec = PathFinder.find_spec("torch")
        return cls(
            tuple(kept),
            "\n".join([*inherited[:2], *_INHERITED.findall(inherited[2]), str(os.getpriority(os.PRIO_PROCESS, 0))]),
            (spec.origin if spec is not None else None) or "",
            os.getpid(),
        )


class ForkServer:
    """A process that forks ranks (`prefect_torch.tasks.rank.starting.fork_server`); it ends with this process.

    Attributes:
        has_refused: Whether it exited by itself, since a fork would not be safe there, or its imports failed.

    """

    def __init__(self, context: ProcessContext) -> None:
        self.has_refused = False
        fill_closed_streams()
        self._control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(self._control.fileno(), end.fileno())
        try:
            self._process = subprocess.Popen(
                [*python_command("prefect_torch.tasks.rank.starting.fork_server"), str(end.fileno()), context.torch_place],
                env=dict(context.environment),
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # If stderr was closed, a socket may have its number, and the server would not inherit that.
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
                start_new_session=True,
            )
        except BaseException:
            close_here(self._control.detach())
            raise
        finally:
            close_here(end.detach())
        self._is_ready = False
        self._one_at_a_time = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether its process has not exited."""
        return self._process.poll() is None

    def fork(self, ends: Descriptors, folder: int, held: Sequence[int]) -> bool:
        """Fork a rank, once the imports are done, and return whether that succeeded; else nothing was started.

        A server that does not answer, such as one that was stopped by SIGSTOP, is killed after two minutes.

        Args:
            ends: The ends of its pipes.
            folder: A descriptor of its working directory.
            held: The descriptors that its guard keeps open.

        """
        with self._one_at_a_time, contextlib.suppress(OSError):
            self._is_ready = self._is_ready or self._receive() == READY
            if self._is_ready:
                socket.send_fds(self._control, [b"."], [*ends, folder, *held])
                answer = READY
                while answer == READY:  # sent again after a restart without torch's compiler
                    answer = self._receive()
                if answer == FORKED:
                    return True
                self._is_ready = self._process.poll() is None
        if not self._is_ready:
            self.has_refused = self._process.wait() > 0
        return False

    def _receive(self) -> bytes:
        """Return the next message of the server, or b"" when it is gone; kill it if none comes in time."""
        self._control.settimeout(_ANSWERS_WITHIN_S)
        try:
            return self._control.recv(1)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            return self._control.recv(1)  # it may have answered at the last moment

    def close(self) -> None:
        """End its process; ranks that it has forked keep running."""
        self._process.kill()
        self._process.wait()
        close_here(self._control.detach())


class ForkServers:
    """The fork servers of a process, by their context; the least recently used one is closed for a new one."""

    def __init__(self) -> None:
        self._servers: dict[ProcessContext, ForkServer] = {}
        self._lock = threading.Lock()

    def find(self, environment: Mapping[str, str]) -> ForkServer | None:
        """Return a server for a rank with `environment` without waiting for it; start it if there is none, or it has died.

        Returns:
            None where no rank can be forked.

        """
        if sys.platform != "linux":
            return None
        context = ProcessContext.of_rank(environment)
        with self._lock:
            server = self._servers.pop(context, None)
            if server is None or not (server.is_alive or server.has_refused):
                server = self._start(context, server)
            if server is not None:
                self._servers[context] = server  # the last one is the most recently used
        return None if server is None or server.has_refused else server

    def close(self) -> None:
        """Close all servers."""
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()

    def _start(self, context: ProcessContext, died: ForkServer | None) -> ForkServer | None:
        if died is not None:
            died.close()
        while len(self._servers) >= _MOST_SERVERS:
            self._servers.pop(next(iter(self._servers))).close()
        try:
            return ForkServer(context)
        except OSError:
            return None


FORK_SERVERS = ForkServers()
atexit.register(FORK_SERVERS.close)
