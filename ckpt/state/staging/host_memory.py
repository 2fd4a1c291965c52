"""Memory of the host for copies from and to an accelerator, page-locked where its driver has `cudart`."""

import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from prefect_torch.ckpt.storage.machine.anonymous_memory import anonymous_memory

REGISTRATION_BYTES = 2**30  # of one call to the driver, which blocks the training's kernel launches meanwhile
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs of this process
_logger = logging.getLogger(__name__)


class HostMemory:
    """Anonymous pages of exactly `size` bytes, which `register` page-locks.

    torch's pinned allocator is no alternative: it rounds up to a power of two and gives nothing back.

    Args:
        size: The size in bytes; no page is touched before it is used.

    """

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # "cpu", whatever torch's default device is
        self._pages: mmap.mmap | None = None
        self._registered: list[int] = []
        self._registration: weakref.finalize[..., HostMemory] | None = None
        if size == 0:
            return
        self._pages = anonymous_memory(size)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def register(self, device: torch.device) -> None:
        """Page-lock the memory for copies from and to devices of `device`'s type, unless an earlier call has tried to.

        Takes longest where pages are still untouched. Where the driver refuses, or page-locks only memory of its own, the
        memory stays pageable; a refusal is logged once in a process.

        Only copies from and to page-locked memory run at full speed and asynchronously. A single copy must not cross a multiple
        of `REGISTRATION_BYTES` from the beginning: the driver would treat its memory as registered only in part.
        """
        is_possible = hasattr(getattr(torch, device.type, None), "cudart")
        if self._registration is not None or not is_possible or self._pages is None:
            return
        # A thread of its own: after a refusal, the next kernel launch of the same thread would raise the driver's error.
        with ThreadPoolExecutor(1, "prefect-torch-page-lock") as pool:
            pool.submit(self._register, self._pages, device).result()

    def trim(self, size: int) -> None:
        """Give back the pages after the first `size` bytes; call this before `register`."""
        keep = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._pages is None or keep >= len(self.tensor):
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED, keep, len(self.tensor) - keep)
        self.tensor = self.tensor[:keep]

    @property
    def is_page_locked(self) -> bool:
        """Whether the driver has page-locked it."""
        return bool(self._registered)

    def release(self) -> None:
        """Unlock the memory, and give it back as soon as no other tensor shares it."""
        if self._registration is not None:
            self._registration()
        self.tensor = self.tensor[:0].clone()
        self._pages = None

    def _register(self, pages: mmap.mmap, device: torch.device) -> None:
        registered = self._registered
        # Runs when this object dies, before `tensor` and its pages: memory must not be unmapped while it is registered.
        self._registration = weakref.finalize(self, _unregister, device, registered, os.getpid())
        if hasattr(mmap, "MADV_DONTFORK"):  # else the first write after a fork would move pages away from under the driver
            pages.madvise(mmap.MADV_DONTFORK)
        with _driver(device) as cudart:
            for start, size in _parts(self.tensor):
                error = int(cudart.cudaHostRegister(start, size, _PORTABLE))
                if error:
                    _warn_of_refusal(error)
                    break
                registered.append(start)
            else:
                return
        _unregister(device, registered, os.getpid())  # all or nothing: a copy must not lie in both kinds of memory


@contextmanager
def _driver(device: torch.device) -> Iterator[Any]:
    """Yield the driver, with `device` as the current one: in a new thread that is GPU 0, where a call creates a context."""
    module = torch.get_device_module(device)
    with module.device(device):
        yield module.cudart()


def _parts(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    for start in range(0, len(tensor), REGISTRATION_BYTES):
        yield tensor.data_ptr() + start, min(REGISTRATION_BYTES, len(tensor) - start)


def _unregister(device: torch.device, registered: list[int], process_id: int) -> None:
    if not registered or os.getpid() != process_id:  # a forked process must not call the driver
        return
    with _driver(device) as cudart:
        while registered:
            cudart.cudaHostUnregister(registered.pop())


@cache
def _warn_of_refusal(error: int) -> None:
    _logger.warning(
        "the driver does not page-lock memory of the host (CUDA error %d), so that copies from and to GPUs are slower: allow "
        "more locked memory (ulimit -l), or leave more memory free",
        error,
    )
