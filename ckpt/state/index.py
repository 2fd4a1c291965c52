"""The index of a stored state: strict JSON with the position of every tensor and value, checked before it is used."""

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import CheckpointCorruptError
from prefect_torch.ckpt.runs.records.fields import Count, decode
from prefect_torch.ckpt.state.key_order import KeyOrder, key_of, needed_orders
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, fields_of, parse

from .plan import Step, lie_apart

INDEX_FILE = ".state.json"
DCP_METADATA_FILE = ".metadata"  # torch.distributed.checkpoint's own
_WHAT = "the index of a state"
_WHAT_OF_RANK = "a rank's part of the index of a state"
_OWN = re.compile(r"@rank(?P<rank>[0-9]+)$")
_MOST_STEPS = 500  # of a path; a state that is nested deeper exhausts Python's stack before it is stored
_MOST_BLOCK_BYTES = 64 * 2**20  # sixteen times what is written: several blocks are in memory at a time
_RANK_FILE = re.compile(r"__[0-9]+_[01]\.distcp")
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
}


def is_own_file(path: str) -> bool:
    """Return whether `path` is a name under which a state is stored, which no file of a user's directory may have."""
    return path in (INDEX_FILE, DCP_METADATA_FILE) or _RANK_FILE.fullmatch(path) is not None


def tensors_file(rank: int) -> str:
    """Return the file of `rank`'s share of the tensors, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def values_file(rank: int) -> str:
    """Return the file of `rank`'s plain values."""
    return f"__{rank}_1.distcp"


def rank_name(name: str, rank: int) -> str:
    """Return the name under which `rank`'s own `name` is stored."""
    return f"{name}@rank{rank}"


def rank_of(name: str) -> int | None:
    """Return the rank that alone has `name`, or None where all ranks share it."""
    found = _OWN.search(name)
    return None if found is None else int(found["rank"])


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the dtype {reprlib.repr(dtype)} is not known")


def _check_path(path: Sequence[Step]) -> None:
    if not path:
        raise ValueError("an empty path")
    if len(path) > _MOST_STEPS:
        raise ValueError(f"a path of {len(path)} steps, and {_MOST_STEPS} are the most")
    for step in path:
        if isinstance(step, list) and (len(step) != 1 or step[0] < 0):
            raise ValueError(f"{reprlib.repr(step)} is no index of a list")


ArrayKind: TypeAlias = Literal["array", "scalar", "scalars"]  # of NumPy; the last is a list
Counts: TypeAlias = tuple[Count, ...]
Dtype: TypeAlias = Annotated[str, _check_dtype]
StepPath: TypeAlias = Annotated[tuple[Step, ...], _check_path]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        offsets: Its offsets in the tensor.
        sizes: Its shape.
        file: The file that contains it.
        archive: The offset in the file and the size of the archive that torch.load reads.
        start: The offset of the raw data in the file.
        digests: xxh3-128 of each block of the raw data.

    """

    offsets: Counts
    sizes: Counts
    file: Annotated[str, check_key]
    archive: tuple[Count, Count]
    start: Count
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor.

    Attributes:
        path: Its path in the state.
        dtype: Its dtype, as torch names it.
        shape: Its shape.
        chunks: The chunks of which it consists.

    """

    path: StepPath
    dtype: Dtype
    shape: Counts
    chunks: tuple[Chunk, ...]

    @property
    def item_bytes(self) -> int:
        """The size of one element."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A stored value.

    Attributes:
        path: Its path in the state.
        file: The file that contains it.
        start: Its offset in the file.
        bytes: Its size.
        digest: xxh3-128 of it.
        tensor: The dtype and shape of a small tensor, else None.

    """

    path: StepPath
    file: Annotated[str, check_key]
    start: Count
    bytes: Count
    digest: str
    tensor: tuple[Dtype, Counts] | None = None


