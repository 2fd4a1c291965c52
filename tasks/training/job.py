"""The definition of a training, the same for all of its attempts."""

from dataclasses import dataclass
from typing import Literal

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.verification import VerifyLevel
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.function import PackedFunction


@dataclass(frozen=True, slots=True)
class TrainJob:
    """The training that `train_workers` leads.

    Attributes:
        function: The function that every rank runs.
        storage: The storage of the run.
        run: The run's name.
        num_workers: How many ranks.
        use_gpu: Whether each has a GPU.
        backend: The backend of the process group; None for nccl with GPUs and gloo without.
        policy: Which checkpoints are kept.
        resume: Whether to continue the run's latest checkpoint.
        verify: How a checkpoint is verified before the training resumes from it.
        takeover: Whether to take the run from an owner that is alive.
        initial_checkpoint: A checkpoint of another run to start from while this run has none.
        max_failures: Restarts after exceptions of the function; -1 for unlimited.
        max_infrastructure_failures: Restarts after lost processes, storage or network; -1 for unlimited.
        max_preemptions: Restarts after processes were terminated; -1 for unlimited.
        reports: The settings of reports.
        grace_s: How long ranks may still commit once termination is requested.
        hang_timeout_s: The longest time without a report; None for unlimited.
        max_out_of_memory_failures: Restarts after memory ran out; -1 for unlimited.
        timeout_s: How long ranks wait for each other in a collective, and when they form a group; None for torch's own limits.

    """

    function: PackedFunction
    storage: StorageSpec
    run: str
    num_workers: int
    use_gpu: bool
    backend: str | None
    policy: RetentionPolicy
    resume: Literal["auto", "never", "must"]
    verify: VerifyLevel
    takeover: bool
    initial_checkpoint: CheckpointRef | None
    max_failures: int
    max_infrastructure_failures: int
    max_preemptions: int
    reports: ReportSettings
    grace_s: float
    hang_timeout_s: float | None
    max_out_of_memory_failures: int = 0
    timeout_s: float | None = None

    def open_store(self) -> CheckpointStore:
        """Return the store of the run."""
        return CheckpointStore.open(self.storage, self.run)
