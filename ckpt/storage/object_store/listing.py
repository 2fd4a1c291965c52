"""Listings of buckets, complete in any order of their server, with as few requests as that order allows."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from prefect_torch.ckpt.storage.parallel import AT_ONCE, for_each
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Splits

LISTED_AT_ONCE = 1000  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html


class ServerOrder:
    """The order that a server lists in, as far as listings have shown it; another thread may read it while one records.

    Two orders allow a listing to begin in the middle: by whole keys ("a-b/x" before "a/x", as on S3), and by names, level by
    level ("a/x" before "a-b/x", as on servers over filesystems). A thousand consecutive keys in one of them are no coincidence;
    fewer prove nothing, but they are one request anyway.

    Attributes:
        by_keys: Whether all keys so far were in the order of keys.
        by_names: Whether all keys so far were in the order of names.
        turn: Two neighbours that are listed in the order of names, and not in the order of keys; None if there are none.

    """

    def __init__(self, *, is_documented: bool) -> None:
        self.by_keys = True
        self.by_names = True
        self.turn: tuple[str, str] | None = None
        self._is_known = is_documented

    @property
    def is_known(self) -> bool:
        """Whether a listing may begin in the middle: every key that sorts after the given one is then listed after it."""
        return self._is_known and (self.by_keys or self.by_names)

    def is_behind(self, one: str, other: str) -> bool:
        """Return whether `one` is listed after `other`, once the order is known."""
        return one > other if self.by_keys else one.split("/") > other.split("/")

    def see(self, before: str | None, keys: Sequence[str]) -> None:
        """Record a page of keys, which followed the key `before`."""
        for one, other in pairwise(keys if before is None else (before, *keys)):
            if one >= other:
                self.by_keys = False
                self.turn = self.turn or (one, other)
            if one.split("/") >= other.split("/"):
                self.by_names = False
        self._is_known = self._is_known or len(keys) >= LISTED_AT_ONCE


class BucketListing:
    """Lists a bucket; the server is trusted to list after a key only once its order is known.

    Args:
        url: The bucket, for messages.
        pages: Requests the pages below a prefix from the server, after a key in the server's own order.
        exists: Requests from the server whether a key exists.
        is_documented: Whether the service documents an order.

    """

    def __init__(
        self,
        url: str,
        pages: Callable[[str, str | None], Iterator[Sequence[ObjectInfo]]],
        exists: Callable[[str], bool],
        *,
        is_documented: bool,
    ) -> None:
        self._url = url
        self._pages = pages
        self._exists = exists
        self._order = ServerOrder(is_documented=is_documented)
        self._goes_on_as_it_lists = False
        self._ignores_after = False

    def list(self, prefix: str, after: str | None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, as `Storage.list` promises; a request per thousand, and one for each split at most.

        If the order is not known, one more request determines it, if there are more than a thousand objects. Objects
        behind the first thousand are listed in parts, between splits.

        Raises:
            OSError: If the server loses objects between two pages.

        """
        begins_after = after if self._order.is_known else None
        last = begins_after
        for page in self._whole(prefix, begins_after):
            if last is not None and begins_after is None:
                self._check_pages(prefix)
            keys = [info.key for info in page]
            self._order.see(last, keys)
            is_known = self._order.is_known
            if begins_after is not None and not is_known and len(keys) >= LISTED_AT_ONCE and keys == sorted(keys):
                self._ignores_after = True  # in order, but from the beginning
            if (begins_after is not None and not is_known) or (
                begins_after is None and is_known and after is not None and keys[-1] < after
            ):  # objects left out may be newer; or the order is known now, and pages can be left out
                yield from self.list(prefix, after, splits)
                return
            yield from (info for info in page if after is None or info.key > after)
            last = keys[-1]
            if is_known and splits is not None and len(page) >= LISTED_AT_ONCE:
                yield from self._list_parts(prefix, [last, *(it for it in splits() if self._order.is_behind(it, last))], after)
                return

    def _whole(self, prefix: str, after: str | None) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the pages below `prefix`, also those behind a response that was no listing though its status was 200.

        object_store takes any XML, such as a service's error or a gateway's page, for an empty listing, or for the end of one
        after a full page. Both are confirmed by one more request. A server that supports only the first version of listings
        also ends each after a full page, and returns the same page when the next one is requested.

        Raises:
            OSError: If the server returns the same page.

        """
        end, is_full = None, False
        for _ in range(2):
            for page in self._pages(prefix, after):
                yield page
                end, is_full = page[-1].key, len(page) >= LISTED_AT_ONCE
            if end is not None:
                break
        while end is not None and is_full and (self._order.is_known or self._ignores_after):
            before, is_full = end, False
            for page in self._pages(prefix, before):
                if not self._order.is_behind(page[0].key, before):  # one known server continues in another order
                    if before not in {info.key for info in page}:
                        return
                    self._ignores_after = True
                    raise OSError(
                        f"the server of {self._url} lists {LISTED_AT_ONCE} objects below {prefix}, and the same ones when "
                        "the next are requested, so that others cannot be seen: give trainings another server"
                    )
                yield page
                end, is_full = page[-1].key, len(page) >= LISTED_AT_ONCE

    def _list_parts(self, prefix: str, begins: Sequence[str], after: str | None) -> Iterator[ObjectInfo]:
        """Yield the objects behind the first of `begins`, and again from the beginning if the order proves to be another.

        Raises:
            OSError: If the server loses objects between two pages.

        """
        parts = for_each(zip(begins, (*begins[1:], None), strict=True), lambda ends: self._part(prefix, *ends), AT_ONCE)
        self._check_pages(prefix)
        for part in parts:
            yield from (info for info in part if after is None or info.key > after)
        if not self._order.is_known:
            yield from self.list(prefix, after)

    def _part(self, prefix: str, begin: str, end: str | None) -> Sequence[ObjectInfo]:
        """Return the objects behind `begin` up to `end`, as long as the order is known."""
        found: list[ObjectInfo] = []
        last = begin
        for page in self._whole(prefix, begin):
            self._check_pages(prefix)
            self._order.see(last, [info.key for info in page])
            if not self._order.is_known:
                break
            last = page[-1].key
            if end is not None and self._order.is_behind(last, end):
                found += [info for info in page if not self._order.is_behind(info.key, end)]
                break
            found += page
        return found

    def _check_pages(self, prefix: str) -> None:
        """Raise OSError unless a page continues where the one before ended.

        One known server lists by names and continues by keys: keys that sort differently, as a manifest and its evaluations do,
        are lost if a page ends between the two.
        """
        if self._goes_on_as_it_lists or self._order.turn is None or not self._order.by_names:
            return
        one, other = self._order.turn
        behind = next(self._pages(prefix, one), ())
        if other not in {info.key for info in behind} and self._exists(other):
            raise OSError(
                f"the server of {self._url} loses objects from listings of more than {LISTED_AT_ONCE}: it lists {other} behind "
                f"{one}, but not when the next are requested; give trainings another server, and copy these objects there"
            )
        self._goes_on_as_it_lists = True
