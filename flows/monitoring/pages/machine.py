"""The machine that leads a training, and how its ranks use their GPUs, sampled as often as pages are published."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prefect_torch.ckpt.text import show_count
from prefect_torch.tasks.gang.gpus.driver_programs import DriverHangsError, ask_driver
from prefect_torch.tasks.rank.resources.cpus import count_cpus
from prefect_torch.tasks.run_logs import get_run_logger

_QUERY = "index,uuid,name,utilization.gpu,memory.used,memory.total"
_LONGEST_S = 5.0  # a driver that hangs must not hold up the pages
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU at one time.

    Attributes:
        index: Its number on the machine.
        uuid: Its UUID, with the prefix "GPU-".
        name: Its name.
        utilization: The share of the last second in which a kernel ran, from 0 to 1; None if the driver does not know.
        used_bytes: The memory in use, by all processes; None if the driver does not know.
        total_bytes: Its memory; None if the driver does not know.

    """

    index: int
    uuid: str
    name: str
    utilization: float | None
    used_bytes: int | None
    total_bytes: int | None


@dataclass(slots=True)
class GpuUse:
    """The samples of one GPU.

    Attributes:
        newest: The newest sample.
        num: The number of samples with a utilization.
        sum_utilization: The sum of their utilizations.

    """

    newest: GpuSample
    num: int = 0
    sum_utilization: float = 0.0

    @property
    def mean_utilization(self) -> float | None:
        """The mean utilization of all samples; None without one."""
        return self.sum_utilization / self.num if self.num else None

    def add(self, sample: GpuSample) -> None:
        """Record a newer sample."""
        self.newest = sample
        if sample.utilization is not None:
            self.num += 1
            self.sum_utilization += sample.utilization


def read_gpus() -> list[GpuSample]:
    """Return a sample of every GPU that NVIDIA's driver shows on this machine; none without `nvidia-smi`.

    Raises:
        subprocess.TimeoutExpired: If the driver does not answer for five seconds.

    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        listed = ask_driver(command, _LONGEST_S)
    except OSError:
        return []
    return [sample for line in listed.stdout.splitlines() if (sample := parse_sample(line)) is not None]


def parse_sample(line: str) -> GpuSample | None:
    """Return the sample in a line of `nvidia-smi`, with "[N/A]" for unknown values; None for any other line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_QUERY.split(",")) or not fields[0].isdecimal():
        return None
    share, used, total = (float(field) if field.replace(".", "", 1).isdecimal() else None for field in fields[3:])
    return GpuSample(
        index=int(fields[0]),
        uuid=fields[1],
        name=fields[2],
        utilization=None if share is None else share / 100,
        used_bytes=None if used is None else int(used * _MIB),
        total_bytes=None if total is None else int(total * _MIB),
    )


class GpuMonitor:
    """Samples the GPUs that the ranks of this machine use, as long as the driver answers.

    Args:
        uuids: Returns the UUIDs of these GPUs, with the prefix "GPU-" or without.
        read: Returns a sample of every GPU of the machine.

    """

    def __init__(self, uuids: Callable[[], Collection[str]], read: Callable[[], Sequence[GpuSample]] = read_gpus) -> None:
        self._uuids = uuids
        self._read = read
        self._uses: dict[str, GpuUse] = {}
        self._hangs = False

    def sample(self) -> None:
        """Sample the GPUs; costs nothing while ranks have no GPU, else a process that runs for a tenth of a second."""
        wanted = {uuid.removeprefix("GPU-") for uuid in self._uuids()}
        if not wanted or self._hangs:
            return
        try:
            samples = self._read()
        except DriverHangsError:  # each further call might leave one more process that cannot be ended
            self._hangs = True
            get_run_logger().warning("the driver of the GPUs hangs: their use is not shown from now on; try nvidia-smi")
            return
        except subprocess.TimeoutExpired:  # the machine is under load; the next sample may succeed
            return
        for sample in samples:
            if sample.uuid.removeprefix("GPU-") in wanted:
                self._uses.setdefault(sample.uuid, GpuUse(sample)).add(sample)

    @property
    def uses(self) -> list[GpuUse]:
        """The GPUs that were sampled, by number."""
        return sorted(self._uses.values(), key=lambda use: use.newest.index)


def describe_machine() -> str:
    """Return this machine's processors, system and versions in one line."""
    parts = [show_count(count_cpus(), "CPU"), f"{platform.system()} {platform.machine()}"]
    return ", ".join([*parts, f"Python {platform.python_version()}", f"torch {_torch_version()}", f"process {os.getpid()}"])


@cache
def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"
