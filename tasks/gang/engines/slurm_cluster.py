"""The machines of a Slurm cluster."""

import math
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Literal

from prefect_torch.ckpt.text import show_count
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.run_logs import get_run_logger
from pydantic import Field

from .agent_process import AGENT
from .cluster import Agents, Cluster, MachineRequest

_JOB_NAME = "--job-name="
_EXCLUDE, _EXCLUDE_SHORTLY = "--exclude=", "-x"
_CLUSTERS, _CLUSTERS_SHORTLY = ("--clusters", "--cluster"), "-M"
_END_S = 3.0  # longer than the agents, srun and its allocation take to end
_POLL_S = 0.5
_ANSWER_S = 30.0
_QUEUE_S = 86400.0
_ENDS_BY_ITSELF = {"", "COMPLETING"}
# srun reads these as options: the layout of tasks in the job, or in the step that the flow runs in. With it, there
# would not be one agent for each machine, or each would get one task's share of the CPUs and GPUs. And without one of the job's
# machines, there are fewer GPUs than the job's total (SLURM_GPUS).
_LAYOUT_OF_TASKS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK",
    "SLURM_GPUS", "SLURM_GPU_BIND", "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST",
)  # fmt: skip
# Without --ntasks-per-node, --cpus-per-task makes srun start as many tasks on a machine as there are CPUs for.
_ONCE_PER_MACHINE = ("sh", "-c", '[ "$SLURM_LOCALID" != 0 ] || exec "$@"', "agent")


class SlurmCluster(Cluster):
    """The machines of a Slurm allocation, on each of which one srun starts an agent.

    In a job (sbatch, salloc), these are the machines of the job; elsewhere, srun waits for an allocation of its own.
    """

    # Slurm's task numbers are those of agents, which Lightning would take for those of its ranks.
    not_for_ranks: ClassVar[tuple[str, ...]] = (
        "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NAME",
        "SLURM_CPU_BIND", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
    )  # fmt: skip
    waits_itself: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"
    partition: str | None = Field(default=None, title="Partition", description="Slurm's default partition when empty.")
    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        title="Ranks per node",
        description="For how many ranks a machine has room. When empty, its GPUs per node, or one.",
    )
    gpus_per_node: int | None = Field(default=None, ge=1, title="GPUs per node", description="The GPUs of each machine.")
    srun_arguments: list[str] = Field(
        default=[], title="Arguments of srun", description="More arguments of srun, such as --time=2:00:00."
    )
    python: str | None = Field(
        default=None, title="Python", description="The interpreter on the machines. The path of the flow's own when empty."
    )

    @property
    def longest_wait_s(self) -> float:
        """How long to wait for the machines of one request, by default a day in Slurm's queue."""
        return _QUEUE_S if self.wait_s is None and _own_job() is None else self.asks_for_s

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Start one agent on each machine by one srun, which waits for the allocation."""
        slots = self.ranks_per_node or self.gpus_per_node or 1
        own_job = _own_job()
        excluded, others = _without_exclusions(self.srun_arguments)
        excluded += sorted(wanted.avoid)
        nodes = _nodes(wanted, slots) if own_job is None else _nodes_of_job(wanted, slots, own_job, excluded)
        program = [*_ONCE_PER_MACHINE, self.python or sys.executable, "-m", AGENT, *agents.arguments(slots=slots)]
        name = None if own_job is not None else self._job_name()
        without_layout = ["env", *(f"--unset={variable}" for variable in _LAYOUT_OF_TASKS)]
        command = shlex.join([*without_layout, *self._srun(nodes, excluded, others, name), *program])
        job = [] if name is None else [f"--name={name}", *_clusters(self.srun_arguments)]
        agents.run(_watched(command, job, os.getpid()) if job else command, ["Slurm"])
        try:
            yield
        finally:
            if job:
                _end_allocation(job)

    def _job_name(self) -> str:
        """Return a name that no other job has, by which the allocation can be cancelled."""
        given = [argument.removeprefix(_JOB_NAME) for argument in self.srun_arguments if argument.startswith(_JOB_NAME)]
        return f"{[*given, 'prefect-torch'][0]}-{secrets.token_hex(4)}"

    def _srun(self, nodes: str, excluded: list[str], others: list[str], name: str | None) -> list[str]:
        in_job = name is None
        return [
            "srun",
            f"--nodes={nodes}",
            # Of a range of machines, srun would then use the fewest, whatever it has got.
            *(["--ntasks-per-node=1"] if nodes.isdecimal() else []),
            "--cpu-bind=none",  # an agent's ranks must not be bound to the CPUs of one task
            "--kill-on-bad-exit=0",  # the leader, not Slurm, ends the attempt after the loss of a machine
            "--wait=0",
            "--no-kill",
            *(["--overlap"] if in_job else []),  # beside the step that the flow runs in
            *([f"{_EXCLUDE}{','.join(excluded)}"] if excluded else []),  # once: of several, only the last counts for srun
            *([f"--partition={self.partition}"] if self.partition and not in_job else []),
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *others,
            *([] if name is None else [f"{_JOB_NAME}{name}"]),
        ]


def _without_exclusions(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return which machines arguments of srun exclude, and the other arguments.

    A file of machines stays among these: srun takes what has a "/" for the name of a file, alone.
    """
    excluded, others = [], []
    following = iter(arguments)
    for argument in following:
        if argument in (_EXCLUDE.removesuffix("="), _EXCLUDE_SHORTLY):
            machines = next(following, "")
        elif argument.startswith((_EXCLUDE, _EXCLUDE_SHORTLY)):
            machines = argument.removeprefix(_EXCLUDE).removeprefix(_EXCLUDE_SHORTLY)
        else:
            others.append(argument)
            continue
        if "/" in machines:
            others.append(f"{_EXCLUDE}{machines}")
        else:
            excluded.append(machines)
    return excluded, others


