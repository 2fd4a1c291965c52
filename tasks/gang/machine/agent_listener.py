"""The port at which the agents of an attempt connect; only those that know its key are accepted."""

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .link import Link, LinkError, greet_agent
from .machine import SILENT_S

_GREETING_S = 5.0
_PAUSE_S = 0.05
_MOST_UNKNOWN = 256  # connections that have not proved yet that they know the key; one more closes the oldest


class AgentListener:
    """Listens for agents; connections without the key do not delay them.

    Args:
        host: The address to listen on.
        port: The port; a free one if 0.
        key: The secret that agents know.
        accept: Called with the link to each agent and the agent's hello message, in one thread per agent.

    Attributes:
        host: The address.
        port: The port.

    """

    def __init__(self, host: str, port: int, key: str, accept: Callable[[Link, Mapping[str, Any]], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=4096)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._key = key
        self._accept = accept
        self._unknown: OrderedDict[int, socket.socket] = OrderedDict()
        self._changing = threading.Lock()
        threading.Thread(target=self._listen, name="agents", daemon=True).start()

    def close(self) -> None:
        """Stop listening; established links stay."""
        with suppress(OSError):  # not all systems shut a listening socket down, which ends `accept`
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changing:
            for connection in self._unknown.values():
                _shut(connection)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(_PAUSE_S)  # the other end is gone already, or this process has too many files open
                continue
            with self._changing:
                self._unknown[connection.fileno()] = connection
                if len(self._unknown) > _MOST_UNKNOWN:
                    _shut(self._unknown.popitem(last=False)[1])
            self._begin_greeting(connection)

    def _begin_greeting(self, connection: socket.socket) -> None:
        """Greet in a thread of its own, once this process has one left: an agent waits that long, but does not come again."""
        while self._socket.fileno() >= 0:
            with suppress(RuntimeError):
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
                return
            time.sleep(_PAUSE_S)

    def _greet(self, connection: socket.socket) -> None:
        number = connection.fileno()
        try:
            try:
                link = greet_agent(connection, self._key, _GREETING_S, SILENT_S)
            finally:
                with self._changing:
                    if self._unknown.get(number) is connection:
                        del self._unknown[number]
            hello, _ = link.receive()  # an agent takes the GPUs first, which may last for seconds
        except LinkError:
            connection.close()
            return
        self._accept(link, hello)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
