"""The store of the process groups of ranks on several machines, which rank 0 serves."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, TcpKeyValue, connect, wait_for_key
from prefect_torch.tasks.rank.resources.open_files import allow_open_files
from prefect_torch.tasks.rank.spec import RankSpec

_PORT_KEY = "port of the process groups"
_LEFT_KEY = "left the process group"
_LATEST_S = 300.0  # until rank 0 has imported torch, on the slowest disk
_LONGEST_LEAVE_S = 10.0
_POLL_S = 0.02


class GroupStore:
    """One end of the store of the process groups, which rank 0 serves.

    It is not the leader's store: collectives must not depend on the leader, and MASTER_ADDR must be the machine of rank 0.

    Attributes:
        key_value: This rank's end.

    """

    def __init__(self, key_value: TcpKeyValue) -> None:
        self.key_value = key_value

    @classmethod
    def open(cls, spec: RankSpec) -> "GroupStore | None":
        """Serve the store on rank 0, connect to it on others, and set MASTER_PORT; return None where the leader serves it.

        Raises:
            TimeoutError: If rank 0 does not serve it in time.
            torch.distributed.DistNetworkError: If this machine does not reach that of the flow, or of rank 0.
            OSError: If rank 0's process may have too few files and sockets open for the connections of all ranks.

        """
        if spec.master_host is None:
            return None
        meeting = _reach(spec, spec.rendezvous, "the flow's machine", None)
        if spec.rank == 0:
            allow_open_files(spec.world_size, spec.world_size)
            served = Rendezvous(spec.master_host)
            key_value, port = served.serve(spec.timeout_s), served.address.port
            meeting.set(_PORT_KEY, str(port).encode())
        else:
            port = int(wait_for_key(meeting, _PORT_KEY, _LATEST_S))
            key_value = _reach(spec, Address(spec.master_host, port), "rank 0's machine", spec.timeout_s)
        os.environ["MASTER_PORT"] = str(port)
        return cls(key_value)

    def close(self, spec: RankSpec, meeting: TcpKeyValue) -> None:
        """Return once no rank needs the store any more; rank 0 waits for the others, for seconds at most."""
        left = meeting.add(_LEFT_KEY, 1)
        deadline_s = time.monotonic() + _LONGEST_LEAVE_S
        while spec.rank == 0 and left < spec.world_size and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            left = meeting.add(_LEFT_KEY, 0)


@contextmanager
def machines_named(spec: RankSpec) -> Iterator[None]:
    """Raise an error of torch's that has the address of another machine, which the rank does not reach, with both names."""
    import torch.distributed as dist  # noqa: PLC0415 - not before the rank has set its environment

    try:
        yield
    except RuntimeError as exc:
        others = (it for it in spec.machines.items() if it[1] != spec.node_name)
        for address, name in others:
            if re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.])", str(exc)):
                raise dist.DistNetworkError(_unreached(spec, f"machine {name}", address, exc)) from exc
        raise


def _reach(spec: RankSpec, address: Address, whose: str, timeout_s: float | None) -> TcpKeyValue:
    import torch.distributed as dist  # noqa: PLC0415 - not before the rank has set its environment

    try:
        return connect(address, timeout_s)
    except dist.DistNetworkError as exc:
        raise dist.DistNetworkError(_unreached(spec, whose, f"{address.host}, port {address.port}", exc)) from exc


def _unreached(spec: RankSpec, whose: str, where: str, exc: Exception) -> str:
    return (
        f"machine {spec.node_name} does not reach {whose} at {where}: the machines of a training connect to the flow's machine "
        f"and to each other on any port, which a firewall must let pass ({exc})"
    )
