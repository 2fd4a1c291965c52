"""The port at which the agents of an attempt come in, and nobody else."""

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
_MOST_STRANGERS = 256  # that have not proved yet that they know the key; one more, and the oldest has to go


class Door:
    """Listens for agents; strangers do not delay them.

    Args:
        host: The address to listen on.
        port: The port; a free one if 0.
        key: The secret that agents know.
        enter: Called, in a thread for each, with the link to an agent and its hello.

    Attributes:
        host: The address.
        port: The port.

    """

    def __init__(self, host: str, port: int, key: str, enter: Callable[[Link, Mapping[str, Any]], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=4096)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._key = key
        self._enter = enter
        self._strangers: OrderedDict[int, socket.socket] = OrderedDict()
        self._changing = threading.Lock()
        threading.Thread(target=self._accept, name="agents", daemon=True).start()

    def close(self) -> None:
        """Stop listening; links that were made stay."""
        with suppress(OSError):  # not all systems shut a listening socket down, which ends `accept`
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changing:
            for stranger in self._strangers.values():
                _shut(stranger)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(_PAUSE_S)  # the stranger is gone already, or this process has too many files open
                continue
            with self._changing:
                self._strangers[connection.fileno()] = connection
                if len(self._strangers) > _MOST_STRANGERS:
                    _shut(self._strangers.popitem(last=False)[1])
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        number = connection.fileno()
        try:
            link = greet_agent(connection, self._key, _GREETING_S, SILENT_S)
            hello, _ = link.receive()
        except LinkError:
            connection.close()
            return
        finally:
            with self._changing:
                if self._strangers.get(number) is connection:
                    del self._strangers[number]
        self._enter(link, hello)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
