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
        num_coming: How many agents have proved that they know the key, and have not been accepted yet: they list their GPUs.

    """

    def __init__(self, host: str, port: int, key: str, accept: Callable[[Link, Mapping[str, Any]], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=4096)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._key = key
        self._accept = accept
        self.num_coming = 0
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
        if (link := self._known(connection)) is None:
            return
        try:
            hello, _ = link.receive()  # an agent takes the GPUs first, which may last for minutes
            self._accept(link, hello)
        except LinkError:
            connection.close()
        finally:
            with self._changing:
                self.num_coming -= 1

    def _known(self, connection: socket.socket) -> Link | None:
        """Return the link to an agent, which is coming from then on; None if the other end does not know the key."""
        number, link = connection.fileno(), None
        with suppress(LinkError):
            link = greet_agent(connection, self._key, _GREETING_S, SILENT_S)
        with self._changing:
            if self._unknown.get(number) is connection:
                del self._unknown[number]
            self.num_coming += link is not None
        if link is None:
            connection.close()
        return link


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
