"""Connections to the servers of filesystems, each used by one thread at a time, and closed once its server is silent."""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

FileSystem: TypeAlias = Any  # fsspec ships no types

_LONGEST_SILENCE_S = 120.0
_KEEPALIVE_S = 30
T = TypeVar("T")

_AT_MOST = 4  # a server refuses too many connections (sshd's MaxStartups is 10), and every rank of a node opens its own
# Errors that a server returns on a working connection.
_ANSWERS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)


def with_limited_waits(fs: FileSystem) -> FileSystem:
    """Return `fs`; a connection of paramiko's sends keepalives, and is closed once the server is silent for long.

    It is closed since fsspec takes some errors for an answer, such as that there is no directory, and continues. It is closed
    with `fs`, too: else its thread, and two processes of the server, would live as long as this process.
    """
    channel = fs.ftp.get_channel() if hasattr(getattr(fs, "ftp", None), "get_channel") else None
    if channel is not None:
        transport = channel.get_transport()

        def closing_when_silent(call: Callable[[Any], T]) -> Callable[[Any], T]:
            def limited(argument: Any) -> T:
                try:
                    return call(argument)
                except TimeoutError:
                    transport.close()
                    raise

            return limited

        transport.set_keepalive(_KEEPALIVE_S)
        if isinstance(transport.sock, socket.socket):  # else it is a program's pipe
            # A read is a series of small requests: the kernel would hold each back until the last is confirmed, 40 ms later.
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.settimeout(_LONGEST_SILENCE_S)
        channel.recv, channel.send = closing_when_silent(channel.recv), closing_when_silent(channel.send)
        weakref.finalize(fs, transport.close).atexit = False
    return fs


class Connections(Generic[T]):
    """A pool of connections: no two threads share one, and a failed one is not used again.

    Libraries for SFTP and FTP hold one connection, on which two threads would receive each other's answers. A connection is
    opened when first needed, at most four at a time; the thread that needs a fifth waits.

    Args:
        connect: Opens a connection.

    """

    def __init__(self, connect: Callable[[], T]) -> None:
        self._connect = connect
        self._slots = threading.BoundedSemaphore(_AT_MOST)
        self._idle: list[T] = []

    @contextmanager
    def lent(self) -> Iterator[T]:
        """Yield a connection, for this thread alone until the block ends."""
        with self._slots:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            except _ANSWERS:
                self._give_back(connection)
                raise
            self._give_back(connection)

    def _give_back(self, connection: T) -> None:
        if getattr(getattr(connection, "ftp", None), "sock", self) is not None:  # else it is a closed one of FTP
            self._idle.append(connection)
