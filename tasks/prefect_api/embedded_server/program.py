"""Runs a module in the server's process, as `python -m` does, and ends it with the process that started it, however that dies.

    python program.py LIFELINE MODULE [ARGUMENT ...]

LIFELINE is a descriptor: the read end of a pipe whose other end only that process has. The kernel closes it; end-of-file means
that no process is left to stop the server. This file imports the standard library only, and is started by its path: `python -m`
would search the working directory first, where a queue.py would end the server.
"""

import gc
import logging
import os
import runpy
import signal
import sys
import threading
import time

_SERVICES = ("docket.dependencies", "docket.worker")  # the loggers that tell of a service's failure
_END_S = 10.0
_POLL_S, _WHOLE_S, _MANY = 0.1, 60.0, 10_000


def main() -> None:
    """Run the server."""
    lifeline, module, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(int(lifeline),), daemon=True).start()
    sys.argv[1:] = arguments
    _search_working_directory_last()
    collect_garbage_elsewhere()
    for name in _SERVICES:
        logging.getLogger(name).addFilter(_in_one_line)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def collect_garbage_elsewhere() -> None:
    """Let this process's garbage be collected in a thread of its own.

    A cursor that is collected waits for its connection's thread, which may wait for the lock of the main thread's transaction:
    if the main thread collects, all stands still for SQLite's timeout, 60 s.
    """
    gc.disable()
    threading.Thread(target=_collect_garbage, daemon=True).start()


def _collect_garbage() -> None:
    whole_s = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        if gc.get_count()[0] > _MANY:
            is_whole = time.monotonic() - whole_s > _WHOLE_S
            gc.collect(2 if is_whole else 1)
            whole_s = time.monotonic() if is_whole else whole_s


def _search_working_directory_last() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's directory
    sys.path[:] = [*filter(None, sys.path), os.getcwd()]  # noqa: PTH109 - text


def _in_one_line(record: logging.LogRecord) -> bool:
    """Shorten a failure of the server's services, which they retry, to one line at a training's terminal.

    Else the first start shows a traceback of 90 lines when SQLite refuses the record of its telemetry.
    """
    kind, error, _ = record.exc_info or (None, None, None)
    if kind is not None:
        record.msg, record.args = f"{record.getMessage()}: {kind.__name__}: {error}".partition("\n")[0], ()
        record.exc_info = record.exc_text = None
    return True


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    os._exit(1)


if __name__ == "__main__":
    main()
