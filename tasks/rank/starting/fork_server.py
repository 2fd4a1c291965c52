"""A process that has imported what every rank imports, and forks ranks, which then start without these imports.

    python -u -c ... <this module> <control socket> <where torch is imported from> [without-compiler]

Once its imports are done, it sends READY; where a fork would not be safe, it exits instead. Each message carries the
`Descriptors` of a rank, its working directory, and the descriptors that its guard keeps open. The answer is FORKED, or REFUSED
if the rank has to be started in another way. The first bytes of the rank's input are its environment. The process has one
thread, and imports no code of the user. While it is idle, it imports torch's compiler, as a rank's first optimizer does.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple, NoReturn

from . import guard
from .process_title import set_process_title

READY, FORKED, REFUSED = b"r", b"f", b"x"
_WITHOUT_COMPILER = "without-compiler"
_IDLE_S = 2.0
_LENGTH = struct.Struct("!Q")
_MOST_DESCRIPTORS = 64
_HARMLESS_DEVICES = ("full", "null", "ptmx", "pts/", "random", "shm/", "tty", "urandom", "zero")


class Descriptors(NamedTuple):
    """The ends of the pipes of a rank's process.

    Attributes:
        stdin: The pipe from which it reads its environment (`environment_header`) and its input.
        output: The pipe for its output.
        lifeline: The lifeline of `guard`.
        status: The status pipe of `guard`.
        result: The pipe for its result.

    """

    stdin: int
    output: int
    lifeline: int
    status: int
    result: int


def environment_header(environment: dict[str, str]) -> bytes:
    """Return the bytes that come before a rank's input: its environment."""
    pickled = pickle.dumps(environment)
    return _LENGTH.pack(len(pickled)) + pickled


def main() -> None:
    """Fork ranks until the other end of the control socket is closed; in a rank, run it."""
    number, torch_place, *options = sys.argv[2:]
    control = socket.socket(fileno=int(number))
    if _WITHOUT_COMPILER not in options:  # else a request may come already, and send SIGIO, too
        _end_with_client(control, is_wanted=True)
    set_process_title(" ".join([sys.executable, __name__, *options]))
    if torch_place and getattr(PathFinder.find_spec("torch"), "origin", None) != torch_place:
        sys.exit(f"{__name__}: ranks import torch from {torch_place}")
    gc.disable()  # imports leave little garbage, and to look for it takes a sixth of their time
    run_rank = import_for_ranks()
    if (danger := find_danger()) is not None:
        sys.exit(f"{__name__}: a fork would not be safe: {danger}")
    _freeze()
    _end_with_client(control, is_wanted=False)
    result = _serve(control, imports_compiler=_WITHOUT_COMPILER not in options)
    sys.argv = ["-c", str(result)]
    run_rank()


def import_for_ranks() -> Callable[[], None]:
    """Import the modules that a rank needs before the user's function, and probably in it; return the rank's program."""
    import prefect_torch.ckpt.state.loading.load  # noqa: PLC0415 - imports torch; the client of this module must not
    import prefect_torch.ckpt.state.save  # noqa: PLC0415 - imports torch
    import prefect_torch.ckpt.storage.opening  # noqa: F401, PLC0415 - imports torch
    import torch.distributed  # noqa: PLC0415 - imports torch
    import torch.nn.parallel  # noqa: PLC0415 - imports torch
    import torch.optim  # noqa: F401, PLC0415 - imports torch
    from prefect_torch.tasks.rank.main import main as run_rank  # noqa: PLC0415 - imports torch

    return run_rank


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # a collection in a rank must not write to the pages that it shares with this process
    gc.enable()


def _import_compiler(control: socket.socket) -> None:
    """Import torch's compiler, which every optimizer needs; if a fork is not safe with it, restart this process without it."""
    gc.disable()  # imports leave little garbage
    import torch._dynamo  # noqa: F401, PLC0415 - it takes longer than the rest of torch

    if find_danger() is not None:
        control.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], _WITHOUT_COMPILER])  # noqa: S606 - no shell is meant
    _freeze()
    set_process_title(f"{sys.executable} {__name__} with torch._dynamo")


