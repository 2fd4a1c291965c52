"""A progress bar on stderr, on a terminal only."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal, TypeVar

from prefect_torch.deployments.command_line.terminal import console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_LOOK_EVERY_S = 0.1
T = TypeVar("T")


def in_thread(work: Callable[[], T], look: Callable[[], object] = lambda: None) -> T:
    """Return the result of `work`; its transfers cannot be stopped, so a thread does it, and Ctrl-C does not wait for that.

    Meanwhile `look` is called, ten times a second.
    """
    pool = ThreadPoolExecutor(1, "prefect-torch-work")  # not as a context manager, which would wait
    done = pool.submit(work)
    while not wait([done], _LOOK_EVERY_S).done:  # a signal that comes just before a wait does not end it
        look()
    pool.shutdown()
    return done.result()


@contextmanager
def progress_bar(description: str, total: int, *, unit: Literal["bytes", "checkpoints"]) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the bar."""
    to = console(stderr=True)
    if not to.is_terminal:
        yield lambda _: None
        return
    count: ProgressColumn = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    with Progress(TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn(), console=to) as progress:
        bar = progress.add_task(description, total=total)
        yield lambda more: progress.advance(bar, more)
