"""All objects of a kind that Prefect's API knows, which it lists by pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_PAGE = 200  # the most that the API lists at once


def read_pages(read: Callable[..., Sequence[_T]], **filters: Any) -> Iterator[_T]:
    """Yield what `read`, a method of Prefect's client, lists with these filters; one request per 200 objects."""
    offset, is_full = 0, True
    while is_full:  # the API refuses a limit above its own, so a shorter page is the last
        page = read(limit=_PAGE, offset=offset, **filters)
        yield from page
        offset, is_full = offset + len(page), len(page) == _PAGE