def _clusters(arguments: list[str]) -> list[str]:
    """Return the option that has squeue and scancel look at the clusters which arguments of srun name; none without such."""
    clusters = None
    following = iter(arguments)
    for argument in following:
        name, _, value = argument.partition("=")
        if name in _CLUSTERS:
            clusters = value or next(following, "")
        elif argument.startswith(_CLUSTERS_SHORTLY):
            clusters = argument.removeprefix(_CLUSTERS_SHORTLY) or next(following, "")
    return [] if clusters is None else [f"{_CLUSTERS[0]}={clusters}"]


def _watched(command: str, job: list[str], leader: int) -> str:
    """Return `command` beside a watch that cancels its allocation if the leader is killed, and otherwise ends with the command.

    srun releases the allocation only once all agents have ended, and the agent of a lost machine never does. The guard of the
    command kills tail(1) first, as it would kill any program but scancel, to which it gives a moment; so the shell itself looks
    whether the leader lives. A killed process stays in /proc until its parent waits for it.
    """
    watch = (
        f"tail --pid={leader} -f /dev/null; "
        f'while read -r key state _; do [ "$key" = State: ] && break; done </proc/{leader}/status; '
        f"case $state in ''|Z|X) scancel {shlex.join(job)};; esac"
    )
    return f"{shlex.join(['sh', '-c', watch])} </dev/null >/dev/null 2>&1 & exec {command}"


def _end_allocation(job: list[str]) -> None:
    """Cancel the allocation of an srun, which the options `job` select, unless it ends with the agents.

    Slurm keeps it after srun was killed: a pending allocation stays in the queue, and one with a lost machine holds the other
    machines until that machine returns.
    """
    try:
        if not _ends_by_itself(job):
            _cancel(job)
    except (OSError, subprocess.SubprocessError) as exc:
        said = getattr(exc, "stderr", None) or exc
        get_run_logger().warning("a job may be left in Slurm, end it by scancel %s: %s", shlex.join(job), said)


def _ends_by_itself(job: list[str]) -> bool:
    """Return whether the allocation has ended or is about to; False if Slurm does not say, as while its controller restarts."""
    ends_s = time.monotonic() + _END_S
    while True:
        with suppress(subprocess.SubprocessError):
            lines = _run("squeue", "--noheader", *job, "--format=%T").splitlines()
            # Of clusters that are named, squeue says the names, whatever --noheader says.
            state = next((line for line in lines if line and not line.startswith("CLUSTER: ")), "")
            if state in {*_ENDS_BY_ITSELF, "PENDING"}:
                return state != "PENDING"
        if time.monotonic() > ends_s:
            return False
        time.sleep(_POLL_S)


def _cancel(job: list[str]) -> None:
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed  # noqa: PLC0415 - rarely needed

    is_temporary = retry_if_exception_type(subprocess.SubprocessError)
    retrying = Retrying(retry=is_temporary, stop=stop_after_delay(_ANSWER_S), wait=wait_fixed(_POLL_S), reraise=True)
    retrying(_run, "scancel", *job)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_ANSWER_S).stdout.strip()


def _own_job() -> str | None:
    """Return the number of the job in which this process runs, as srun looks for it; None outside of a job."""
    return os.environ.get("SLURM_JOB_ID")


def _nodes(wanted: MachineRequest, slots: int) -> str:
    """Return how many machines srun is to wait for."""
    fewest, most = math.ceil(wanted.fewest / slots), math.ceil(wanted.most / slots)
    return f"{fewest}-{most}" if fewest < most else str(most)


def _nodes_of_job(wanted: MachineRequest, slots: int, job: str, excluded: list[str]) -> str:
    """Return how many of the job's machines srun is to use: exactly, since it starts no agent at all on fewer.

    A range would crash slurmctld 22.05, together with a number of tasks for each machine.
    """
    try:
        machines = _machines_of(job)
        left = machines - _named(",".join(excluded))
    except (OSError, subprocess.SubprocessError) as exc:  # as while its controller restarts
        said = getattr(exc, "stderr", None) or exc
        raise NotEnoughMachinesError(f"Slurm does not say which machines job {job} has: {said}") from exc
    if len(left) < math.ceil(wanted.fewest / slots):
        raise NotEnoughMachinesError(
            f"{show_count(wanted.fewest, 'rank')} wanted, the cluster has room for {len(left) * slots}: the Slurm job {job} "
            f"has {show_count(len(machines), 'machine')}, {len(machines - left)} of them lost or excluded; give "
            "num_workers=(fewest, most), or the job more machines"
        )
    return str(min(math.ceil(wanted.most / slots), len(left)))


def _machines_of(job: str) -> set[str]:
    """Return the names of the machines that a job has now, without those that have failed."""
    rows = map(str.split, _run("squeue", "--noheader", f"--jobs={job}", "--format=%A %N").splitlines())
    return _named(next((row[1] for row in rows if len(row) > 1 and row[0] == job), ""))  # all jobs of an array are listed


def _named(machines: str) -> set[str]:
    """Return the names in a list of machines as Slurm writes it, such as "n[0-2],m1"."""
    return set(_run("scontrol", "show", "hostnames", machines).split()) if machines else set()
