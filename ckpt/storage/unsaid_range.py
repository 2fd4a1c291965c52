"""Ranges from servers that send them with the status of a whole object, which obstore's client rejects."""

import re
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING

import obstore
import obstore.exceptions
from obstore.store import AzureStore, GCSStore, S3Store

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from obstore.store import ObjectStore

_VALID = timedelta(minutes=5)
_TIMEOUT_S = 60.0
_SERVED = re.compile(r"bytes (\d+)-(\d+)/\d+")


def read_unsaid_range(store: "ObjectStore", key: str, start: int, into: memoryview) -> int | None:
    """Copy the object's bytes from `start` on into `into`, with one signed request, and return their number.

    Return None if the server's Content-Range does not state the requested range (RFC 9110, 14.4), or the server does not
    answer. `rclone serve s3` is such a server: it sends status 200 instead of 206.
    """
    import urllib.request  # noqa: PLC0415 - a sixth of what opening a bucket imports, for few servers only
    from http.client import HTTPException  # noqa: PLC0415 - a sixth of what opening a bucket imports, for few servers only

    if not isinstance(store, (S3Store, GCSStore, AzureStore)):
        return None
    try:
        url = obstore.sign(store, "GET", key, _VALID)
    except obstore.exceptions.BaseError:  # credentials that cannot sign
        return None
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{start + len(into) - 1}"})  # noqa: S310 - the storage's own
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - the storage's own
            served = _SERVED.fullmatch(response.headers.get("Content-Range", ""))
            if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT) or served is None or int(served[1]) != start:
                return None
            count = int(served[2]) - start + 1
            return count if count <= len(into) and _fill(response, into[:count]) else None
    except (OSError, HTTPException):  # the caller's other method has retries
        return None


def _fill(response: "HTTPResponse", into: memoryview) -> bool:
    while into:
        count = response.readinto(into)
        if not count:
            return False
        into = into[count:]
    return True
