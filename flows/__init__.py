"""The flows `train`, `evaluate` and `prune`, their configurations and results."""

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
)

from .evaluation import evaluate
from .pruning import prune
from .result import Result, TrainingFailedError
from .training import train

__all__ = [
    "CheckpointConfig",
    "DaskCluster",
    "FailureConfig",
    "GpusBusyError",
    "Hosts",
    "KubernetesCluster",
    "NotEnoughMachinesError",
    "RankFailedError",
    "RayCluster",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SlurmCluster",
    "TrainingFailedError",
    "evaluate",
    "prune",
    "train",
]
