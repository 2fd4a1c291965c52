"""Listings of buckets, right in whatever order their server lists, with as few requests as that order allows."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from .protocol import ObjectInfo

LISTED_AT_ONCE = 1000  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html


class ServerOrder:
    """What listings have shown of the order that a server lists in; another thread may look while one records.

    Two orders exist that let a listing begin in the middle: by whole keys ("a-b/x" before "a/x", as S3 has it), and by names,
    folder for folder ("a/x" before "a-b/x", as servers on top of folders have it). A thousand keys in a row in one of them are
    no chance; fewer prove nothing, but they are one request anyway.

    Attributes:
        by_keys: No two keys were seen that are not in the order of keys.
        by_names: No two were seen that are not in the order of names.
        turn: Two neighbours that the order of names has brought into this sequence, and that of keys would not; None without.

    """

    def __init__(self, *, is_documented: bool) -> None:
        self.by_keys = True
        self.by_names = True
        self.turn: tuple[str, str] | None = None
        self._is_known = is_documented

    @property
    def is_known(self) -> bool:
        """Whether a listing may begin in the middle: all that sorts behind a key is then listed behind it."""
        return self._is_known and (self.by_keys or self.by_names)

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
    """Lists a bucket; what is to follow a key is left to the server only once its order is known.

    Args:
        url: The bucket, for messages.
        pages: Asks the server for the pages below a prefix, after a key in the server's own order.
        exists: Asks the server for a key.
        is_documented: Whether the service promises an order.

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

    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, as `Storage.list` promises; a request per thousand.

        Where the order is not known, one request more finds out, if there are more than a thousand.

        Raises:
            OSError: If the server loses objects between two pages.

        """
        begins_after = after if self._order.is_known else None
        last = begins_after
        for page in self._pages(prefix, begins_after):
            if last is not None and begins_after is None:
                self._check_pages(prefix)
            keys = [info.key for info in page]
            self._order.see(last, keys)
            is_known = self._order.is_known
            if (begins_after is not None and not is_known) or (
                begins_after is None and is_known and after is not None and keys[-1] < after
            ):  # what was left out may be newer; or the order is known now, and pages can be left out
                yield from self.list(prefix, after)
                return
            yield from (info for info in page if after is None or info.key > after)
            last = keys[-1]

    def _check_pages(self, prefix: str) -> None:
        """Return only if a page goes on where the one before ended.

        One known server lists by names and goes on by keys: whatever sorts differently, as a manifest and its evaluations do,
        is lost where a page ends between the two.
        """
        if self._goes_on_as_it_lists or self._order.turn is None or not self._order.by_names:
            return
        one, other = self._order.turn
        behind = next(self._pages(prefix, one), ())
        if other not in {info.key for info in behind} and self._exists(other):
            raise OSError(
                f"the server of {self._url} loses objects from listings of more than {LISTED_AT_ONCE}: it lists {other} behind "
                f"{one}, but not when asked for what is behind; give trainings another server, and copy these objects there"
            )
        self._goes_on_as_it_lists = True
