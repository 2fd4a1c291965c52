"""The flows `train`, `evaluate` and `prune`, their configurations and results."""

from prefect_torch.tasks import (
    CheckpointConfig,
    FailureConfig,
    GpusBusyError,
    Hosts,
    NotEnoughMachinesError,
    RankFailedError,
    RunConfig,
    ScalingConfig,
)

from .evaluation import evaluate
from .pruning import prune
from .result import Result, TrainingFailedError
from .training import train

__all__ = [
    "CheckpointConfig",
    "FailureConfig",
    "GpusBusyError",
    "Hosts",
    "NotEnoughMachinesError",
    "RankFailedError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainingFailedError",
    "evaluate",
    "prune",
    "train",
]