def find_danger() -> str | None:
    """Return why a process forked from this one would be broken; None if it would not.

    A fork lacks the threads of libraries, and shares a driver's connection to a device. Threads that end before each fork,
    as those of OpenBLAS do, are no danger: a first fork ends them.
    """
    if (pid := os.fork()) == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # the kernel has reaped it
        os.waitpid(pid, 0)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 - names alone
        return f"{num_threads} threads"
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if int(entry.name) > 2 and os.path.lexists(entry)]  # noqa: PTH115, PLR2004 - names alone; 2 is stderr
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    mapped = [line.partition("/")[1] + line.partition("/")[2] for line in lines]
    devices = sorted({path for path in (*opened, *mapped) if is_device(path)})
    return f"{', '.join(devices)} is open" if devices else None


def is_device(path: str) -> bool:
    """Return whether `path` is that of a device with a driver behind it, such as a GPU."""
    return path.startswith("/dev/") and not path.removeprefix("/dev/").startswith(_HARMLESS_DEVICES)


def _end_with_client(control: socket.socket, *, is_wanted: bool) -> None:
    """Let the kernel end this process when the client's end of the socket is closed (SIGIO), also while it imports."""
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if is_wanted else flags & ~os.O_ASYNC)


def _serve(control: socket.socket, *, imports_compiler: bool) -> int:
    """Return in each rank, with the descriptor of its result pipe; never in this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the guards
    try:
        control.send(READY)
        while True:
            if imports_compiler and not select.select([control], [], [], _IDLE_S)[0]:
                imports_compiler = False
                _import_compiler(control)
            _, received, _, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS)
            if not received:
                os._exit(0)
            try:
                pid = os.fork()
            except OSError:  # no memory, or too many processes
                pid = -1
            if pid == 0:
                control.close()
                return _start_rank(Descriptors(*received[:5]), *received[5:])
            for descriptor in received:
                os.close(descriptor)
            control.send(REFUSED if pid < 0 else FORKED)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _start_rank(ends: Descriptors, folder: int, *held: int) -> int:
    """Fork the rank, and return in it; this process becomes its guard."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.fchdir(folder)
    for source, target in ((ends.stdin, 0), (ends.output, 1), (ends.output, 2)):
        os.dup2(source, target)
    for descriptor in (ends.stdin, ends.output, folder):
        os.close(descriptor)
    _take_environment()
    guard.prepare_guard()
    guard_pid = os.getpid()
    if (pid := os.fork()) == 0:
        os.setsid()
        guard.prepare_command()
        if os.getppid() != guard_pid:  # the guard was killed before `prepare_command` tied this process to it
            os._exit(1)
        for descriptor in (ends.lifeline, ends.status, *held):
            os.close(descriptor)
        _be_fresh()
        return ends.result
    os.close(ends.result)
    return _guard_rank(pid, ends, held)


def _guard_rank(pid: int, ends: Descriptors, held: tuple[int, ...]) -> NoReturn:
    """Become the guard of a rank: its program instead of this one, whose memory it does not need."""
    for descriptor in (ends.lifeline, ends.status, *held):
        os.set_inheritable(descriptor, True)
    words = [guard.__file__, str(ends.lifeline), str(ends.status), guard.ADOPT, str(pid)]
    try:
        os.execv(sys.executable, [sys.executable, "-S", "-E", *words])  # noqa: S606 - no shell is meant
    finally:
        os._exit(1)  # the rank is killed by the kernel


def _take_environment() -> None:
    (length,) = _LENGTH.unpack(_read(_LENGTH.size))
    environment = pickle.loads(_read(length))  # noqa: S301 - from the process that started this one
    os.environ.clear()
    os.environ.update(environment)


def _read(length: int) -> bytes:
    """Return exactly `length` bytes of the standard input, which has the rank's own input behind them."""
    data = b""
    while len(data) < length:
        if not (more := os.read(0, length - len(data))):
            os._exit(1)  # the client is gone
        data += more
    return data


def _be_fresh() -> None:
    """Give this process its own signal handlers, random numbers and title, as a new interpreter has them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # `random` seeds itself after a fork. A new process seeds the generators of GPUs with a constant, so they stay as they are.
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    importlib.invalidate_caches()
    set_process_title(f"{sys.executable} prefect_torch.tasks.rank.main rank={os.environ.get('RANK', '')}")
