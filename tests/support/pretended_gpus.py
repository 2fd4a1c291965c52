"""GPUs that torch believes in, for real processes on any machine: torch loads this module by its entry point `torch.backends`.

A process has as many as the variable PRETENDED_GPUS says, of those that FAKEGPU_VISIBLE_DEVICES names. They are told apart and
have memory, of which the file PRETENDED_MEMORY may say how many GiB are free, or the error that asking for it raises.
`hold_tensors` lets them hold tensors, whose data the CPU has.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

NAME = "Pretended GPU"
TOTAL_BYTES = 80 << 30
EVENTS: list[str] = []
LIBRARIES: list[Any] = []  # registrations end with their objects


def register() -> None:
    """Be the accelerator of this process, if it is to have one."""
    if "PRETENDED_GPUS" not in os.environ:
        return
    import torch  # noqa: PLC0415 - it is being imported: it calls this last
    import torch.distributed as dist  # noqa: PLC0415 - same
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: PLC0415 - same

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return bool(visible())

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    _setup_privateuseone_for_python_backend("fakegpu", Module(), hook=Hooks())
    dist.Backend.backend_capability["gloo"].append("fakegpu")
    dist.Backend.default_device_backend_map["fakegpu"] = "gloo"


def visible() -> list[str]:
    chosen = os.environ.get("FAKEGPU_VISIBLE_DEVICES")
    return [str(index) for index in range(int(os.environ["PRETENDED_GPUS"]))] if chosen is None else chosen.split(",")


def uuid(name: str) -> str:
    return f"fake-{os.environ['PRETENDED_MACHINE']}-{name}"


def listed(_: Any = None) -> list[Any]:
    """Return what `list_gpus` returns, without torch."""
    from prefect_torch.tasks.gang.gpus.listing import Gpu  # noqa: PLC0415 - ranks, which import this module, never import prefect

    return [Gpu(uuid(name), NAME, "FAKEGPU_VISIBLE_DEVICES", name) for name in visible()]


@contextmanager
def pretended_machine(monkeypatch: Any, num_gpus: int) -> Iterator[str]:
    """Have this process and those that it starts see a machine with so many GPUs; yield its name.

    No other run of the tests has a machine of this name: the locks of GPUs are those of the real machine.
    """
    from prefect_torch.tasks.gang.gpus import locks  # noqa: PLC0415 - same

    name = uuid4().hex
    folders, of_its_gpus = locks._LOCKS, f"{locks._PREFIX}fake-{name}-*"  # a test may put others in their places
    monkeypatch.setenv("PRETENDED_GPUS", str(num_gpus))
    monkeypatch.setenv("PRETENDED_MACHINE", name)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    try:
        yield name
    finally:
        for folder in folders:
            for lock in folder.glob(of_its_gpus):
                lock.unlink()


class Module:
    """`torch.fakegpu`, as far as ranks use torch's module of a device."""

    _current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(visible())

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return len(visible())

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        EVENTS.append(f"set {device}")
        self._current = device.index

    def synchronize(self, device: Any = None) -> None:
        EVENTS.append(f"synchronized {device}")

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=uuid(visible()[index]), name=NAME)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        told = os.environ.get("PRETENDED_MEMORY")
        free = "80" if told is None else Path(told).read_text()
        if not free.isdigit():
            raise RuntimeError(f"CUDA error: {free}")
        return int(free) << 30, TOTAL_BYTES

    def memory_reserved(self) -> int:
        return 0


def hold_tensors() -> None:
    """Let `tensor.to("fakegpu")` and `tensor.cpu()` work in this process."""
    import torch  # noqa: PLC0415 - ranks import this module while torch is being imported
    from torch.utils._pytree import tree_map_only  # noqa: PLC0415 - same
    from torch.utils.weak import WeakIdKeyDictionary  # noqa: PLC0415 - same

    on_host = WeakIdKeyDictionary()

    def wrapped(data: Any) -> Any:
        tensor = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
        on_host[tensor] = data
        return tensor

    def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: on_host.get(tensor, tensor), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return tree_map_only(torch.Tensor, wrapped, operator(*args, **kwargs))

    def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
        on_host.get(target, target).copy_(on_host.get(source, source))
        return target

    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "detach"):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, partial(run, operator), "PrivateUse1")
    library.impl("_copy_from", copy, "PrivateUse1")
    LIBRARIES.append(library)
