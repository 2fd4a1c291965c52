"""A storage that counts what an object store would be asked, and may be as slow as one."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from prefect_torch.ckpt.storage.object_store.listing import BucketListing
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Splits
from wrapped_storage import WrappedStorage

PAGE = 1000  # objects in one answer to a listing, and in one request to delete


class CountingStorage(WrappedStorage):
    """Passes everything on to `inner`; a listing and a deletion count as a request for each thousand objects.

    Args:
        inner: The storage that does the work, and lists by keys.
        latency_s: How long every request takes.

    """

    def __init__(self, inner: Any, latency_s: float = 0.0):
        super().__init__(inner)
        self.latency_s = latency_s
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._listing = BucketListing("memory", self._pages, lambda _: True, is_documented=True)

    def taken(self) -> Counter[str]:
        """Return the requests since the last call."""
        with self._lock:
            requests, self.requests = self.requests, Counter()
        return requests

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[Any]:
        return self._listing.list(prefix, after, splits)

    def _pages(self, prefix: str, after: str | None) -> Iterator[Sequence[ObjectInfo]]:
        listing = iter(self.inner.list(prefix, after=after))
        while True:
            self._request("list")
            page = list(islice(listing, PAGE))
            following = next(listing, None)  # the answer says whether there is more
            if page:
                yield page
            if following is None:
                return
            listing = chain([following], listing)

    def delete(self, keys: Any) -> None:
        all_keys = list(keys)
        for start in range(0, len(all_keys), PAGE):
            self._request("delete")
            self.inner.delete(all_keys[start : start + PAGE])

    def _request(self, verb: str) -> None:
        with self._lock:
            self.requests[verb] += 1
        if self.latency_s:
            time.sleep(self.latency_s)

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self._request(verb)
        return super()._do(verb, *args, **kwargs)
