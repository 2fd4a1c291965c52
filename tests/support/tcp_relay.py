"""A relay between clients and a server on loopback, for the faults of a connection."""

import contextlib
import socket
import threading

from servers import free_port


class TcpRelay:
    """Passes bytes on to a server on loopback, as `change` gives them back, and refuses connections when told.

    Attributes:
        port: Where it listens.
        connections: How many it has accepted.

    """

    def __init__(self, server_port: int) -> None:
        self.port = free_port()
        self.connections = 0
        self._server_port = server_port
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()

    def accept(self) -> None:
        """Begin to listen."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Stop listening, and end every connection; harmless when nobody listens."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which would keep the port
            self._listener.close()
            self._listener = None
        for end in tuple(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def change(self, data: bytes, *, is_answer: bool) -> bytes:
        """Return what is passed on of `data`, once it may be."""
        del is_answer
        return data

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for source, target, is_answer in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=(source, target, is_answer), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        self._open.add(source)
        with source, contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                target.sendall(self.change(chunk, is_answer=is_answer))
            target.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
