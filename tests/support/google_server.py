"""A server that keeps objects as Google's XML API does; no server that pip or npm has speaks it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_CHANGED = "2026-08-01T00:00:00Z"


@contextmanager
def keeping_objects() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the endpoint of a server with one bucket, and its objects by their keys."""
    objects: dict[str, bytes] = {}
    parts: dict[str, dict[int, bytes]] = {}  # of the one upload of each key

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
            query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
            if not key:
                self.send(HTTPStatus.OK, listing(objects, query))
            elif (answer := take_part(objects, parts, key, query, body)) is not None:
                self.send(HTTPStatus.OK, answer)
            elif self.command == "PUT":
                objects[key] = body
                self.send(HTTPStatus.OK, b"")
            elif key not in objects:
                self.send(HTTPStatus.NOT_FOUND, b"<Error><Code>NoSuchKey</Code></Error>")
            elif self.command == "DELETE":
                del objects[key]
                self.send(HTTPStatus.NO_CONTENT, b"")
            else:
                self.send(HTTPStatus.OK, objects[key])

        do_PUT = do_POST = do_GET = do_HEAD = do_DELETE = answer  # noqa: N815 - http.server's names

        def send(self, status: HTTPStatus, content: bytes) -> None:
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Sat, 01 Aug 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", objects
        http.shutdown()


def take_part(
    objects: dict[str, bytes], parts: dict[str, dict[int, bytes]], key: str, query: dict[str, list[str]], body: bytes
) -> bytes | None:
    """Return the answer to a request of an upload in parts; None for any other."""
    if "uploads" in query:
        parts[key] = {}
        return b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
    if "partNumber" in query:
        parts[key][int(query["partNumber"][0])] = body
        return b""
    if "uploadId" in query:
        objects[key] = b"".join(part for _, part in sorted(parts.pop(key).items()))
        return b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
    return None


def listing(objects: dict[str, bytes], query: dict[str, list[str]]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
    rows = "".join(
        f"<Contents><Key>{key}</Key><Size>{len(objects[key])}</Size><LastModified>{_CHANGED}</LastModified></Contents>"
        for key in sorted(objects)
        if key.startswith(prefix) and key > after
    )
    return f"<ListBucketResult>{rows}</ListBucketResult>".encode()


@cache
def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def service_account_key(endpoint: str) -> dict[str, object]:
    """Return a service account's key that leads to `endpoint` and asks no other server for a token."""
    names = {"type": "service_account", "project_id": "project", "private_key_id": "1", "client_email": "me@example.com"}
    urls = {"token_uri": f"{endpoint}/token", "gcs_base_url": endpoint}
    return {**names, **urls, "private_key": _private_key(), "disable_oauth": True}
