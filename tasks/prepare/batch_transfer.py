"""Moving batches to the device of a rank; with a GPU, each is copied during the computation on the one before it."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch

_BY_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
_BY_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values
_OF_LAYOUT: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),  # noqa: SLF001 - the public ones want it coalesced
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def on_device(batches: Iterator[Any], device: torch.device | None, *, may_look_ahead: bool) -> Iterator[Any]:
    """Return `batches` with their tensors on `device`, nested in lists, tuples and dicts too; None leaves them as they are.

    Args:
        batches: The batches of a loader.
        device: With a GPU, batches are copied on a separate stream, concurrently with the computation if the loader has
            `pin_memory=True`; such memory must then not be written again before the next batch but one is taken.
        may_look_ahead: Whether the next batch may be taken from `batches` before the current one is yielded.

    """
    if device is None or device.type == "cpu":
        return batches
    if not may_look_ahead or not hasattr(getattr(torch, device.type, None), "Stream"):
        return (moved(batch, device) for batch in batches)
    copies = _SideStream(device, _stream(device))
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


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream for copies to `device`, one for all epochs: the allocator keeps a pool of memory for each stream."""
    return torch.get_device_module(device).Stream(device)


class _SideStream:
    """Copies batches to a GPU on a separate stream."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = stream

    def begin(self, batch: Any) -> Any:
        # The copy may get the memory of an earlier batch that is freed but still in use, so it waits for all kernels that were
        # launched before. record_stream alone is not enough: it reaches only the tensors that `_record` finds.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            return moved(batch, self._device)

    def hand_over(self, batch: Any) -> None:
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        _record(batch, current)


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; values that are no tensor or container and have no `to` are kept."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)  # in the background where the loader pins memory
    if callable(getattr(batch, "to", None)):  # a packed sequence, a tokenizer's batch
        return _moved_by_itself(batch, device)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update({key: moved(value, device) for key, value in batch.items()})
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def _moved_by_itself(batch: Any, device: torch.device) -> Any:
    try:
        return batch.to(device, non_blocking=True)  # else it waits for the computation on the batch before
    except TypeError:  # it takes no such argument
        return batch.to(device)


def _record(batch: Any, stream: Any) -> None:
    """Prevent the memory of `batch` from being allocated again before `stream` is done with it."""
    if isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu":
            for part in _parts(batch):
                part.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _record(value, stream)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            _record(value, stream)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that have the memory of `tensor`: torch records streams for none that is sparse or nested."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return [tensor.values()]
    return [part(tensor) for part in _OF_LAYOUT.get(tensor.layout, ())] or [tensor]
