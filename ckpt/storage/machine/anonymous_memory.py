"""Memory of this process alone, outside of Python's own, in huge pages where the kernel has them."""

import mmap
from contextlib import suppress


def anonymous_memory(size: int) -> mmap.mmap:
    """Return new memory of exactly `size` bytes, none of whose pages is touched.

    The first copy into huge pages is up to six times faster than into small ones.

    Raises:
        OSError: If the system has too little memory.

    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages, such as a real-time one, refuses the advice
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
