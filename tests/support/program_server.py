"""The process that has imported what programs of the tests import, and forks them (`forked_programs`).

It forks a process that forks the program and ends, so that the kernel makes the program a child of the one that asks, which is
a subreaper meanwhile. Before a program begins, it forks a server of its own, since it may have threads later.
"""

import array
import asyncio
import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import json
import math
import mmap
import os
import random
import re
import runpy
import signal
import socket
import sqlite3
import struct
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_MM, _MAP = 35, 14  # of prctl(2)
_DIES_WITH_PARENT = 1  # same: PR_SET_PDEATHSIG
_COLLAPSE, _HUGE = 25, 2**21  # of madvise(2)
_MODULES = (
    "prefect.flows",
    "prefect.cli",
    "prefect.cli.server",
    "prefect.flow_engine",
    "prefect.server.api.server",
    "prefect.events.clients",
    "prefect.workers.process",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "aiosqlite",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "pandas",
    "sklearn.datasets",
    "lightning.pytorch",
    "transformers.trainer",
    "prefect_torch.ckpt",
    "prefect_torch.tasks",
    "prefect_torch.flows.training",
    "prefect_torch.flows.evaluation",
    "prefect_torch.flows.pruning",
    "prefect_torch.flows.sweeping",
    "prefect_torch.flows",
)
# What starts no program that could be forked, too, and needs no server for that.
_STARTS_NONE = re.compile(
    r" uvicorn |prefect server start|multiprocessing\.forkserver"
    r"|prefect_torch\.tasks\.rank\.(?:starting\.fork_server|resources\.device)"
)
_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
_kept: list[object] = []  # memory that the kernel reads


def main() -> None:
    """Fork programs until the other end of the control socket is closed; in each, be it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for kind in (signal.SIGINT, *_IGNORED):
        signal.signal(kind, signal.SIG_IGN)  # it is in the session of its programs
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # multiprocessing blocks some where it starts a process
    wanted = _prepare_and_serve(control)
    if wanted is None:
        os._exit(0)  # to take down the modules takes half a second
    be(wanted)


def _prepare_and_serve(control: socket.socket) -> dict | None:
    sys.path[:] = [entry for entry in sys.path if entry not in {"", str(Path(__file__).parent)}]
    gc.disable()  # imports leave little garbage, and to look for it takes a sixth of their time
    for module in _MODULES:
        with warnings.catch_warnings():
            if module.startswith("prefect_torch"):
                warnings.simplefilter("error")  # as pytest does where it imports: a forked worker does so no more
            importlib.import_module(module)
    from prefect_torch.tasks.rank.starting import fork_server  # noqa: PLC0415 - it decides what is safe

    # At the end of a flow, Prefect would wait until the thread that sends its heartbeats wakes up, for up to a second.
    sys.modules["prefect.flow_engine"]._send_heartbeats.__wrapped__.__defaults__ = (False,)
    _have_refused_writes_repeated_soon(sys.modules["prefect.server.api.server"])
    fork_server.import_for_ranks()
    if fork_server.find_danger() is not None or not _set_shown(sys.orig_argv, dict(os.environ)):
        return None
    _point_at_nothing(0)
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # programs that live for seconds: else a tenth of their time goes into looking for garbage
    _have_huge_pages()
    control.sendall(b"r")
    return _serve(control)


def _have_refused_writes_repeated_soon(server: ModuleType) -> None:
    """Let Prefect's server say when to ask again where SQLite refuses a write: its clients wait for two seconds otherwise.

    It does so at once, and often, where a transaction has read before it writes, and another one has written meanwhile.
    """
    answer_error = server.custom_internal_exception_handler

    async def answer(request: object, error: Exception) -> object:
        response = await answer_error(request, error)
        if response.status_code == 503 and isinstance(getattr(error, "orig", None), sqlite3.OperationalError):
            response.headers["Retry-After"] = "0.3"
        return response

    server.custom_internal_exception_handler = answer


def _have_huge_pages() -> None:
    """Let the kernel put this process's memory into pages of 2 MiB, where it can: a fork then takes 9 ms instead of 35."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        start, end = (int(it, 16) for it in place.split("-"))
        if rights == "rw-p" and inode == "0":
            for page in range(-(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE, _HUGE):
                _LIBC.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), _COLLAPSE)


