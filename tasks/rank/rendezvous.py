"""The key-value store that the ranks of one attempt and its leader share: torch's TCPStore as a KeyValue."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue

TERMINATION_KEY = "termination requested"  # ranks have the grace for a last checkpoint
CUT_SHORT_KEY = "cut short"  # rank 0's function was asked to end, or was ended by its report, because of TERMINATION_KEY
_JOINING_KEY, _JOINED_KEY = "joining", "joined"  # how many ranks have begun to connect to each other, and have done so
_CONNECT_TIMEOUT = timedelta(seconds=60)
WITHIN_LEADER = timedelta(seconds=8)  # for `connect` by a thread of the leader, whose rendezvous listens already
LONGEST_IMPORT_S = 1800.0  # how much longer one rank may import a training function than another
_KEEPALIVE_S = 60  # firewalls forget a connection that is silent for longer, such as that of a rank in a long step
_FIRST_POLL_S = 0.0002
_LONGEST_POLL_S = 0.01
_SOON_S = 5.0
_KEYS_AT_ONCE = 256  # in one poll: ten thousand take the server 30 ms
_MOST_BYTES = 4 * 2**20  # of one value: of more than 8 MiB, torch's server closes the connection
_IN_PARTS = b"prefect-torch: parts "


def heartbeat_key(rank: int) -> str:
    """Return the key of the heartbeats of a rank's supervisor, a counter."""
    return f"heartbeat/{rank}"


@contextmanager
def joining(key_value: KeyValue) -> Iterator[None]:
    """Connect this rank to the others in the context; see `are_joining`."""
    key_value.add(_JOINING_KEY, 1)
    yield
    key_value.add(_JOINED_KEY, 1)


def are_joining(key_value: KeyValue, num_ranks: int) -> bool:
    """Return whether all ranks have begun to connect to each other, and some have not done so yet."""
    return key_value.add(_JOINED_KEY, 0) < num_ranks == key_value.add(_JOINING_KEY, 0)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a rendezvous."""

    host: str
    port: int


class Rendezvous:
    """The leader's end: listens immediately, on a free port, and answers once `serve` is called.

    The kernel queues ranks that connect earlier, so they can start while this process imports torch.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=4096)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit what is set here
        if hasattr(socket, "TCP_KEEPIDLE"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        self.address = Address(host, self._socket.getsockname()[1])

    def serve(self, timeout_s: float | None = None) -> "TcpKeyValue":
        """Start to answer; the server lives until the returned object is closed or gone.

        Args:
            timeout_s: As for `connect`.

        Raises:
            Exception: If torch cannot be imported, or no thread is left for the server; nothing listens any more.

        """
        with self._socket, self._socket.dup() as handed_over:
            try:
                store = _tcp_store(
                    self.address.host,
                    self.address.port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=handed_over.detach(),
                )
            except BaseException:
                self._socket.shutdown(socket.SHUT_RDWR)  # torch leaves what it was handed over open where it gets no thread
                raise
        store.set_timeout(timedelta(seconds=LONGEST_IMPORT_S if timeout_s is None else timeout_s))
        return TcpKeyValue(store)

    def close(self) -> None:
        """Stop listening, unless `serve` was called."""
        self._socket.close()


def connect(address: Address, timeout_s: float | None = None, *, tries_for: timedelta | None = None) -> "TcpKeyValue":
    """Return a rank's end; waits without a limit for a leader that listens and has yet to serve.

    Args:
        address: The address of the rendezvous.
        timeout_s: How long process groups wait in its store for each other's keys, such as NCCL for the id that rank 0 makes:
            longer than the difference between the slowest and the fastest import of a training function. Half an hour if None.
        tries_for: How long an address at which nothing listens is tried again. A minute if None.

    Raises:
        torch.distributed.DistNetworkError: If no rendezvous listens there, or no longer.

    """
    store = _tcp_store(address.host, address.port, is_master=False, timeout=tries_for or _CONNECT_TIMEOUT)
    store.set_timeout(timedelta(seconds=LONGEST_IMPORT_S if timeout_s is None else timeout_s))
    return TcpKeyValue(store)


def wait_for_key(key_value: "TcpKeyValue", key: str, longest_s: float) -> bytes:
    """Return the value of a key that another rank sets soon; polls more often than one `get` of that length.

    Raises:
        TimeoutError: If it is not set within `longest_s`.

    """
    deadline_s = time.monotonic() + longest_s
    while True:
        try:
            return key_value.get([key], _SOON_S)[0]
        except TimeoutError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"not set within {longest_s:g} s: {key}") from None


