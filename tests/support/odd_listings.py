"""Storages whose listings come in odd orders, and servers behind them."""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, Literal

from prefect_torch.ckpt.storage.protocol import ObjectInfo, Splits
from wrapped_storage import WrappedStorage


class OddListings(WrappedStorage):
    """Passes everything on to `inner`, but lists as a subclass tells."""

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        return iter(self.changed(list(self.inner.list(prefix))))

    def changed(self, listing: Sequence[ObjectInfo]) -> Iterable[ObjectInfo]:
        raise NotImplementedError


class Shuffled(OddListings):
    """Lists in another order each time, some objects twice, and leaves out nothing that sorts before `after`."""

    def __init__(self, inner: Any, seed: int):
        super().__init__(inner)
        self._random = random.Random(seed)

    def changed(self, listing):
        twice = self._random.sample(listing, len(listing) // 4)
        return self._random.sample([*listing, *twice], len(listing) + len(twice))


class Stale(OddListings):
    """Lists what was there when it was made: nothing that was put since, and all that was deleted; but pins as they are."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.snapshot = list(inner.list(""))

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        if prefix.endswith("/pins/"):
            return self.inner.list(prefix, after=after, splits=splits)
        return (info for info in self.snapshot if info.key.startswith(prefix) and (after is None or info.key > after))


class Emptied(OddListings):
    """Lists nothing below `prefix`, `times` times, as a gateway whose own page is no listing."""

    def __init__(self, inner: Any, prefix: str, times: float = float("inf")):
        super().__init__(inner)
        self._prefix = prefix
        self.left = times

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        if prefix == self._prefix and self.left > 0:
            self.left -= 1
            return iter(())
        return self.inner.list(prefix, after=after, splits=splits)


class FailingListings(Shuffled):
    """A shuffled listing that breaks off with `error` beyond `whole` objects, `times` times."""

    def __init__(self, inner: Any, error: Exception, whole: int, times: int):
        super().__init__(inner, seed=0)
        self._error = error
        self._whole = whole
        self._times = times
        self.fired = 0

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        listing = (info for info in super().list(prefix) if after is None or info.key > after)
        if self.fired == self._times:
            yield from listing
            return
        yield from islice(listing, self._whole)
        self.fired += 1
        raise self._error


@cache
def info_of(key: str) -> ObjectInfo:
    """Return the object of a key, made once: thousands of listings of thousands of keys would make each anew."""
    return ObjectInfo(key, 1, 0.0)


ServerKind = Literal["keys", "folders", "shuffled", "shuffled, ignores after"]


class Server:
    """Lists keys in pages of a thousand, after a key as its kind does, and counts the pages that it was asked for."""

    def __init__(self, keys: Iterable[str], kind: ServerKind, seed: int = 0):
        self.keys = list(keys)
        self._random = random.Random(seed)
        self.requests = 0
        self.become(kind)

    def become(self, kind: ServerKind) -> None:
        self.kind = kind
        self.keys.sort(key=lambda key: key.split("/") if kind == "folders" else [key])
        if kind.startswith("shuffled"):
            self._random.shuffle(self.keys)

    def pages(self, prefix: str, after: str | None) -> Iterator[list[ObjectInfo]]:
        keys = [key for key in self.keys if key.startswith(prefix)]
        if after is not None and self.kind != "shuffled, ignores after":
            keys = self._behind(keys, after)
        for start in range(0, len(keys), 1000):
            self.requests += 1
            yield [info_of(key) for key in keys[start : start + 1000]]

    def _behind(self, keys: list[str], after: str) -> list[str]:
        if self.kind == "keys":
            return [key for key in keys if key > after]
        if self.kind == "folders":  # SeaweedFS leaves out the folder of that very name
            return [key for key in keys if key.split("/") > after.split("/") and not key.startswith(f"{after}/")]
        return keys[self._random.randrange(len(keys)) :]
