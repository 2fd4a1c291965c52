"""Connections to a server, each used by one thread at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

_AT_MOST = 4  # a server refuses too many connections (sshd's MaxStartups is 10), and every rank of a node opens its own
# Errors that a server returns on a working connection.
_ANSWERS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)


class Connections(Generic[T]):
    """Lends connections: no two threads share one, and one that failed is never lent again.

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
        """Lend a connection until the block ends."""
        with self._slots:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            except _ANSWERS:
                self._idle.append(connection)
                raise
            self._idle.append(connection)
