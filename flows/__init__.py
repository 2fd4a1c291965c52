"""The flows `train`, `sweep`, `evaluate` and `prune`, their configurations and results."""

from prefect_torch.flows.sweeps.journal import JournalDamagedError
from prefect_torch.flows.sweeps.search import SweepFailedError
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import choice, grid, loguniform, randint, uniform
from prefect_torch.tasks import (
    CheckpointConfig,
    DaskCluster,
    FailureConfig,
    GpusBusyError,
    Hosts,
    KubernetesCluster,
    NotEnoughMachinesError,
    RankFailedError,
    RayCluster,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
    SyncConfig,
    TorchCluster,
)

from .async_training import atrain
from .evaluation import evaluate
from .planning import PlanLine, TrainingPlan, plan
from .pruning import prune
from .result import Result, TrainingFailedError
from .sweep_result import SweepResult, Trial
from .sweeping import sweep
from .training import train

__all__ = [
    "CheckpointConfig",
    "DaskCluster",
    "FailureConfig",
    "GpusBusyError",
    "Hosts",
    "JournalDamagedError",
    "KubernetesCluster",
    "NotEnoughMachinesError",
    "PlanLine",
    "RankFailedError",
    "RayCluster",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SearchConfig",
    "SlurmCluster",
    "SweepFailedError",
    "SweepResult",
    "SyncConfig",
    "TorchCluster",
    "TrainingFailedError",
    "TrainingPlan",
    "Trial",
    "atrain",
    "choice",
    "evaluate",
    "grid",
    "loguniform",
    "plan",
    "prune",
    "randint",
    "sweep",
    "train",
    "uniform",
]
