"""The program that describes a machine as its ranks would find it; its last argument is the number of the pipe for the report.

It reads a pickled InspectionOrder from stdin, and first prints the time. It imports torch, never prefect.
"""

import os
import pickle
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.parallel import for_each

from .plain_result import encode_result
from .rendezvous import Address
from .spec import RankResult

CLOCK = "prefect-torch clock"
_CONNECT_S = 10.0
_MOST_AT_ONCE = 64
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - this very directory


@dataclass(frozen=True, slots=True)
class InspectionOrder:
    """The checks that a machine is asked to make.

    Attributes:
        leader: Where the leader listens, as it would for the store of the ranks.
        storage: The storage of trainings; None if it is not checked.
        key: The key of an object that the leader has stored there.
        machines: Where the other machines listen, by their names.

    """

    leader: Address
    storage: StorageSpec | None
    key: str
    machines: Mapping[str, Address] = field(default_factory=dict)


def main() -> None:
    """Write the report into the pipe."""
    print(f"{CLOCK} {time.time()!r}", flush=True)  # noqa: T201 - the leader reads it as it comes
    result_fd = int(sys.argv[-1])
    order: InspectionOrder = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the agent, which has it from the leader
    reached = {"leader": _reach(order.leader), "machines": _unreached(order.machines)}
    report = {**_devices(), "shared_memory": _shared_memory(), **reached, "storage": _look(order)}
    with os.fdopen(result_fd, "wb") as pipe:
        pipe.write(encode_result(RankResult(return_value=pickle.dumps(report))))
    os._exit(0)


def _devices() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the time is printed

    from .resources.device import gpu_type  # noqa: PLC0415 - imports torch

    kind = gpu_type()
    module: Any = None if kind is None else torch.get_device_module(kind)
    names = [] if module is None else [module.get_device_properties(index).name for index in range(module.device_count())]
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    version: Any = vars(torch.cuda)["nccl"].version if has_nccl else None  # torch's stubs do not export it
    nccl = None if version is None else ".".join(map(str, version()))
    return {"gpus": names, "nccl": nccl}


def _shared_memory() -> int | None:
    """Return how many bytes are free in /dev/shm; None if it does not exist."""
    return shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else None  # noqa: PTH112 - a constant


def _reach(address: Address) -> str | None:
    """Return why an address is out of reach; None if it is not."""
    try:
        socket.create_connection((address.host, address.port), _CONNECT_S).close()
    except OSError as exc:
        return f"{address.host}:{address.port}: {exc}"
    return None


def _unreached(machines: Mapping[str, Address]) -> dict[str, str]:
    """Return why machines are out of reach, by their names; machines in reach are left out."""
    reasons = for_each(machines.values(), _reach, _MOST_AT_ONCE)
    return {name: reason for name, reason in zip(machines, reasons, strict=True) if reason is not None}


def _look(order: InspectionOrder) -> str | None:
    """Return why the leader's object cannot be read in the storage; None if it can, or no storage is checked."""
    if order.storage is None:
        return None
    try:
        open_storage(order.storage).get_bytes(order.key)
    except FileNotFoundError:
        return f"{order.storage.url} is another storage here: the object that the leader has just written is not in it"
    except Exception as exc:  # noqa: BLE001 - any error is reported
        return f"{type(exc).__name__}: {exc}"
    return None


if __name__ == "__main__":
    main()
