"""What a test leaves behind in its process, told from what the threads of other tests do there meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def begun_threads() -> Iterator[list[threading.Thread]]:
    """List the threads that this one begins meanwhile, those that they begin, and so on."""
    begun: list[threading.Thread] = []
    own, start = threading.current_thread(), threading.Thread.start

    def start_listed(thread: threading.Thread) -> None:
        if threading.current_thread() in (own, *begun):
            begun.append(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_listed)
        yield begun


def open_files() -> set[Path]:
    """Return what the descriptors of this process are open on; a pipe has the name "pipe:[<number>]"."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(descriptor.readlink())
    return found
