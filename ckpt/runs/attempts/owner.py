"""The process that leads an attempt, and whether it is gone."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prefect_torch.ckpt.runs.records.fields import Count, Within
from prefect_torch.ckpt.text import printable


@dataclass(frozen=True, slots=True)
class SlurmStart:
    """One start of a Slurm job, which Slurm starts again when it is requeued, as after the failure of one of its machines.

    Attributes:
        job: The cluster and the number of the job, which all of its starts have.
        num_before: How many starts came before this one. Slurm has given up each of them, and killed what it could reach of it.

    """

    job: str
    num_before: Count

    @classmethod
    def current(cls) -> "SlurmStart | None":
        """Describe the start that this process is part of; None outside of a job."""
        number = os.environ.get("SLURM_JOB_ID")
        if number is None:
            return None
        job = f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{number}"
        return cls(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def is_before(self, other: "SlurmStart | None") -> bool:
        """Return whether `other` is a later start of the same job."""
        return other is not None and self.job == other.job and self.num_before < other.num_before


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that leads an attempt, with enough detail to check later whether it is alive.

    Attributes:
        flow_run_id: The Prefect flow run, or None outside one.
        host: The machine's name, its boot, and the pid namespace, outside of which a pid means nothing: two containers may
            have the same name and boot. Outside of Linux only the name; version 0.1 wrote no namespace.
        pid: The process id.
        started: The process's start in kernel ticks, so that a reused pid is not mistaken for it; None outside of Linux.
        budget: The budgets of the flow run that its failures count against: None for the initial ones, else the Prefect
            state in which the flow run had ended when it was run again.
        slurm_start: The start of a Slurm job that the process is part of; None outside of a job.

    """

    flow_run_id: str | None
    host: str
    pid: Annotated[int, Within(1, 2**31 - 1)]  # the range of os.kill
    started: Count | None
    budget: str | None = None
    slurm_start: SlurmStart | None = None

    @classmethod
    def current(cls, flow_run_id: str | None = None, budget: str | None = None) -> "Owner":
        """Describe this process."""
        try:
            started = _start_ticks(os.getpid())
        except OSError:
            started = None
        return cls(flow_run_id, _host(), os.getpid(), started, budget, SlurmStart.current())

    def is_same_process(self, other: "Owner") -> bool:
        """Return whether `other` describes the same process."""
        return (self.host, self.pid, self.started) == (other.host, other.pid, other.started)

    def is_earlier_process_of(self, other: "Owner") -> bool:
        """Return whether this is another process of the same flow run, whose failures count against the same budgets."""
        is_of_same_flow_run = (self.flow_run_id, self.budget) == (other.flow_run_id, other.budget)
        return is_of_same_flow_run and self != other

    @property
    def machine(self) -> str:
        """The machine's name, for a message."""
        return printable(self.host.partition("/")[0])

    def is_process_gone(self) -> bool | None:
        """Return whether the process is gone; None if that cannot be known here.

        On another machine and in another container, where its pid means nothing, it is known only of a process in an earlier
        start of the Slurm job that this one is part of.
        """
        here = _host()
        if self.host not in (here, here.rpartition("/")[0]):
            is_given_up = self.slurm_start is not None and self.slurm_start.is_before(SlurmStart.current())
            return True if is_given_up else None
        try:
            started = _start_ticks(self.pid)
        except OSError:  # there is no such process, or no /proc, or it hides the processes of other users
            return not _exists(self.pid)
        return started is None or self.started not in (None, started)


def _host() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    named = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    return f"{named}/{namespace.stat().st_ino}" if namespace.exists() else named


def _exists(pid: int) -> bool:
    """Return whether a process of any user has the id `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _start_ticks(pid: int) -> int | None:
    """Return when a process started; None if it has ended, and only waits for its parent.

    Raises:
        OSError: If the kernel does not answer.

    """
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The second field is the command in parentheses and may hold any bytes, such as half a character; the start is the 22nd
    # (proc_pid_stat(5)).
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state == b"Z" else int(fields[18])
