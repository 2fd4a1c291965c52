"""The process of one rank: its output, its exit status, and a guard because of which it cannot outlive its supervisor."""

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .output import OutputLines

_GUARD = Path(__file__).parents[1] / "rank/guard.py"


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process exited.

    Attributes:
        returncode: Its exit code; negative for the signal that killed it; None when even its guard was killed.
        message: The bytes that it wrote into its result pipe.

    """

    returncode: int | None
    message: bytes


class RankProcess:
    """A command under a guard that kills it, with all its descendants, when this object or this process is gone.

    Args:
        command: The program and its arguments; the number of its result pipe is appended as the last one.
        environment: Its whole environment.
        stdin: The bytes that it reads before the end of file.
        held: Descriptors that the guard keeps open until the process and its descendants are gone, such as those of locks.

    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], stdin: bytes, held: Sequence[int] = ()) -> None:
        lifeline, self._lifeline = os.pipe()
        self._status, status = os.pipe()
        self._result, result = os.pipe()
        guard = [sys.executable, "-S", "-E", str(_GUARD), str(lifeline), str(status), str(result)]
        try:
            self._guard = subprocess.Popen(
                [*guard, *command, str(result)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline, status, result, *held],  # the guard passes only the last of the three on
                start_new_session=True,  # the supervisor passes on Ctrl-C at a terminal
            )
        finally:
            for descriptor in (lifeline, status, result):
                os.close(descriptor)
        # A thread, since a rank that dies before it reads must not block its supervisor on a full pipe.
        threading.Thread(target=self._feed, args=(stdin,), daemon=True).start()
        self._lifeline_lock = threading.Lock()
        self._returncode: bytes = b""
        self._message: list[bytes] = []

    def lines(self, poll_s: float) -> Iterator[list[str]]:
        """Yield the lines (OutputLines) written since the last yield, at least every `poll_s`, until the process exits."""
        assert self._guard.stdout is not None
        output = OutputLines()
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._guard.stdout.fileno(), self._status, self._result):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                written = b""
                for ready, _ in selector.select(poll_s):
                    data = os.read(ready.fd, 65536)
                    if not data:
                        selector.unregister(ready.fd)
                    elif ready.fd == self._status:
                        self._returncode += data
                    elif ready.fd == self._result:
                        self._message.append(data)
                    else:
                        written = data
                yield output.feed(written, time.monotonic())
        yield output.feed(b"", time.monotonic(), final=True)

    def reap(self) -> ProcessExit:
        """Kill what is left of the process and return how it exited; call it after `lines` is exhausted."""
        self.kill()
        self._guard.wait()
        os.close(self._status)
        os.close(self._result)
        assert self._guard.stdout is not None
        self._guard.stdout.close()
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
                os.close(self._lifeline)
                self._lifeline = -1

    def _send(self, order: bytes) -> None:
        with self._lifeline_lock:
            if self._lifeline >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._lifeline, order)

    def _feed(self, data: bytes) -> None:
        assert self._guard.stdin is not None
        # Unbuffered, so that closing has nothing left to write; the exit status tells of a rank that died before it read.
        with contextlib.suppress(BrokenPipeError), self._guard.stdin.detach() as pipe:  # type: ignore[attr-defined]  # a BufferedWriter
            view = memoryview(data)
            while view:
                view = view[pipe.write(view) :]