def _serve(control: socket.socket) -> dict | None:
    while True:
        received = _receive(control)
        if received is None:
            return None
        request, descriptors = received
        begun, begins = os.pipe()
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            program = os.fork()
            if program == 0:
                for number in (told, begins):
                    os.close(number)
                control.close()
                os.read(begun, 1)  # nothing, once its parent is the one that asks
                os.close(begun)
                companion = _be_program(request, descriptors, tells)
                if companion is None:
                    return request
                control = companion  # this is the server of the program
                control.sendall(b"r")
                continue
            os.write(tells, program.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        for number in (tells, begun, begins, *descriptors):
            os.close(number)
        program = os.read(told, 4)
        os.read(told, 1)  # nothing, once it is what it is to be
        os.close(told)
        control.sendall(program)


def _receive(control: socket.socket) -> tuple[dict, list[int]] | None:
    numbers = array.array("i")
    try:
        head, ancillary, _, _ = control.recvmsg(4, socket.CMSG_SPACE(64 * numbers.itemsize), socket.MSG_WAITALL)
        for _, _, data in ancillary:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
        length = int.from_bytes(head, "big")
        message = control.recv(length, socket.MSG_WAITALL) if head else b""
    except ConnectionResetError:
        return None
    is_whole = bool(head) and len(message) == length  # else the client is gone, perhaps killed in the middle of a request
    return (json.loads(message), list(numbers)) if is_whole else None


def _be_program(request: dict, descriptors: list[int], tells: int) -> socket.socket | None:
    """Become the program that is asked for and return None, or the control socket in the server that it has.

    The pipe `tells` is closed once it looks as if it had been started.
    """
    if request["starts_session"]:
        os.setsid()
    ours = None
    if not _STARTS_NONE.search(" ".join(request["command"])):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.fork() == 0:
            ours.close()
            _point_at_nothing(1)
            for number in (tells, *descriptors):
                os.close(number)
            return theirs
        theirs.close()
    if request["dies_with_parent"]:
        _LIBC.prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    folder, *ends = descriptors
    os.fchdir(folder)
    before = _prefect_variables()
    os.environ.clear()
    os.environ.update(request["environment"])
    _set_shown(request["command"], request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in _IGNORED:
        signal.signal(kind, signal.SIG_DFL)
    for number in (folder, tells):
        os.close(number)
    kept = _take_descriptors(ends, request["numbers"], ours)
    _be_fresh(request, kept)
    _configure_prefect(before)
    return None


def _point_at_nothing(number: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, number)  # inheritable
    os.close(nothing)


def _take_descriptors(ends: list[int], numbers: list[int], control: socket.socket | None) -> socket.socket | None:
    """Give each end its number, and return the control socket, if there is one, which has another."""
    own = [] if control is None else [control.detach()]
    above = max(*numbers, *ends, *own) + 1
    own, others = ([_move_above(end, above) for end in some] for some in (own, ends))  # out of the way of the numbers
    for end, number in zip(others, numbers, strict=True):
        os.dup2(end, number, inheritable=True)
        os.close(end)
    return socket.socket(fileno=own[0]) if own else None


def _move_above(number: int, lowest: int) -> int:
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(number)
    return moved


def _be_fresh(request: dict, control: socket.socket | None) -> None:
    """Give this process what a new interpreter has for itself."""
    torch = sys.modules["torch"]
    torch.default_generator.seed()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        _have_threads(int(threads))
    sys.modules["numpy.random"].seed()
    random.seed()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    is_unbuffered = "-u" in request["command"][1:2] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, buffering=1 if os.isatty(1) or is_unbuffered else -1)  # noqa: SIM115
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)
    # The server's own may be a file, in which a stream knows its position.
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.orig_argv = request["command"]
    support = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry not in _own_path]
    given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]  # noqa: PTH100
    sys.path[:0] = given
    if control is not None:
        sys.path.insert(0, support)
        import forked_programs  # noqa: PLC0415 - of the folder of this file

        sys.path.remove(support)
        forked_programs.use(control)
    if any(Path(folder, "sitecustomize.py").exists() for folder in given):  # which the interpreter imports
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if "PRETENDED_GPUS" in os.environ and support in given:  # torch has looked for other backends when it was imported
        importlib.import_module("pretended_gpus").register()


