"""The input and the result of a rank's process; plain data that pickles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.verification import VerifyLevel
from prefect_torch.tasks.rank.user_code.function import PackedFunction
from prefect_torch.tasks.rank.user_code.working_dir import StoredDirectory

from .checkpoint_ref import CheckpointRef
from .errors import RankFailureKind
from .rendezvous import Address

MOST_TASK_RUNS = 64  # ranks of which each has a task run
MOST_SENDERS = 256  # ranks of which each sends its own messages: up to here, that is as quick (tests/benchmarks/agreement.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank of one attempt.

    Attributes:
        rank: Its number.
        local_rank: Its number on its machine, and that of its device.
        node_rank: The number of its machine.
        world_size: The number of ranks.
        local_world_size: The number of ranks on its machine.
        rendezvous: The address of the key-value store that the ranks share.
        storage: The storage of the run.
        run: The run's name.
        attempt: The attempt's number; of an evaluation, that of the checkpoint.
        restored: The checkpoint that the attempt resumes from, or None; of an evaluation, the one that is evaluated.
        verify: How the files of that checkpoint are verified where they are read in place.
        function: The function to run.
        use_gpu: Whether it has a GPU.
        backend: The backend of the process group; None for that of the GPU's type, such as nccl, and gloo without one.
        timeout_s: How long ranks wait for each other in a collective, and when they form a group; None for torch's own limits.
        visible_gpus: The variables that make the training's GPUs, and no others, visible to each rank.
        gpu_locks: The descriptors of their locks in the process that starts the ranks, one for each local rank.
        records_collectives: Whether NCCL keeps a record of the rank's last collectives, for a training that hangs.
        reports: The settings of reports.
        flush_s: How long a rank that fails waits for its background commit.
        evaluates: Whether it evaluates a checkpoint instead of training.
        num_nodes: The number of machines.
        has_node_store: Whether the ranks of a machine share a store, in which their messages to the others are aggregated.
        master_host: The address of rank 0's machine, where rank 0 serves the store of the process groups; None on one machine,
            where that is the rendezvous.
        node_name: The name of its machine in messages; None on one machine.
        machines: The names of all machines by their addresses; empty on one machine.
        working_dir: The directory in whose copy it runs; None for that of the flow's process.
        ranks_at_once: How many ranks of its gang and others compute on the CPUs of its machine at a time, if more than its own.

    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int
    local_world_size: int
    rendezvous: Address
    storage: StorageSpec
    run: str
    attempt: int
    restored: CheckpointRef | None
    function: PackedFunction
    use_gpu: bool
    backend: str | None
    timeout_s: float | None = None
    visible_gpus: Mapping[str, str] = field(default_factory=dict)
    gpu_locks: tuple[int, ...] = ()
    records_collectives: bool = False
    reports: ReportSettings = field(default_factory=ReportSettings)
    flush_s: float = 0.0
    evaluates: bool = False
    num_nodes: int = 1
    master_host: str | None = None
    has_node_store: bool = False
    node_name: str | None = None
    machines: Mapping[str, str] = field(default_factory=dict)
    working_dir: StoredDirectory | None = None
    ranks_at_once: int = 1
    verify: VerifyLevel = "digest"

    @property
    def group(self) -> str:
        """The name of the attempt or the evaluation in messages."""
        if self.evaluates and self.restored is not None:
            return f"the evaluation of {self.restored.checkpoint_id}"
        return f"attempt {self.attempt}"

    @property
    def storages(self) -> tuple[StorageSpec, ...]:
        """The storages that it reads: of the run, and of the checkpoint that is restored."""
        return (self.storage,) if self.restored is None else (self.storage, self.restored.storage)

    @property
    def resumes(self) -> bool:
        """Whether it restores a checkpoint of its own run, which ranks of an earlier attempt have committed."""
        ref = self.restored
        return ref is not None and not self.evaluates and (ref.storage, ref.run) == (self.storage, self.run)

    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun would set, and those that choose the rank's GPUs.

        Left out are TORCHELASTIC_RUN_ID, by which libraries know torchrun, TORCHELASTIC_MAX_RESTARTS and _ERROR_FILE, which
        mean nothing elsewhere, and TORCH_NCCL_ASYNC_ERROR_HANDLING, for which torch's own default is newer than torchrun's.
        """
        return {
            **self.visible_gpus,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "NODE_RANK": str(self.node_rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt - 1),
            "MASTER_ADDR": self.master_host or self.rendezvous.host,
            "MASTER_PORT": str(self.rendezvous.port),  # replaced once rank 0's own store listens
            # The store is served already, so rank 0 must not try to (torch.distributed.rendezvous).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a rank ended, as its process reports it to the task that supervises it.

    Attributes:
        return_value: What its function returned, pickled; None if it failed, or if the value cannot be pickled.
        kind: How it failed; None if it did not.
        error: The error in one line.
        traceback: The traceback of the error, in the rank.
        exception: The exception, pickled; None where it cannot be.
        was_killed: Whether SIGKILL ended its process.

    """

    return_value: bytes | None = None
    kind: RankFailureKind | None = None
    error: str = ""
    traceback: str = ""
    exception: bytes | None = None
    was_killed: bool = False


def on_machines(first: RankSpec, num_ranks: Sequence[int], names: Sequence[str] = ()) -> list[RankSpec]:
    """Return all ranks of the group whose rank 0 is `first`; neighbours share a machine.

    The messages of a machine's ranks are aggregated where that is quicker: among many ranks, of which some share a machine.

    Args:
        first: The first rank; the numbers that depend on the machines are set here.
        num_ranks: How many ranks each machine has.
        names: The names of the machines; empty for this one.

    """
    places = [(node, local) for node, count in enumerate(num_ranks) for local in range(count)]
    has_node_store = len(places) > MOST_SENDERS and 1 < len(num_ranks) < len(places)
    return [
        replace(
            first,
            rank=rank,
            local_rank=local,
            node_rank=node,
            world_size=len(places),
            local_world_size=num_ranks[node],
            num_nodes=len(num_ranks),
            has_node_store=has_node_store,
            node_name=names[node] if names else None,
        )
        for rank, (node, local) in enumerate(places)
    ]
