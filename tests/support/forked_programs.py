"""Python programs that start without their imports: forked from a process that has imported Prefect, its server and torch.

A program that trains imports for some five seconds of a core, and tests start hundreds of them. A forked one is a process as
any other: a child of the one that starts it, with its own command line and environment also in /proc, its own descriptors,
signals and session, and what it starts itself is forked in the same way (`FORKED`). Only the modules are there already, and
the seed of Python's hashes is that of the server. Where a program must be new, use `subprocess`; where this one cannot fork,
it does so itself.
"""

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

SERVER = "import sys; sys.path.append(sys.argv[2]); import program_server; program_server.main()"
# What libraries may read when they are imported: with another value, a program is started as usual. TORCHINDUCTOR_CACHE_DIR is
# none of it: torch sets it where its compiler is imported, and all programs that are started later would be.
_READ_AT_IMPORT = re.compile(
    r"PYTHON(?!PATH$|UNBUFFERED$|DONTWRITEBYTECODE$)\w*|(?:OMP(?!_NUM_THREADS$)|MKL|OPENBLAS|KMP|GOMP|TORCH(?!INDUCTOR_CACHE_DIR$)|LD|MALLOC|CUDA|COVERAGE)_?\w*"
)
# What a forked program has forked, rather than started as usual, when it starts processes itself.
FORKED = re.compile(
    r"-m (?:prefect\.|uvicorn |prefect_torch\.tasks\.gang\.machine\.agent )|/embedded_server/program\.py \d+ uvicorn "
    r"|-u -c import sys; .* prefect_torch\.tasks\.rank\.(?:starting\.fork_server |resources\.device$)"
    r"|/benchmarks/(?:state/rank\.py |chaos\.py --train )",
    re.DOTALL,
)
# A node agent in a shell that executes it in its own place, which its guard starts.
_AGENT_IN_SHELL = re.compile(r"(?:exec |env )(\S+ -m prefect_torch\.tasks\.gang\.machine\.agent [^;&|<>]*)")
_PREPARES_CHILD = "prepare_command"  # of a guard: signals as usual, and dies with the guard
_SCRIPTS = Path(sys.executable).parent
_SUBREAPER, _IS_SUBREAPER = 36, 37  # PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER of prctl(2)
_LONGEST_IMPORTS_S = 120.0
_USUAL = subprocess.Popen


@contextlib.contextmanager
def started_as_usual() -> Iterator[None]:
    """Have nothing forked that is started meanwhile: it has a variable that libraries might read when they are imported."""
    with mock.patch.dict(os.environ, {"TORCH_IS_NEW_HERE": "1"}):
        yield


