"""A proxy before an HTTP server that answers in its place, loses responses, or changes them, as gateways do."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Response:
    """A response: its status, its headers, and its body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Change = Callable[[str, str, Response], Response | None]
_OF_A_CONNECTION = {"connection", "transfer-encoding", "content-length", "expect"}


class HttpProxy:
    """Passes requests on to the server on loopback at `port`.

    Attributes:
        endpoint: The proxy's address.
        requests: The requests so far, as "GET /path".
        change: Called with a request's method and path and the server's response; returns the client's, or None to end the
            connection without one.

    """

    def __init__(self, port: int) -> None:
        self.requests: list[str] = []
        self.change: Change = lambda _method, _path, response: response
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.requests.append(f"{self.command} {self.path}")
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as server:
                    kept = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION}
                    server.request(self.command, self.path, body, kept)
                    came = server.getresponse()
                    response = Response(came.status, came.read(), dict(came.getheaders()))
                    size = came.getheader("Content-Length", "0")
                changed = proxy.change(self.command, self.path, response)
                if changed is None:
                    self.close_connection = True
                    return
                self.send_response_only(changed.status)
                for name, value in changed.headers.items():
                    if name.lower() not in _OF_A_CONNECTION:
                        self.send_header(name, value)
                is_head = self.command == "HEAD" and changed is response
                self.send_header("Content-Length", size if is_head else str(len(changed.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(changed.body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = pass_on  # noqa: N815 - http.server's names

            def log_message(self, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def proxied(endpoint: str) -> Iterator[HttpProxy]:
    """Run a proxy before the server at `endpoint`."""
    proxy = HttpProxy(int(endpoint.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
