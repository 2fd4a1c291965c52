"""The definition of a training, the same for all of its attempts."""

from collections.abc import Container
from dataclasses import dataclass

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.reporting.decisions import DecisionMaker
from prefect_torch.tasks.gang.machine.working_dir import WorkingDirectory
from prefect_torch.tasks.options.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.user_code.function import PackedFunction


@dataclass(frozen=True, slots=True)
class TrainJob:
    """The training that `train_workers` leads: the user's configuration, and values derived from it.

    Attributes:
        function: The function that every rank runs.
        store: The run, opened once for all that its leader does: each client looks for a login, and connects, anew.
        initial_checkpoint: A checkpoint of another run to start from while this run has none.
        scaling: The ranks and their devices.
        run_config: How the run starts.
        checkpoint: Which checkpoints are kept, and how they are stored.
        failure: How often the training is restarted, and when it counts as failed.
        decisions: Decides at reports whether the training goes on; None if it always does.
        working_dir: The directory whose copy the ranks run in; None for the flow's own.
        ranks_at_once: How many ranks compute on this machine's CPUs at a time, if more than this training's own.
        restarted: The flow runs that this one restarts: a fresh start that one of them has made, or a takeover, is not made
            again. Only known where one of these is asked for.

    """

    function: PackedFunction
    store: CheckpointStore
    initial_checkpoint: CheckpointRef | None
    scaling: ScalingConfig
    run_config: RunConfig
    checkpoint: CheckpointConfig
    failure: FailureConfig
    decisions: DecisionMaker | None = None
    working_dir: WorkingDirectory | None = None
    ranks_at_once: int = 1
    restarted: Container[str | None] = ()

    @property
    def policy(self) -> RetentionPolicy:
        """Which checkpoints are kept."""
        return self.checkpoint.policy()

    @property
    def storage(self) -> StorageSpec:
        """The storage of the run, with its retry policy, as other processes open it."""
        return self.store.spec

    @property
    def run(self) -> str:
        """The run's name: the configured one, or one made from the flow run."""
        return self.store.name
