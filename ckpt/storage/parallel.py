"""Many reads at once: what an object store takes for a small one is mostly waiting, and one large one fills no network."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 32
_LARGE_AT_ONCE = 8
_FEW = 8  # threads would cost more than they gain


def read_all(items: Iterable[T], read: Callable[[T], R]) -> list[R]:
    """Return what `read` returns for each item, in order, with up to 32 under way; the first error ends it and is raised."""
    wanted = list(items)
    if len(wanted) <= _FEW:
        return [read(item) for item in wanted]
    num_threads = min(_AT_ONCE, len(wanted))
    failed = threading.Event()

    def read_share(first: int) -> list[R]:
        done: list[R] = []
        try:
            for item in wanted[first::num_threads]:
                if failed.is_set():
                    break
                done.append(read(item))
        except BaseException:
            failed.set()  # each of the others might be tried for minutes as well
            raise
        return done

    with ThreadPoolExecutor(num_threads, "prefect-torch-read") as pool:
        try:
            shares = list(pool.map(read_share, range(num_threads)))
        except BaseException:
            failed.set()  # whoever is told to end does not wait for the rest
            raise
    return [shares[place % num_threads][place // num_threads] for place in range(len(wanted))]


def for_each(items: Iterable[T], work: Callable[[T], None]) -> None:
    """Do `work` for each of `items`, files or parts of them, eight at a time; the first error is raised, and ends the rest."""
    with ThreadPoolExecutor(_LARGE_AT_ONCE, "prefect-torch-files") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
