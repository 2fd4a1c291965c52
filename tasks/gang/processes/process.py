"""The process of one rank: its output, its exit status, and a guard that keeps it from outliving its supervisor."""

import contextlib
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks
from prefect_torch.tasks.rank.starting.fork_server import Descriptors, environment_header

from .fork_servers import ForkServer, fill_closed_streams
from .output import OutputLines

_GUARD = Path(__file__).parents[2] / "rank/starting/guard.py"
_LEFT_S = 1.0  # to read the rest of the output


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process exited.

    Attributes:
        returncode: Its exit code; negative for the signal that killed it; None when even its guard was killed.
        message: The bytes that it wrote into its result pipe.

    """

    returncode: int | None
    message: bytes


@dataclass(frozen=True, slots=True)
class _Program:
    """A command, its environment, its input, and the descriptors that its guard holds."""

    command: Sequence[str]
    environment: dict[str, str]
    stdin: bytes
    held: Sequence[int]

    def spawn(self, ends: Descriptors) -> "subprocess.Popen[bytes]":
        """Start the command under a guard."""
        inherited = [ends.lifeline, ends.status, ends.result]  # the guard passes only the last of the three on
        guard = [sys.executable, "-S", "-E", str(_GUARD), *map(str, inherited)]
        return subprocess.Popen(
            [*guard, *self.command, str(ends.result)],
            env=self.environment,
            stdin=ends.stdin,
            stdout=ends.output,
            stderr=subprocess.STDOUT,
            pass_fds=[*inherited, *self.held],
            start_new_session=True,  # the supervisor passes on Ctrl-C at a terminal
        )


class RankProcess:
    """A command under a guard that kills it, with all its descendants, when this object or this process is gone.

    Args:
        command: The program and its arguments; the number of its result pipe is appended as the last one.
        environment: Its whole environment.
        stdin: The bytes that it reads before the end of file.
        held: Descriptors that the guard keeps open until the process and its descendants are gone, such as those of locks.
        server: Forks the program of a rank, if it can, instead of running the command; None to run the command.

    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        stdin: bytes,
        held: Sequence[int] = (),
        server: ForkServer | None = None,
    ) -> None:
        self._lifeline_lock = threading.Lock()
        self._returncode: bytes = b""
        self._message: list[bytes] = []
        self._failure: bytes = b""
        self._guard: subprocess.Popen[bytes] | None = None
        program = _Program(command, environment, stdin, held)
        fill_closed_streams()
        with contextlib.ExitStack() as own, contextlib.ExitStack() as theirs:  # closed if anything fails
            read, self._stdin = _open_pipe(theirs, own)
            self._output, output = _open_pipe(own, theirs)
            lifeline, self._lifeline = _open_pipe(theirs, own)
            self._status, status = _open_pipe(own, theirs)
            self._result, result = _open_pipe(own, theirs)
            ends = Descriptors(read, output, lifeline, status, result)
            if server is None:
                self._guard = program.spawn(ends)
                feed = partial(self._feed, stdin)
            else:
                folder = os.open(".", os.O_PATH)
                theirs.callback(os.close, folder)
                feed = partial(self._fork, server, program, ends, folder)
            # In a thread, so that the supervisor is blocked neither by the full pipe of a rank that dies before it reads, nor
            # by a server that is still busy with its imports.
            self._feeder = threading.Thread(target=feed, daemon=True)
            self._feeder.start()
            own.pop_all()
            if server is not None:
                theirs.pop_all()  # the thread closes them

    def lines(self, poll_s: float) -> Iterator[list[str]]:
        """Yield the lines (OutputLines) written since the last yield, at least every `poll_s`, until the process exits.

        Output of descendants that could not be ended with the process is read for a second at most.
        """
        output = OutputLines()
        warning: list[str] = []
        ends_s = math.inf
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._output, self._status, self._result):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                written, ready = b"", selector.select(min(poll_s, max(0.0, ends_s - time.monotonic())))
                for key, _ in ready:
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == self._status:
                        self._returncode += data
                    elif key.fd == self._result:
                        self._message.append(data)
                    else:
                        written = data
                yield output.feed(written, time.monotonic())
                if set(selector.get_map()) == {self._output}:  # a guard closes its own end of it first
                    ends_s = min(ends_s, time.monotonic() + _LEFT_S)
                    if time.monotonic() >= ends_s:
                        warning = [f"WARNING: the rank has ended, and {_holders(self._output)} that it started has not"]
                        break
        yield [*output.feed(self._failure, time.monotonic(), final=True), *warning]

    def reap(self) -> ProcessExit:
        """Kill what is left of the process and return how it exited; call it after `lines` is exhausted."""
        self.kill()
        self._feeder.join()
        if self._guard is not None:
            self._guard.wait()
        _close((self._output, self._status, self._result))
        return ProcessExit(int(self._returncode) if self._returncode else None, b"".join(self._message))

    def terminate(self) -> None:
        """Send SIGTERM to the process; no effect once it has exited."""
        self._send(b"t")

    def write_stack_traces(self) -> None:
        """Have the process print the stack traces of all its threads; no effect once it has exited."""
        self._send(b"s")

    def kill(self) -> None:
        """Kill the process and all its descendants (SIGKILL); no effect once they have exited."""
        with self._lifeline_lock:
            if self._lifeline >= 0:
                close_here(self._lifeline)
                self._lifeline = -1

    def _send(self, order: bytes) -> None:
        with self._lifeline_lock:
            if self._lifeline >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._lifeline, order)

    def _fork(self, server: ForkServer, program: _Program, ends: Descriptors, folder: int) -> None:
        """Fork the rank by the server, or start its command if that fails, and write its input."""
        try:
            is_forked = server.fork(ends, folder, program.held)
        finally:
            os.close(folder)
        if is_forked:
            _close(ends)
            self._feed(environment_header(program.environment) + program.stdin)
            return
        try:
            self._guard = program.spawn(ends)
        except OSError as exc:  # `lines` reports it to the supervisor
            self._failure = f"its process cannot be started: {exc}".encode()
        finally:
            _close(ends)
        self._feed(program.stdin)

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            with contextlib.suppress(BrokenPipeError):  # the exit status shows if a rank died before it read
                while view:
                    view = view[os.write(self._stdin, view) :]
        finally:
            close_here(self._stdin)


def _open_pipe(read: contextlib.ExitStack, write: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a new pipe, each of which is closed with one of the stacks."""
    ends = os.pipe()
    close_in_forks(*ends)
    for end, stack in zip(ends, (read, write), strict=True):
        stack.callback(close_here, end)
    return ends


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        close_here(descriptor)


def _holders(pipe: int) -> str:
    """Return which other processes have the pipe open, as far as this user may see that."""
    found = []
    with contextlib.suppress(OSError):
        inode = Path("/proc/self/fd", str(pipe)).readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != os.getpid() and any(it.readlink() == inode for it in (folder / "fd").iterdir()):
                    found.append(f"{(folder / 'comm').read_text('utf-8', 'replace').strip()} ({folder.name})")
    return ", ".join(found) or "a process"