class TcpKeyValue:
    """A TCPStore as the KeyValue that `prefect_torch.ckpt` uses; its keys have a prefix that those of process groups lack.

    A value of more than 4 MiB, such as the names of 10^5 files, is stored in parts under keys of their own, which only an end
    that has set or read the value deletes with it.
    """

    def __init__(self, store: Any) -> None:
        self.store: Any = store
        self._num_parts: dict[str, int] = {}  # of the values that this end has set or read in parts

    def set(self, key: str, value: bytes) -> None:
        """Store `value`."""
        self.store.set(_name(key), self._in_parts(key, value))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Store several values in one request."""
        self.store.multi_set([_name(key) for key in values], [self._in_parts(key, value) for key, value in values.items()])

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys` as soon as all are set.

        Polls, from 0.2 ms slowing down to 10 ms, or from a thousandth of `timeout_s` to a twentieth where that is longer:
        TCPStore's own wait blocks the connection for other threads, and prints a warning whenever it runs out.
        """
        names = [_name(key) for key in keys]
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = max(_FIRST_POLL_S, timeout_s / 1000), max(_LONGEST_POLL_S, timeout_s / 20)
        for first in range(0, len(names), _KEYS_AT_ONCE):
            awaited = names[first : first + _KEYS_AT_ONCE]
            while not self.store.check(awaited):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"not set within {timeout_s} s: one of {', '.join(awaited)}")
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, longest_s)
        return [self._whole(key, bytes(value)) for key, value in zip(keys, self.store.multi_get(names), strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return int(self.store.add(_name(key), amount))

    def check(self, key: str) -> bool:
        """Return whether `key` is set."""
        return bool(self.store.check([_name(key)]))

    def delete(self, key: str) -> None:
        """Delete `key`, if it is set."""
        self._forget_parts(key)
        with suppress(KeyError):
            self.store.delete_key(_name(key))

    def close(self) -> None:
        """Let go of the store, which ends if this end serves it: the traceback of a failure may hold this object for long."""
        self.store = None

    def _in_parts(self, key: str, value: bytes) -> bytes:
        """Return `value`, or store its parts and return a marker of them: the server handles one connection in order."""
        self._forget_parts(key)
        if len(value) <= _MOST_BYTES and not value.startswith(_IN_PARTS):
            return value
        parts = [value[start : start + _MOST_BYTES] for start in range(0, len(value), _MOST_BYTES)]
        for number, part in enumerate(parts):
            self.store.set(_part_name(key, number), part)
        self._num_parts[key] = len(parts)
        return _IN_PARTS + str(len(parts)).encode()

    def _whole(self, key: str, value: bytes) -> bytes:
        if not value.startswith(_IN_PARTS):
            return value
        num_parts = int(value[len(_IN_PARTS) :])
        self._num_parts[key] = num_parts
        parts = [_part_name(key, number) for number in range(num_parts)]
        if not self.store.check(parts):  # to wait for them would block the connection
            raise TimeoutError(f"{key} is being deleted")
        return b"".join(map(bytes, self.store.multi_get(parts)))

    def _forget_parts(self, key: str) -> None:
        for number in range(self._num_parts.pop(key, 0)):
            self.store.delete_key(_part_name(key, number))


def import_torch() -> None:
    """Import what `Rendezvous.serve` and `connect` need, which takes seconds: leader and ranks do so at the same time."""
    import torch.distributed  # noqa: F401, PLC0415 - see above


def _tcp_store(*args: Any, **options: Any) -> Any:
    import torch.distributed as dist  # noqa: PLC0415 - see import_torch

    store_type: Any = vars(dist)["TCPStore"]  # documented there, but torch's stubs do not export it
    return store_type(*args, **options)


def _name(key: str) -> str:
    return f"prefect-torch/{key}"


def _part_name(key: str, number: int) -> str:
    return f"prefect-torch part {number}/{key}"
