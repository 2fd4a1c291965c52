"""Ranged reads of an object, several concurrent ones for a large object, in reused memory."""

import mmap
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import obstore
import obstore.exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from .waits import Waits, waits_of

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse
    from urllib.request import OpenerDirector, Request

    from obstore.store import ObjectStore

RANGE_BYTES = 4 * 2**20
_LARGE_BYTES = 16 * RANGE_BYTES  # smaller files are read several at a time, and more threads would only cost
_AHEAD = 8
_VALID = timedelta(minutes=5)
_SERVED = re.compile(r"bytes (\d+)-(\d+)/\d+")

Read = Callable[[int, memoryview], int]


def read_in_order(size: int, read: Read, take: Callable[[memoryview], None]) -> None:
    """Call `take` with all bytes of an object, in order, as they arrive; holds 4 MiB of a small object, 32 MiB of a large one.

    Args:
        size: The number of bytes.
        read: Fills the given memory with the bytes from an offset on, and returns their number.
        take: Called by the caller's thread; the memory, aligned to pages, is reused when it returns.

    """
    for wanted, data in _ahead(size, read) if size > _LARGE_BYTES else _one_by_one(size, read):
        take(data)
        if len(data) < wanted:  # the object ends here, which its digest will show
            return


def _one_by_one(size: int, read: Read) -> Iterator[tuple[int, memoryview]]:
    buffer = _memory(min(size, RANGE_BYTES))
    for start in range(0, size, RANGE_BYTES):
        data = buffer[: size - start]
        yield len(data), data[: read(start, data)]


def _ahead(size: int, read: Read) -> Iterator[tuple[int, memoryview]]:
    buffers = [_memory(RANGE_BYTES) for _ in range(_AHEAD)]
    under_way: deque[tuple[memoryview, Future[int]]] = deque()
    with ThreadPoolExecutor(_AHEAD, "prefect-torch-range") as pool:
        for number, start in enumerate(range(0, size, RANGE_BYTES)):
            if len(under_way) == _AHEAD:
                yield _arrived(*under_way.popleft())
            data = buffers[number % _AHEAD][: size - start]
            under_way.append((data, pool.submit(read, start, data)))
        while under_way:
            yield _arrived(*under_way.popleft())


def _arrived(data: memoryview, reading: "Future[int]") -> tuple[int, memoryview]:
    return len(data), data[: reading.result()]


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]  # aligned to pages, as writes past the page cache require


def read_range_with_status_200(store: "ObjectStore", key: str, start: int, into: memoryview) -> int | None:
    """Copy the object's bytes from `start` on into `into`, with one signed request, and return their number.

    For servers that send a range with the status of a whole object, which obstore's client rejects, as `rclone serve s3`
    does. Return None if the server's Content-Range does not state the requested range (RFC 9110, 14.4), or the server does
    not answer within the waits of the store's own client.
    """
    import urllib.request  # noqa: PLC0415 - a sixth of what opening a bucket imports, for few servers only
    from http.client import HTTPException  # noqa: PLC0415 - for few servers only

    if not isinstance(store, (S3Store, GCSStore, AzureStore)):
        return None
    try:
        url = obstore.sign(store, "GET", key, _VALID)
    except obstore.exceptions.BaseError:  # credentials that cannot sign
        return None
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{start + len(into) - 1}"})  # noqa: S310 - the storage's own
    try:
        waits = waits_of(store)
        with _opener(*_trusted(store), waits).open(request, timeout=waits.read_s) as response:
            served = _SERVED.fullmatch(response.headers.get("Content-Range", ""))
            if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT) or served is None or int(served[1]) != start:
                return None
            count = int(served[2]) - start + 1
            return count if count <= len(into) and _fill(response, into[:count]) else None
    except (OSError, HTTPException):  # the caller's other method has retries
        return None


def _trusted(store: "S3Store | GCSStore | AzureStore") -> tuple[str | None, bool, str | None]:
    """Return the certificates that the store's client trusts in addition, whether it trusts any, and its proxy."""
    http: dict[str, Any] = dict(store.client_options or {})
    certificates = http.get("root_certificate")
    text = certificates.decode() if isinstance(certificates, bytes) else certificates
    return text, str(http.get("allow_invalid_certificates")).lower() == "true", http.get("proxy_url")


@lru_cache(maxsize=8)  # reading the system's certificates takes as long as some ranges do
def _opener(certificates: str | None, trusts_any: bool, proxy: str | None, waits: Waits) -> "OpenerDirector":
    import ssl  # noqa: PLC0415 - for few servers only
    import urllib.request  # noqa: PLC0415 - for few servers only
    from http.client import HTTPConnection, HTTPSConnection  # noqa: PLC0415 - for few servers only

    class Http(urllib.request.HTTPHandler):
        def http_open(self, req: "Request") -> "HTTPResponse":
            return self.do_open(_waiting(waits, HTTPConnection), req)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, req: "Request") -> "HTTPResponse":
            return self.do_open(_waiting(waits, HTTPSConnection), req, context=context)

    context = ssl.create_default_context(cadata=certificates)
    if certificates is not None:
        context.load_default_certs()
    if trusts_any:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    through = urllib.request.ProxyHandler(None if proxy is None else {"http": proxy, "https": proxy})
    return urllib.request.build_opener(through, Http(), Https(context=context))


def _waiting(waits: Waits, kind: "type[HTTPConnection]") -> Any:
    """Return a kind of connection with these waits: urllib's own have one for everything."""

    class Connection(kind):  # type: ignore[misc, valid-type]  # of either kind
        def connect(self) -> None:
            self.timeout = min(waits.connect_s, waits.read_s)
            super().connect()
            self.sock.settimeout(waits.read_s)

    return Connection


def _fill(response: "HTTPResponse", into: memoryview) -> bool:
    while into:
        count = response.readinto(into)
        if not count:
            return False
        into = into[count:]
    return True
