"""Flows that train with restarts and evaluate what was trained, and what they are told and give back."""

from prefect_torch.tasks import CheckpointConfig, FailureConfig, RankFailedError, RunConfig, ScalingConfig

from .evaluation import evaluate
from .pruning import prune
from .result import Result, TrainingFailedError
from .training import train

__all__ = [
    "CheckpointConfig",
    "FailureConfig",
    "RankFailedError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainingFailedError",
    "evaluate",
    "prune",
    "train",
]
