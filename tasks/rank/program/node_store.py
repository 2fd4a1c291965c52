"""The store that the ranks of one machine share, beside that of all ranks, when a training has several machines."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue, MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.node import Node
from prefect_torch.tasks.rank.rendezvous import LONGEST_IMPORT_S, Address, Rendezvous, TcpKeyValue, connect, wait_for_key
from prefect_torch.tasks.rank.spec import RankSpec

T = TypeVar("T")


def open_node(spec: RankSpec, of_all: TcpKeyValue) -> Node | None:
    """Return the machine of a rank; None where each rank sends its own messages.

    Its first rank serves the store, which only this machine reaches, once it has imported the training function. The others
    wait for that as long as for each other in a group.

    Args:
        spec: The rank.
        of_all: The store of all ranks, where the first rank publishes its port.

    Raises:
        TimeoutError: If the first rank does not serve it in time.

    """
    if not spec.has_node_store:
        return None
    first = spec.rank - spec.local_rank
    ranks = range(first, first + spec.local_world_size)
    return Node(_open_store(spec, of_all), spec.node_rank, spec.num_nodes, ranks)


def _open_store(spec: RankSpec, of_all: TcpKeyValue) -> KeyValue:
    if spec.local_world_size == 1:
        return MemoryKeyValue()
    key = f"port of node {spec.node_rank}"
    if spec.local_rank == 0:
        served = Rendezvous()
        key_value, port = served.serve(), served.address.port
        of_all.set(key, str(port).encode())
    else:
        port = int(wait_for_key(of_all, key, LONGEST_IMPORT_S if spec.timeout_s is None else spec.timeout_s))
        key_value = connect(Address("127.0.0.1", port))
    return NodeKeyValue(key_value)


class NodeKeyValue:
    """A TcpKeyValue whose server may die, with the rank that serves it; then all methods raise ConnectionError."""

    def __init__(self, key_value: TcpKeyValue) -> None:
        self._key_value = key_value

    def set(self, key: str, value: bytes) -> None:
        """Store `value`."""
        _try(lambda: self._key_value.set(key, value))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Store several values."""
        _try(lambda: self._key_value.set_all(values))

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys` as soon as all are set."""
        return _try(lambda: self._key_value.get(keys, timeout_s))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return _try(lambda: self._key_value.add(key, amount))

    def check(self, key: str) -> bool:
        """Return whether `key` is set."""
        return _try(lambda: self._key_value.check(key))

    def delete(self, key: str) -> None:
        """Delete `key`, if it is set."""
        _try(lambda: self._key_value.delete(key))


def _try(request: Callable[[], T]) -> T:
    import torch.distributed as dist  # noqa: PLC0415 - not before the rank has set its environment

    try:
        return request()
    except dist.DistError as exc:
        raise ConnectionError(f"the store of this machine's ranks is gone: {exc}") from exc