@dataclass(frozen=True, slots=True)
class StateIndex:
    """The entries of all tensors and values of a stored state.

    Attributes:
        world_size: The number of ranks that stored it.
        block_bytes: The size of a block of raw data; each block has its own digest.
        tensors: The tensors by name.
        values: The values by name; a name of which only one rank has a value ends with "@rank<r>".
        arrays: The names of the tensors that were NumPy arrays, scalars or lists of scalars, with the kind of each.
        orders: The order of the keys in each dict whose keys `paths` yields in a different order.
        holders: The ranks that had a tensor, by its name, where others that reported a state did not have it.

    """

    world_size: Count
    block_bytes: Count
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    arrays: Mapping[str, ArrayKind] = field(default_factory=dict)
    orders: tuple[KeyOrder, ...] = ()
    holders: Mapping[str, Counts] = field(default_factory=dict)

    def paths(self) -> Iterator[tuple[str, tuple[Step, ...]]]:
        """Yield the name and the path of every tensor and value."""
        yield from ((name, tensor.path) for name, tensor in self.tensors.items())
        yield from ((name, value.path) for name, value in self.values.items())

    def fields(self) -> dict[str, Any]:
        """Return a form that JSON can represent."""
        body: dict[str, Any] = {"format": FORMAT_VERSION, "world_size": self.world_size, "block_bytes": self.block_bytes}
        body["tensors"] = {
            name: {**fields_of(entry), "chunks": [fields_of(chunk) for chunk in entry.chunks]}
            for name, entry in self.tensors.items()
        }
        body["values"] = {name: fields_of(entry) for name, entry in self.values.items()}
        if self.arrays:
            body["arrays"] = self.arrays
        if self.orders:
            body["orders"] = [fields_of(order) for order in self.orders]
        if self.holders:
            body["holders"] = self.holders
        return body

    def encode(self) -> bytes:
        """Return strict JSON."""
        return _encode(self.fields(), levels=2).encode()

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, Any] | None]) -> "StateIndex":
        """Return the index of all ranks, merged from the `fields` of each rank's index; None if a rank has no state."""
        tensors: dict[str, dict[str, Any]] = {}
        values: dict[str, ValueEntry] = {}
        arrays: dict[str, ArrayKind] = {}
        orders: dict[int, list[KeyOrder]] = {}
        holders: dict[str, Counts] = {}
        for rank, part in enumerate(parts):
            if part is None:
                continue
            orders[rank] = [decode(KeyOrder, fields, f"rank {rank}", _WHAT_OF_RANK) for fields in part.get("orders", [])]
            arrays.update(part.get("arrays", {}))
            holders.update({name: tuple(ranks) for name, ranks in part.get("holders", {}).items()})
            for name, fields in part["tensors"].items():
                tensors.setdefault(name, {**fields, "chunks": []})["chunks"] += fields["chunks"]
            for name, fields in part["values"].items():
                values[name] = decode(ValueEntry, fields, name, _WHAT_OF_RANK)
        known = {name: decode(TensorEntry, fields, name, _WHAT_OF_RANK) for name, fields in tensors.items()}
        block_bytes = next(part["block_bytes"] for part in parts if part is not None)
        merged = cls(
            len(parts), block_bytes, known, values, {name: arrays[name] for name in (*known, *values) if name in arrays}
        )
        return replace(merged, orders=needed_orders((path for _, path in merged.paths()), orders), holders=holders)

    @classmethod
    def decode(cls, data: bytes, where: str, file_bytes: Mapping[str, int]) -> "StateIndex":
        """Return the index that `encode` wrote, after a check that every entry lies inside its file.

        Args:
            data: The bytes as stored.
            where: Their location, for the error.
            file_bytes: The size of every file of the checkpoint, by path.

        Raises:
            CheckpointCorruptError: If it is no index, or an entry is inconsistent.
            UnsupportedFormatError: If a newer version stored it.

        """
        index = decode(cls, parse(data, where, _WHAT), where, _WHAT)
        try:
            index._check(file_bytes)  # noqa: SLF001 - a method of this class
        except ValueError as exc:
            raise CheckpointCorruptError(f"{where} is not {_WHAT}: {exc}") from exc
        return index

    def _check(self, file_bytes: Mapping[str, int]) -> None:
        if not self.world_size or not self.block_bytes:
            raise ValueError("a world_size or block_bytes of 0")
        if self.block_bytes > _MOST_BLOCK_BYTES:
            raise ValueError(f"blocks of {self.block_bytes} bytes, and {_MOST_BLOCK_BYTES} are the most")
        self._check_names()
        for name, tensor in self.tensors.items():
            _check_shape(name, tensor.dtype, tensor.shape)
            if self.block_bytes % tensor.item_bytes:
                raise ValueError(f"blocks of {self.block_bytes} bytes cut the elements of {name!r}")
            for chunk in tensor.chunks:
                _check_box(name, tensor, chunk)
                size = math.prod(chunk.sizes) * tensor.item_bytes
                _check_inside(name, chunk.file, chunk.start, size, file_bytes)
                if len(chunk.digests) != -(-size // self.block_bytes):
                    raise ValueError(f"{name!r} has {len(chunk.digests)} digests for {size} bytes")
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
                raise ValueError(f"the chunks of {name!r} do not make up its shape {list(tensor.shape)}")
            _check_apart(name, tensor)
        for name, value in self.values.items():
            _check_inside(name, value.file, value.start, value.bytes, file_bytes)
            _check_value(name, value)

    def _check_names(self) -> None:
        if twice := self.tensors.keys() & self.values.keys():
            raise ValueError(f"{reprlib.repr(min(twice))} is a tensor and a value")
        known: dict[tuple[object, ...], str] = {}
        for name, path in self.paths():
            rank = rank_of(name)
            if rank is not None and rank >= self.world_size:
                raise ValueError(f"{reprlib.repr(name)} is of a rank that does not exist among {self.world_size} ranks")
            place = (rank, *key_of(path))
            if (other := known.setdefault(place, name)) != name:
                raise ValueError(f"{reprlib.repr(name)} has the path of {reprlib.repr(other)}")
        for name in self.arrays:
            value = self.values.get(name)
            if name not in self.tensors and (value is None or value.tensor is None):
                raise ValueError(f"{reprlib.repr(name)} is listed as an array, but is no tensor")


def _encode(value: object, levels: int) -> str:
    """Return JSON; other threads run after each entry of the outer dicts, whereas `json.dumps` of all holds the interpreter."""
    if levels and isinstance(value, dict):
        return f"{{{','.join(f'{_encode(key, 0)}:{_encode(item, levels - 1)}' for key, item in value.items())}}}"
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _check_shape(name: str, dtype: str, shape: Sequence[int]) -> None:
    """Raise for a shape whose size torch cannot represent; of an empty tensor, torch multiplies the other dimensions."""
    if math.prod(max(size, 1) for size in shape) * DTYPE_BYTES[dtype] >= 2**63:
        raise ValueError(f"{name!r} has the shape {reprlib.repr(list(shape))}, which no tensor has")


def _check_value(name: str, value: ValueEntry) -> None:
    if not value.bytes:
        raise ValueError(f"{name!r} has no bytes")
    if value.tensor is not None:
        dtype, shape = value.tensor
        _check_shape(name, dtype, shape)
        if math.prod(shape) * DTYPE_BYTES[dtype] > value.bytes:  # it would repeat elements, to any size
            raise ValueError(f"{name!r} is {dtype} {reprlib.repr(list(shape))}, which {value.bytes} bytes do not hold")


def _check_inside(name: str, file: str, start: int, size: int, file_bytes: Mapping[str, int]) -> None:
    if file not in file_bytes:
        raise ValueError(f"{name!r} lies in {file!r}, which is no file of the checkpoint")
    if start + size > file_bytes[file]:
        raise ValueError(f"{name!r} lies at {start} to {start + size} of {file!r}, which has {file_bytes[file]} bytes")


def _check_box(name: str, tensor: TensorEntry, chunk: Chunk) -> None:
    dimensions = len(tensor.shape)
    if len(chunk.offsets) != dimensions or len(chunk.sizes) != dimensions:
        raise ValueError(f"a chunk of {name!r} has other dimensions than its shape {list(tensor.shape)}")
    if any(start + size > whole for start, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)):
        raise ValueError(f"a chunk of {name!r} reaches beyond its shape {list(tensor.shape)}")


def _check_apart(name: str, tensor: TensorEntry) -> None:
    """Raise if chunks overlap; they must lie inside the tensor, and their sizes must add up to its size."""
    if not lie_apart(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
        raise ValueError(f"two chunks of {name!r} overlap")
