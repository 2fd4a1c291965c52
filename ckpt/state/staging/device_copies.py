"""Copies from devices to the host: queued on each device's current stream, and awaited together.

The current stream is that of the thread that reports or loads. It must already wait for the work of other streams on the same
tensors, as for any other use of them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch

from .host_memory import REGISTRATION_BYTES

Cut: TypeAlias = tuple[int | slice, ...]
_STRIDED_BYTES = 64 * 2**20  # of a device's memory that a report may take for the parts of strided tensors
_DIGEST_BYTES = 4 * 2**20  # of one sum: the sums' temporaries take some 64 MiB of a device's memory
_FOREACH_COPY = vars(torch)["_foreach_copy_"]  # torch's optimizers use it, its stubs hide it


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy each of `sources` into the target with the same index, with one call instead of one per tensor."""
    if targets:
        _FOREACH_COPY(list(targets), list(sources), non_blocking=non_blocking)


@contextmanager
def queued_copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Iterator[None]:
    """Copy `sources`, tensors of any devices, into `targets`, contiguous ones of the host; all have arrived after the body.

    The copies of each device begin before the body, which can do other work meanwhile. They take at most 64 MiB of a device's
    memory.
    """
    of_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        of_device.setdefault(source.device, []).extend(_in_parts(target, source))
    with ExitStack() as arrivals:
        for device, pairs in of_device.items():
            streams = stream_module(device.type)
            if streams is None:
                _copy(pairs, non_blocking=False)
                continue
            # The current stream, not one of our own: that would gather strided tensors in memory that the training cannot use.
            copied = streams.Event()
            arrivals.callback(copied.synchronize)
            try:
                _copy(pairs, non_blocking=True)
            finally:  # also when a copy could not be queued: those before it still write to the host's memory
                copied.record(streams.current_stream(device))
        yield


def wait_for_current_streams(devices: Iterable[torch.device]) -> None:
    """Wait for the work that this thread has queued on `devices`, so that other threads may write to their tensors."""
    for device in devices:
        streams = stream_module(device.type)
        if streams is not None:
            streams.current_stream(device).synchronize()


def copied_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of `tensors`, small ones, in memory of the host: with one copy for all tensors of a device."""
    of_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        of_device.setdefault(tensor.device, []).append(place)
    found: dict[int, torch.Tensor] = {}
    for places in of_device.values():
        raw, start = torch.cat([bytes_of(tensors[place]) for place in places]).to("cpu"), 0
        for place in places:
            part = raw[start : start + tensors[place].nbytes]
            found[place] = part.clone().view(tensors[place].dtype).view(tensors[place].shape)
            start += tensors[place].nbytes
    return [found[place] for place in range(len(tensors))]


def sums_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor's 32-bit words on its device, equal if the bytes of two tensors of one shape and dtype are.

    For each part of 4 MiB there are two sums modulo 2^64, of the words times fixed random weights (the multilinear family of
    Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Integers are summed exactly in any order. Words of 64
    bits with odd weights would not do: two flipped signs cancel each other.
    """
    cuts = [*cut_at_multiples(tensor.shape, tensor.element_size(), _DIGEST_BYTES)]
    sums = torch.empty((len(cuts), 2), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    for place, cut in enumerate(cuts):
        words = _words(tensor[cut])
        torch.sum(weights[:, : len(words)] * words, dim=1, out=sums[place])
    return sums


def cut_at_multiples(shape: Sequence[int], item_bytes: int, step: int, start: int = 0) -> Iterator[Cut]:
    """Yield indices of the parts of a tensor that cross no multiple of `step`; in a contiguous tensor, each part is contiguous.

    Args:
        shape: The tensor's shape.
        item_bytes: The size of an element.
        step: The number of bytes, a multiple of `item_bytes`.
        start: The offset at which a contiguous tensor begins, a multiple of `item_bytes`.

    """
    total = math.prod(shape) * item_bytes
    if _is_within(start, total, step):
        yield ()
        return
    row_bytes, first = total // shape[0], 0
    while first < shape[0]:
        at = start + first * row_bytes
        rows = min((step - at % step) // row_bytes, shape[0] - first)
        if rows:
            yield (slice(first, first + rows),)
        else:
            yield from ((first, *cut) for cut in cut_at_multiples(shape[1:], item_bytes, step, at))
        first += max(rows, 1)


@cache
def stream_module(device_type: str) -> Any:
    """Return torch's module of a device type that has streams; None for another type, whose copies are synchronous."""
    if device_type in ("cpu", "meta") or not hasattr(torch, device_type):
        return None
    module = torch.get_device_module(device_type)
    return module if hasattr(module, "current_stream") and hasattr(module, "Event") else None


def _in_parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    item_bytes = target.element_size()
    start = int(target.storage_offset()) * item_bytes
    is_plain = source.is_contiguous() and not _is_lazy(source)
    step = REGISTRATION_BYTES if is_plain else _STRIDED_BYTES
    if _is_within(start, target.nbytes, step):
        yield target, source
        return
    for cut in cut_at_multiples(target.shape, item_bytes, step, start):
        yield target[cut], source[cut]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool) -> None:
    plain = [pair for pair in pairs if not _is_lazy(pair[1])]
    copy_each([target for target, _ in plain], [source for _, source in plain], non_blocking=non_blocking)
    for target, source in pairs:
        if _is_lazy(source):  # torch would conjugate the target immediately, before the bytes arrive
            target.copy_(source.resolve_conj().resolve_neg(), non_blocking=non_blocking)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_within(start: int, size: int, step: int) -> bool:
    return size == 0 or start // step == (start + size - 1) // step


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, in its own memory where that is contiguous."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def _words(tensor: torch.Tensor) -> torch.Tensor:
    raw = bytes_of(tensor)
    if len(raw) % 4 or raw.storage_offset() % 4:
        aligned = raw.new_zeros(-(-len(raw) // 4) * 4)
        aligned[: len(raw)] = raw
        raw = aligned
    return raw.view(torch.int32)


def _weights(device: torch.device) -> torch.Tensor:
    """Return splitmix64's first numbers, which are the same on every device (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = torch.arange(1, _DIGEST_BYTES // 2 + 1, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))).view(2, -1)
