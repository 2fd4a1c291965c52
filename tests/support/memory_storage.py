"""A storage in this process's memory: fast enough to hold a hundred thousand checkpoints."""

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Splits, Transfer


class MemoryStorage:
    """Objects in a dictionary, and their keys in order."""

    url = "memory"

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []
        self._lock = threading.Lock()

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._lock:
            if check_key(key) not in self._objects:
                insort(self._keys, key)
            self._objects[key] = (bytes(data), time.time())

    def put_file(self, key: str, path: Path) -> Transfer:
        return self.put_buffers(key, [memoryview(path.read_bytes())])

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        del owned
        return {key: self.put_file(key, Path(path)) for key, path in files.items()}

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        data = b"".join(parts)
        self.put_bytes(key, data)
        return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))

    def get_bytes(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)][0]
        except KeyError:
            raise FileNotFoundError(key) from None

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        data = self.get_bytes(key)
        if expected not in (None, len(data)):
            return Transfer(len(data), "")
        path.write_bytes(data)
        return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))

    def digest(self, key: str) -> Transfer:
        data = self.get_bytes(key)
        return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        data = self.get_bytes(key)[start : start + len(into)]
        into[: len(data)] = data
        return len(data)

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        del splits
        if prefix:
            check_key(prefix.removesuffix("/"))
        with self._lock:
            first = max(bisect_left(self._keys, prefix), 0 if after is None else bisect_right(self._keys, after))
            keys = self._keys[first : bisect_left(self._keys, f"{prefix}\uffff")]
        for key in keys:
            if (found := self._objects.get(key)) is not None:
                yield ObjectInfo(key, len(found[0]), found[1])

    def folders(self, prefix: str) -> Iterator[str]:
        names = (info.key.removeprefix(prefix).partition("/") for info in self.list(prefix))
        yield from {name for name, is_below, _ in names if is_below}

    def size(self, key: str) -> int:
        return len(self.get_bytes(key))

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in map(check_key, keys):
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Nothing is ever half written."""

    def reopened(self) -> "MemoryStorage":
        return self

    def local_path(self, key: str) -> Path | None:
        del key
        return None
