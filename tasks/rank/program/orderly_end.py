"""Python's own steps at the end of a program, within a time limit; the supervisor has the rank's result by then."""

import atexit
import faulthandler
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

LONGEST_S = 10.0
_OF_NATIVE_CODE_S = 2.0  # longer, for code that never lets another thread run
_OF_ATEXIT = "what it has registered with atexit"
_OF_GROUP = "its process group (a CUDA graph that holds collectives keeps it)"


def end_in_order(leave_group: Callable[[], None], clean_up: Callable[[], None]) -> None:
    """Join threads, run the callbacks of `atexit`, with which loggers send their last records, and leave the process group.

    The process is ended if that hangs. Costs a new thread, and the time of the threads and callbacks.

    Args:
        leave_group: Called last: it may hang, as NCCL does while a CUDA graph holds collectives.
        clean_up: Called before the process is ended after ten seconds.

    """
    awaited = [_OF_ATEXIT]
    limit = threading.Timer(LONGEST_S, _end_at_once, [awaited, clean_up])
    limit.daemon = True
    try:
        limit.start()
        faulthandler.dump_traceback_later(LONGEST_S + _OF_NATIVE_CODE_S, exit=True, file=2)
    except RuntimeError:  # no thread is left, and nothing may hang without the limits
        return

    def leave() -> None:
        awaited[0] = _OF_GROUP
        leave_group()

    for end in (_leave_out_what_is_torchs, threading._shutdown, atexit._run_exitfuncs, leave):  # type: ignore[attr-defined]  # noqa: SLF001 - what Py_Finalize calls
        with suppress(BaseException):
            end()
    limit.cancel()
    faulthandler.dump_traceback_later(LONGEST_S + _OF_NATIVE_CODE_S, exit=True, file=2)  # for the rest of the exit


def _end_at_once(awaited: list[str], clean_up: Callable[[], None]) -> None:
    threads = [it.name for it in threading.enumerate() if not it.daemon and it is not threading.main_thread()]
    what = f"its thread {', '.join(threads)}" if threads else awaited[0]
    text = f"WARNING: the function has returned {LONGEST_S:g} s ago, and {what} has not ended: the rank is ended now; let the "
    with suppress(OSError):  # not by `sys.stderr`, which may be anything by now
        os.write(2, f"{text}function itself wait for what has to be done\n".encode())
    with suppress(BaseException):
        clean_up()
    os._exit(0)


def _leave_out_what_is_torchs() -> None:
    """Cancel torch's own steps, which only cost time in a process that ends: 30 ms of a core to unregister all operators.

    Older versions also wait five seconds for each running worker of a data loader, which the guard ends.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - there is no other list
        if (found := finalizer.peek()) is not None and getattr(found[1], "__module__", None) == "torch.library":
            finalizer.atexit = False
    loader = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    if (wait := getattr(loader, "_clean_up_worker", None)) is not None:
        atexit.unregister(wait)
