"""One training as its leader sees it, the same for all its attempts."""

from dataclasses import dataclass
from typing import Literal

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.session import ReportSettings
from prefect_torch.ckpt.store import VerifyLevel
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.function import PackedFunction


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What `train_workers` leads.

    Attributes:
        function: What every rank runs.
        storage: Where the run lies.
        run: The run's name.
        num_workers: How many ranks.
        use_gpu: Whether each has a GPU.
        backend: The process group's, or None for the usual one.
        policy: Which checkpoints are kept.
        resume: Whether to continue the run's latest checkpoint.
        verify: How a checkpoint is proven whole before it is resumed from.
        takeover: Whether to take the run from a living owner.
        seed: A checkpoint of another run to begin from while this run has none.
        max_failures: Restarts after the user's exceptions; -1 without end.
        max_infrastructure_failures: Restarts after lost processes and storage; -1 without end.
        max_preemptions: Restarts after processes were ended from outside; -1 without end.
        reports: How the training checkpoints.
        grace_s: How long ranks may still commit when the flow run is ended.
        hang_timeout_s: How long no report may come; None for ever.
        max_out_of_memory_failures: Restarts after memory ran out; -1 unlimited.

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
    seed: CheckpointRef | None
    max_failures: int
    max_infrastructure_failures: int
    max_preemptions: int
    reports: ReportSettings
    grace_s: float
    hang_timeout_s: float | None
    max_out_of_memory_failures: int = 0

    def open_store(self) -> CheckpointStore:
        """Open the run."""
        return CheckpointStore.open(self.storage, self.run)
