"""Moving batches to the device of a rank; with a GPU, each is copied during the computation on the one before it."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def on_device(batches: Iterator[Any], device: torch.device | None, *, may_look_ahead: bool) -> Iterator[Any]:
    """Return `batches` with their tensors on `device`, nested in lists, tuples and dicts too; None leaves them as they are.

    Args:
        batches: The batches of a loader.
        device: With a GPU, batches are copied on a separate stream, concurrently with the computation if the loader has
            `pin_memory=True`.
        may_look_ahead: Whether the next batch may be taken from `batches` before the current one is yielded.

    """
    if device is None or device.type == "cpu":
        return batches
    if device.type != "cuda" or not may_look_ahead:
        return (moved(batch, device) for batch in batches)
    copies = _SideStream(device)
    return one_ahead(batches, copies.begin, copies.hand_over)


def one_ahead(
    batches: Iterable[Any], begin: Callable[[Any], Any], hand_over: Callable[[Any], None] = lambda _: None
) -> Iterator[Any]:
    """Yield `begin(batch)` of each batch, the next one begun before the current one is yielded.

    Args:
        batches: The batches; at most one is taken in advance.
        begin: Starts the work on a batch and returns the result.
        hand_over: Called with that result before it is yielded and before the next batch is begun.

    """
    missing = object()
    source = iter(batches)
    batch = next(source, missing)
    ahead = missing if batch is missing else begin(batch)
    while ahead is not missing:
        current = ahead
        hand_over(current)
        batch = next(source, missing)
        ahead = missing if batch is missing else begin(batch)
        yield current


class _SideStream:
    """Copies batches to a GPU on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types its constructor in part

    def begin(self, batch: Any) -> Any:
        # The copy may get the memory of an earlier batch that is freed but still in use, so it waits for all kernels that were
        # launched before. record_stream alone is not enough: it reaches only the tensors that `_record` finds.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return moved(batch, self._device)

    def hand_over(self, batch: Any) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        _record(batch, current)


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; values that are no tensor or container and have no `to` are kept."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)  # in the background where the loader pins memory
    to: Callable[..., Any] | None = getattr(batch, "to", None)  # a packed sequence, a tokenizer's batch
    if callable(to):
        return to(device)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update({key: moved(value, device) for key, value in batch.items()})
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def _record(batch: Any, stream: "torch.cuda.Stream") -> None:
    """Prevent the memory of `batch` from being allocated again before `stream` is done with it."""
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _record(value, stream)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            _record(value, stream)
