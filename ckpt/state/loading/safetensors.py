"""The format of a safetensors file, written here: the library needs every tensor of a file in memory before it writes one.

https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_torch.ckpt.state.index import DTYPE_BYTES

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file.

    Attributes:
        name: Its name.
        dtype: Its dtype, as torch names it, one of `DTYPES`.
        shape: Its shape.

    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def lay_out(tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of the file, the offset of each tensor's data, and the file's size.

    The tensors with the largest elements come first, as in the library's files, so that all are aligned.
    """
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it, transformers does not read a file
    starts, end = {}, 0
    for it in sorted(tensors, key=lambda it: (-DTYPE_BYTES[it.dtype], it.name)):
        starts[it.name], end = end, end + it.bytes
        described[it.name] = {"dtype": DTYPES[it.dtype], "shape": it.shape, "data_offsets": [starts[it.name], end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to a file, from `offset`; several threads may call it concurrently."""
    while data:  # one call may write less than it was given
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
