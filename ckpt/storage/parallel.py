"""Parallel I/O: a request for a small object is mostly waiting, and one for a large object does not fill the network.

Each thread works in a copy of the caller's context, which has the end of its retries and the log of its run.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 32  # requests for small objects
_LARGE_AT_ONCE = 8
_FEW = 8
_QUICK_S = 0.001  # for a few such reads, threads would cost more than they gain
_READERS = "prefect-torch-read"


def read_all(items: Iterable[T], read: Callable[[T], R]) -> list[R]:
    """Return the result of `read` for each item, in order, up to 32 at a time; the first error is raised, and ends the rest.

    A few items are read one after the other for as long as each read is quick, as from a local disk.
    """
    wanted = list(items)
    done = _read_while_quick(wanted, read) if len(wanted) <= _FEW else []
    left = wanted[len(done) :]
    return done + (_read_in_threads(left, read) if len(left) > 1 else [read(item) for item in left])


def _read_while_quick(wanted: Sequence[T], read: Callable[[T], R]) -> list[R]:
    """Return the results of the first items, up to one that took long; of all items in a thread of another such call."""
    is_thread, done = threading.current_thread().name.startswith(_READERS), list[R]()
    for item in wanted:
        began_s = time.monotonic()
        done.append(read(item))
        if time.monotonic() - began_s > _QUICK_S and not is_thread:
            break
    return done


def _read_in_threads(wanted: Sequence[T], read: Callable[[T], R]) -> list[R]:
    num_threads = min(AT_ONCE, len(wanted))
    failed = threading.Event()
    contexts = [copy_context() for _ in range(num_threads)]

    def read_share(first: int) -> list[R]:
        done: list[R] = []
        try:
            for item in wanted[first::num_threads]:
                if failed.is_set():
                    break
                done.append(read(item))
        except BaseException:
            failed.set()  # each of the other reads might be retried for minutes as well
            raise
        return done

    with ThreadPoolExecutor(num_threads, _READERS) as pool:
        try:
            shares = list(pool.map(lambda first: contexts[first].run(read_share, first), range(num_threads)))
        except BaseException:
            failed.set()  # an interrupted caller does not wait for the rest
            raise
    return [shares[place % num_threads][place // num_threads] for place in range(len(wanted))]


def for_each(items: Iterable[T], work: Callable[[T], R], at_once: int = _LARGE_AT_ONCE) -> list[R]:
    """Call `work` for each of `items`, such as files or parts of a listing, and return its results, in order.

    Up to `at_once` calls run concurrently; the first error is raised, and cancels the rest.
    """
    wanted = list(items)
    if len(wanted) == 1:
        return [work(wanted[0])]
    with ThreadPoolExecutor(at_once, "prefect-torch-files") as pool:
        futures = [pool.submit(copy_context().run, work, item) for item in wanted]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def lower_thread_priority(nicer: int) -> None:
    """Give the training priority over this thread, and the threads that it starts, on a core that both want.

    Args:
        nicer: The difference in niceness. Without permission, and outside of Linux, they share the core evenly.

    """
    if sys.platform == "linux":  # the system on which a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nicer)
