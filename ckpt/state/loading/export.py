"""Export of a stored state to one safetensors file: whole tensors from all ranks' parts, none of them whole in memory."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_torch.ckpt.state.index import Chunk, StateIndex, TensorEntry, ValueEntry, rank_of
from prefect_torch.ckpt.state.objects.parameters import is_extra_state
from prefect_torch.ckpt.state.plan import Step, path_name
from prefect_torch.ckpt.state.staging.buffer import memory_of
from prefect_torch.ckpt.storage.machine.scratch import scratch_folder
from prefect_torch.ckpt.text import show_some

from .load import read_index
from .read import Block, StateReader, Take, stored_value, value_block
from .safetensors import DTYPES, Tensor, lay_out, write_at

_logger = logging.getLogger(__name__)


def export_tensors(reader: StateReader, key: str, path: Path) -> None:
    """Write every tensor below `key` to a safetensors file at `path`, which appears whole or not at all.

    Each byte is read once, verified by its digest, and written to its offset in the file. Costs the memory of a few blocks of
    4 MiB, whatever the size of the tensors.

    Args:
        reader: The reader of the state's files.
        key: The part to export: its path in the state, joined with dots.
        path: The file; an existing one is replaced.

    Raises:
        ValueError: If there is no tensor below `key`, or one that safetensors cannot represent.
        CheckpointCorruptError: If the stored data differ from the committed ones.

    """
    index = read_index(reader)
    exports = choose_tensors(index, key, reader.where)
    header, starts, size = lay_out(list(exports))
    with scratch_folder(path.parent) as folder:
        partial = folder / path.name
        with partial.open("xb", buffering=0) as file:
            descriptor = file.fileno()
            file.truncate(size)
            write_at(descriptor, memoryview(header), 0)
            reader.read(
                [
                    block
                    for it, stored in exports.items()
                    for block in (
                        [_value_block(path_name(stored.path), stored, descriptor, starts[it.name], reader.where)]
                        if isinstance(stored, ValueEntry)
                        else _blocks(stored, index.block_bytes, descriptor, starts[it.name])
                    )
                ]
            )
            os.fsync(descriptor)
        partial.replace(path)


def choose_tensors(index: StateIndex, key: str, where: str) -> Mapping[Tensor, TensorEntry | ValueEntry]:
    """Return the tensors below `key`, with names relative to it, and the entry of each.

    Raises:
        ValueError: If there is none, or one that safetensors cannot represent.

    """
    chosen: dict[Tensor, TensorEntry | ValueEntry] = {}
    left_out = []
    everything: list[tuple[str, TensorEntry | ValueEntry]] = [*index.tensors.items(), *index.values.items()]
    for name, stored in everything:
        if not _is_below(stored.path, key):
            continue
        below = name.removeprefix(f"{key}.")
        if rank_of(name) is not None and any(is_extra_state(str(step)) for step in stored.path):
            left_out.append(name)
        elif isinstance(stored, TensorEntry):
            chosen[Tensor(below, stored.dtype, stored.shape)] = stored
        elif stored.tensor is not None:
            chosen[Tensor(below, *stored.tensor)] = stored
        else:
            left_out.append(name)
    if not chosen:
        keys = sorted({repr(stored.path[0]) for _, stored in everything if _is_tensor(stored) and len(stored.path) > 1})
        choice = f": choose another key, of {show_some(keys)}" if keys else ", nor below any other key"
        raise ValueError(f"the state in {where} has no tensor below {key!r}{choice}")
    _check([*chosen], f"below {key!r} in {where}")
    if left_out:
        _logger.warning("%s in %s: not a tensor of all ranks, so not in the safetensors file", show_some(left_out), where)
    return chosen


def _is_below(path: Sequence[Step], key: str) -> bool:
    """Return whether `path` continues after the steps that `key` names; the name of another key may begin as `key` does."""
    return any(path_name(tuple(path[:length])) == key for length in range(1, len(path)))


def _is_tensor(stored: TensorEntry | ValueEntry) -> bool:
    return isinstance(stored, TensorEntry) or stored.tensor is not None


def _check(tensors: Sequence[Tensor], where: str) -> None:
    own = [it.name for it in tensors if rank_of(it.name) is not None]
    if own:
        raise ValueError(f"each rank has its own tensors {where}, so that there is no whole: {show_some(own)}")
    if any(it.name == "__metadata__" for it in tensors):
        raise ValueError(f"safetensors has another use for the name of the tensor '__metadata__' {where}")
    unknown = [f"{it.name} is {it.dtype}" for it in tensors if it.dtype not in DTYPES]
    if unknown:
        raise ValueError(f"safetensors cannot hold everything {where}: {show_some(unknown)}")


def _value_block(name: str, stored: ValueEntry, descriptor: int, start: int, where: str) -> Block:
    """Return the read of a small tensor, which is written to `start` of a file."""

    def write(data: memoryview) -> None:
        write_at(descriptor, memory_of(stored_value(name, stored, bytes(data), where).contiguous()), start)

    return value_block(stored, write)


def _blocks(stored: TensorEntry, block_bytes: int, descriptor: int, start: int) -> Iterator[Block]:
    """Yield the reads of a tensor whose data begin at `start` of a file; each block is written as soon as it is verified."""
    for chunk in stored.chunks:
        runs = Runs.of(chunk, stored.shape, stored.item_bytes)
        size = math.prod(chunk.sizes) * stored.item_bytes
        for number, digest in enumerate(chunk.digests):
            at = number * block_bytes
            take = runs.writes(descriptor, start, at)
            yield Block(chunk.file, chunk.start + at, min(block_bytes, size - at), digest, take=take)


@dataclass(frozen=True, slots=True)
class Runs:
    """The layout of a chunk's raw data in the whole tensor: runs of equal length.

    Attributes:
        bytes: The length of a run.
        start: The offset of the first run in the tensor.
        dimensions: The number of runs and the stride between them in the tensor, for each dimension, the last one first.

    """

    bytes: int
    start: int
    dimensions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, chunk: Chunk, shape: Sequence[int], item_bytes: int) -> "Runs":
        """Return the runs of `chunk`, each as long as possible, in a tensor of `shape`."""
        strides = tuple(math.prod(shape[dimension + 1 :]) * item_bytes for dimension in range(len(shape)))
        start = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
        cut = max((dimension for dimension, size in enumerate(shape) if chunk.sizes[dimension] != size), default=0)
        dimensions = reversed([*zip(chunk.sizes[:cut], strides[:cut], strict=True)])
        return cls(math.prod(chunk.sizes[cut:]) * item_bytes, start, tuple(dimensions))

    def offset_of(self, number: int) -> int:
        """Return the offset of run `number` in the tensor."""
        offset = self.start
        for count, stride in self.dimensions:
            number, index = divmod(number, count)
            offset += index * stride
        return offset

    def writes(self, descriptor: int, start: int, at: int) -> Take:
        """Return a function that writes the block at offset `at` of the chunk to a file whose tensor begins at `start`."""

        def write(data: memoryview) -> None:
            done = 0
            while done < len(data):
                number, inside = divmod(at + done, self.bytes)
                stop = min(done + self.bytes - inside, len(data))
                write_at(descriptor, data[done:stop], start + self.offset_of(number) + inside)
                done = stop

        return write