class ProgramServer:
    """The connection of this process to the one that forks its programs."""

    def __init__(self, control: socket.socket, process: subprocess.Popen | None = None) -> None:
        self._control, self._process = control, process
        self._environment = _read_at_import(os.environ)
        self._one_at_a_time = threading.Lock()
        self._is_usable: bool | None = None

    @classmethod
    def start(cls) -> "ProgramServer":
        """Start one; its imports go on while this process does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = _USUAL(
                [sys.executable, "-c", SERVER, str(theirs.fileno()), str(Path(__file__).parent)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return cls(ours, process)

    def close(self) -> None:
        """End the process that forks; its programs go on."""
        self._control.close()
        if self._process is not None:
            self._process.wait()

    def _says_that_it_is_ready(self) -> bool:
        self._control.settimeout(_LONGEST_IMPORTS_S)
        try:
            return self._control.recv(1) == b"r"
        except TimeoutError:
            return False
        finally:
            self._control.settimeout(None)

    def fork(self, request: dict[str, object], descriptors: list[int]) -> int | None:
        """Return the number of a new child of this process, or None if it has to be started as usual."""
        if _read_at_import(request["environment"]) != self._environment:
            return None
        with self._one_at_a_time:
            if self._is_usable is None:
                self._is_usable = self._says_that_it_is_ready()
            if not self._is_usable:
                return None
            message = json.dumps(request).encode()
            with _subreaper():
                socket.send_fds(self._control, [len(message).to_bytes(4, "big")], descriptors)
                self._control.sendall(message)
                answer = b""
                while len(answer) < 4:
                    more = self._control.recv(4 - len(answer))
                    assert more, "the process that forks programs has ended"
                    answer += more
        return int.from_bytes(answer, "big")


_server: ProgramServer | None = None
_starting = threading.Lock()


def program_server() -> ProgramServer:
    """Return that of this process."""
    global _server  # noqa: PLW0603 - it is the process's
    with _starting:
        if _server is None:
            _server = ProgramServer.start()
            atexit.register(_server.close)
    return _server


def use(control: socket.socket) -> None:
    """Fork from the process at the other end: a forked program has a server of its own, made before it has threads."""
    global _server  # noqa: PLW0603 - same
    _server = ProgramServer(control)
    subprocess.Popen = PopenOfProgram


def start_as_usual() -> None:
    """Undo the last step of `use`: what this process starts by `subprocess` is new."""
    subprocess.Popen = _USUAL


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, for a program of Python whose modules may be there already."""

    def _execute_child(self, *given: object) -> None:
        wanted = inspect.signature(_USUAL._execute_child).bind(self, *given).arguments
        pid = self._fork(wanted)
        if pid is None:
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*(wanted[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    def _is_to_be_forked(self, command: list[str]) -> bool:
        return True

    def _fork(self, wanted: dict[str, object]) -> int | None:
        if wanted["shell"] or wanted["executable"] or not wanted["close_fds"]:
            return None
        if wanted["preexec_fn"] is not None and wanted["preexec_fn"].__name__ != _PREPARES_CHILD:
            return None
        others = ("gid", "gids", "uid", "umask", "process_group")
        if any(wanted.get(name) not in {None, -1} for name in others) or sys.platform != "linux":
            return None
        command = [os.fsdecode(word) for word in ([wanted["args"]] if isinstance(wanted["args"], str) else wanted["args"])]
        command = _agent_in_shell(command) or command
        program = _program(command)
        if program is None or not self._is_to_be_forked(command):
            return None
        environment = os.environ if wanted["env"] is None else wanted["env"]
        request = {
            "command": command,
            "kind": program[0],
            "words": program[1],
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "starts_session": bool(wanted["start_new_session"]),
            "dies_with_parent": wanted["preexec_fn"] is not None,
            "numbers": [0, 1, 2, *wanted["pass_fds"]],
        }
        ends = [wanted[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        with contextlib.ExitStack() as opened:
            folder = os.open(wanted["cwd"] or ".", os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            standard = [number if end == -1 else end for number, end in enumerate(ends)]
            return program_server().fork(request, [folder, *standard, *wanted["pass_fds"]])


class PopenOfProgram(Popen):
    """What a forked program starts: of its programs, those whose imports are known to be the same."""

    def _is_to_be_forked(self, command: list[str]) -> bool:
        return FORKED.search(" ".join(command[1:])) is not None


def run_program(command, *, input=None, timeout=None, check=False, capture_output=False, **options):  # noqa: A002 - as subprocess.run
    """As `subprocess.run`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _program(command: list[str]) -> tuple[str, list[str]] | None:
    """Return how the interpreter gets its program ("-c", "-m" or a file) and its arguments; None if it is another one."""
    first, *words = command
    if first != sys.executable:
        script = Path(first)
        is_python = script.parent == _SCRIPTS and script.is_file() and script.read_bytes()[:2] == b"#!"
        return ("file", command) if is_python else None
    while words[:1] in (["-u"], ["-B"]):  # multiprocessing gives -B where a variable says the same to all
        words = words[1:]
    if words[:2] == ["-S", "-E"] and _agent_in_shell(words[6:]):  # its guard, with the numbers of three pipes
        words = words[2:]
    if words[:1] in (["-c"], ["-m"]) and len(words) > 1:
        return words[0], words[1:]
    return ("file", words) if words and not words[0].startswith("-") else None


def _agent_in_shell(command: list[str]) -> list[str] | None:
    """Return the command of a node agent without the shell that only executes it; None if it is another one."""
    found = _AGENT_IN_SHELL.fullmatch(command[2]) if command[:2] == ["sh", "-c"] else None
    return None if found is None else shlex.split(found[1])


def _read_at_import(environment) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_AT_IMPORT.fullmatch(name)}


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process be the parent of processes below it whose own has ended; a guard is it before and afterwards, too."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    assert libc.prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    assert libc.prctl(_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.prctl(_SUBREAPER, before.value, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
