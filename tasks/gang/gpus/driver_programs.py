"""Programs that ask the driver of GPUs, which may hang: not even SIGKILL ends a process that waits in the kernel for it."""

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

_POLL_S = 1.0
_LONGEST_END_S = 1.0  # of a killed process that the kernel can end


class DriverHangsError(subprocess.TimeoutExpired):
    """A program that asked a driver did not end in time, nor by being killed."""


def ask_driver(
    command: list[str], longest_s: float, wait: Callable[[float], None] = lambda _: None
) -> "subprocess.CompletedProcess[str]":
    """Run a program and return what it has printed.

    Args:
        command: The program and its arguments.
        longest_s: How long it may run.
        wait: Called about once a second while it runs, with the seconds so far; what it raises ends the program.

    Raises:
        subprocess.TimeoutExpired: If it runs for longer, so that it is killed.
        DriverHangsError: If it does not end by that; it is left to the kernel.

    """
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            waited_s = time.monotonic() - began_s
            try:
                out, err = process.communicate(timeout=max(0.0, min(_POLL_S, longest_s - waited_s)))
            except subprocess.TimeoutExpired:
                if waited_s >= longest_s:
                    raise
                wait(waited_s)
            else:
                return subprocess.CompletedProcess(command, process.returncode, out, err)
    except BaseException as exc:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LONGEST_END_S)
        if process.returncode is None and isinstance(exc, subprocess.TimeoutExpired):
            raise DriverHangsError(command, longest_s) from exc
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
