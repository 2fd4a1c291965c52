"""Whether the machine of an agent reaches the other machines of its training, to which its ranks are connected.

The standard library only.
"""

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from .link import keep_alive

_CONNECT_S = 5.0  # how long connecting may take, and the shortest time between two attempts
_MOST_FAILURES = 4  # in a row: each stands for three packets of the kernel, of which a bad network loses many
# Errors of this process or machine, which say nothing about the other machine.
_OF_OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN}
_MOST_HELD = 64  # connections from others, more than watch this machine; one more closes the oldest
_PAUSE_S = 0.5


class Neighbours:
    """Holds a connection to the agent of each of some other machines, and reports which ones it no longer reaches.

    The kernels keep a connection alive and accept new ones, and nothing is sent: a slow step, a busy machine and an agent that
    is stopped change nothing. A machine is reported only when its connection has died and no other can be made; one that was
    not reached at all is reported apart, since the ranks may be connected in another way.

    Args:
        address: The address of this machine, where it lets the others connect.
        changed: Called, in a thread, with the names of the machines that are not reached any longer, and of those that never
            were, whenever these change.

    Attributes:
        port: The port at which this machine lets the others connect; None if it can open none.

    """

    def __init__(self, address: str, changed: Callable[[list[str], list[str]], None]) -> None:
        self.port: int | None = None
        self._changed = changed
        self._unreached: set[str] = set()
        self._unmet: set[str] = set()
        self._watched: set[tuple[str, str, int]] = set()
        self._changing = threading.Lock()
        with suppress(OSError, RuntimeError):  # no descriptor or thread is left
            server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
            threading.Thread(target=_accept, args=(server,), name="neighbours", daemon=True).start()
            self.port = server.getsockname()[1]

    def watch(self, machines: Sequence[tuple[str, str, int]]) -> None:
        """Watch other machines, in addition to those of earlier calls, until this process ends.

        Args:
            machines: The name, the address and the port of each.

        """
        for name, address, port in machines:
            if (name, address, port) in self._watched:
                continue
            self._watched.add((name, address, port))
            with suppress(RuntimeError):  # no thread is left
                threading.Thread(target=self._watch, args=(name, (address, port)), name=f"reach-{name}", daemon=True).start()

    def _watch(self, name: str, address: tuple[str, int]) -> None:
        was_reached, num_failures = False, 0
        while True:
            begun_s = time.monotonic()
            try:
                with socket.create_connection(address, _CONNECT_S) as connection:
                    self._record(name, is_reached=True, was_reached=was_reached)
                    was_reached, num_failures = True, 0
                    _wait_for_end(connection)
            except OSError as exc:
                num_failures += exc.errno not in _OF_OWN
                if num_failures >= _MOST_FAILURES:
                    self._record(name, is_reached=False, was_reached=was_reached)
            time.sleep(max(0.0, begun_s + _CONNECT_S - time.monotonic()))

    def _record(self, name: str, *, is_reached: bool, was_reached: bool) -> None:
        with self._changing:
            missed = self._unreached if was_reached else self._unmet
            if is_reached == (name in missed):
                missed ^= {name}
                self._changed(sorted(self._unreached), sorted(self._unmet))


def _wait_for_end(connection: socket.socket) -> None:
    connection.settimeout(None)
    keep_alive(connection)
    with suppress(OSError):
        while connection.recv(1):
            pass


def _accept(server: socket.socket) -> None:
    held: deque[socket.socket] = deque()
    while True:
        try:
            held.append(server.accept()[0])
        except OSError:  # the other end is gone already, or this process has too many files open
            time.sleep(_PAUSE_S)
        if len(held) > _MOST_HELD:
            held.popleft().close()
