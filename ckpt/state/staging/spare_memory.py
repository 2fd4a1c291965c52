"""Memory for the first report of a state, whose pages are touched in the background of the training before that report.

The first copy into untouched pages takes ten times as long as a later one.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prefect_torch.ckpt.storage.parallel import lower_thread_priority

if TYPE_CHECKING:
    from .host_memory import HostMemory

LEAST_BYTES = 4 * 2**20  # below, a first copy takes a millisecond
_PART_BYTES = 2 * 2**20  # touched between two checks of whether the memory is wanted: half a millisecond
_PAGE_BYTES = 4096  # the smallest of any machine
_NICER = 10


class SpareMemory:
    """Memory whose pages a thread of low priority touches.

    Args:
        size: The size in bytes.

    """

    def __init__(self, size: int) -> None:
        from .host_memory import HostMemory  # noqa: PLC0415 - torch, which only a training with a state needs

        self.size = size
        self.touched_bytes = 0
        self._memory: HostMemory | None = HostMemory(size)
        self._is_wanted = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="prefect-torch-spare-memory", daemon=True)
        self._thread.start()

    def take(self) -> "HostMemory":
        """Return the memory, touched as far as the thread came; the thread no longer writes to it."""
        self.stop()
        memory, self._memory = self._memory, None
        assert memory is not None
        return memory

    def stop(self) -> None:
        """End the thread: a zero that it wrote over a staged value would be stored, and a process must not end under it."""
        self._is_wanted.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until every page is touched."""
        self._thread.join()

    def _touch(self) -> None:
        lower_thread_priority(_NICER)
        assert self._memory is not None
        pages = self._memory.tensor
        while self.touched_bytes < self.size and not self._is_wanted.is_set():
            stop = min(self.touched_bytes + _PART_BYTES, self.size)
            pages[self.touched_bytes : stop : _PAGE_BYTES].zero_()  # torch lets other threads run meanwhile
            self.touched_bytes = stop


_lock = threading.Lock()
_is_expected = False
kept: SpareMemory | None = None  # until the first report
available_bytes: Callable[[], int] | None = None  # how much this rank can take; None where it is unknown


def expect_reports(*, expected: bool) -> None:
    """Set whether this process may report states: if not, no memory is kept for them."""
    global _is_expected, available_bytes
    with _lock:
        _is_expected, available_bytes = expected, None
    if not expected:
        release()


def prepare(size: int) -> SpareMemory | None:
    """Begin to touch `size` bytes for the first report of a state, unless this process has already begun, or reports none.

    Args:
        size: An estimate: memory that is larger is trimmed, one that is too small is given back.

    """
    global kept  # noqa: PLW0603 - a rank is a process
    with _lock:
        if _is_expected and kept is None and size >= LEAST_BYTES:
            with suppress(OSError, RuntimeError):  # no memory, or no thread: the first report says so, if it has none either
                kept = SpareMemory(size)
                return kept
    return None


def take(size: int) -> "HostMemory | None":
    """Return the prepared memory, cut to `size` bytes; None if there is none, or it is too small.

    No more is prepared afterwards, since memory that is taken is kept for all reports.
    """
    global _is_expected  # noqa: PLW0603 - a rank is a process
    with _lock:
        _is_expected = False
    spare = release()
    if spare is None or spare.size < size:
        return None
    memory = spare.take()
    memory.trim(size)
    return memory


def release() -> SpareMemory | None:
    """Forget the prepared memory, which is given back unless the caller keeps what this returns."""
    global kept
    with _lock:
        spare, kept = kept, None
    if spare is not None:
        spare.stop()
    return spare