def _have_threads(number: int) -> None:
    """Let OpenMP have as many threads as if it had read the variable: `torch.set_num_threads` would begin some at once."""
    mapped = Path("/proc/self/maps").read_text()
    for library in {line.split()[-1] for line in mapped.splitlines() if "/libgomp" in line}:
        ctypes.CDLL(library).omp_set_num_threads(number)


def _prefect_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}


def _configure_prefect(before: dict[str, str]) -> None:
    """Let Prefect read its variables again, if they are others."""
    now = _prefect_variables()
    if now != before:
        sys.modules["prefect.context"].refresh_global_settings_context()
    if any("LOGGING" in name and before.get(name) != now.get(name) for name in {*before, *now}):
        sys.modules["prefect.logging.configuration"].setup_logging(incremental=False)


_own_path = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}  # noqa: PTH100


def _set_shown(command: list[str], environment: dict[str, str]) -> bool:
    """Let /proc show this command line and environment, and return whether the kernel allows it.

    The fields of the mapping are those of `struct prctl_mm_map`; all others stay as they are (PR_SET_MM_MAP of prctl(2)).
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(words) + len(variables) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the kernel reads no other
    memory.write(words + variables)
    shown = ctypes.c_char.from_buffer(memory)
    _kept[:] = [memory, shown]
    start = ctypes.addressof(shown)
    stat = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    code, stack, data = stat[22:24], stat[24], stat[41:44]
    _LIBC.sbrk.restype = ctypes.c_void_p
    brk = _LIBC.sbrk(0)
    middle, end = start + len(words), start + len(words) + len(variables)
    mapping = struct.pack("11Q Q I I", *code, *data[:2], data[2], brk, stack, start, middle, middle, end, 0, 0, 2**32 - 1)
    size, nothing = ctypes.c_ulong(len(mapping)), ctypes.c_ulong(0)
    return _LIBC.prctl(_SET_MM, _MAP, ctypes.create_string_buffer(mapping), size, nothing) == 0


def run(kind: str, words: list[str]) -> None:
    """Run a program as the interpreter does."""
    program, *arguments = words
    if program == "uvicorn" or arguments[:2] == ["server", "start"]:  # as an embedded one, which else stands still at times
        importlib.import_module("prefect_torch.tasks.prefect_api.embedded_server.program").collect_garbage_elsewhere()
        _look_less_often()
    main_module = sys.modules["__main__"]
    for name in [name for name in vars(main_module) if name not in {"__name__", "__builtins__", "__doc__", "__loader__"}]:
        del vars(main_module)[name]
    main_module.__spec__ = None
    if kind == "-m":
        sys.argv = ["-m", *arguments]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - text
        sys.modules.pop(program, None)  # it is imported as __main__ only
        runpy._run_module_as_main(program)
        return
    if kind == "-c":
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        code = compile(program, "<string>", "exec")
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))  # noqa: PTH120 - text
        main_module.__file__ = os.path.abspath(program)  # noqa: PTH100 - text
        code = compile(Path(program).read_bytes(), program, "exec")
    exec(code, vars(main_module))


def _look_less_often() -> None:
    """Let a server look for what its services are to do once in a second, not eight times; what comes in wakes it at once.

    Also let it wait for messages to them, which it has none of, without a thread for each tenth of a second.
    """
    worker, second = sys.modules["docket"].Worker, timedelta(seconds=1)
    worker.__init__ = functools.partialmethod(worker.__init__, minimum_check_interval=second, scheduling_resolution=second)
    if importlib.util.find_spec("burner_redis") is not None:  # Prefect's older versions have none
        importlib.import_module("burner_redis.pubsub").PubSub._queue_get = _get_message


async def _get_message(self: object, timeout: float | None) -> object:
    ends_s = math.inf if timeout is None else time.monotonic() + timeout
    while self._queue.empty() and (left_s := ends_s - time.monotonic()) > 0:  # noqa: ASYNC110 - threads put into it
        await asyncio.sleep(min(left_s, 0.1))
    return None if self._queue.empty() else self._queue.get_nowait()


def be(request: dict) -> NoReturn:
    """Run the program that is asked for, and end as the interpreter does, but without taking down the modules."""
    code, is_interrupted = 0, False
    try:
        run(request["kind"], request["words"])
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if code and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
    except BaseException as exc:  # noqa: BLE001 - whatever it is
        code, is_interrupted = 1, isinstance(exc, KeyboardInterrupt)
        frames = exc.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(exc), exc.with_traceback(frames), frames)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            code = code or 120
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
