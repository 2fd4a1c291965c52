"""Multi-GPU PyTorch training in Prefect flows.

`from prefect_torch import report, train, Checkpoint` works for every name below; `prefect_torch.ckpt`, `.flows`, `.tasks` and
`.deployments` have these and the rest. Importing this package imports neither prefect nor torch: a name is imported from its
folder when it is used, so that a rank that takes `report` from here does not wait seconds for prefect.
"""

import sys
from typing import TYPE_CHECKING

from .lazy_names import lazy_names
from .moved_modules import MovedModules

if TYPE_CHECKING:
    from prefect_torch.ckpt import (
        Checkpoint,
        CheckpointStore,
        RandomState,
        RankLocal,
        TrainContext,
        checkpoint_directory,
        get_checkpoint,
        get_context,
        log_metrics,
        report,
    )
    from prefect_torch.ckpt.blocks import CheckpointStorage
    from prefect_torch.deployments import deploy, make_deployment, serve
    from prefect_torch.flows import (
        CheckpointConfig,
        FailureConfig,
        Result,
        RunConfig,
        ScalingConfig,
        SearchConfig,
        SweepResult,
        TorchCluster,
        TrainingFailedError,
        atrain,
        evaluate,
        plan,
        prune,
        sweep,
        train,
    )
    from prefect_torch.tasks import get_device, prepare_data_loader, prepare_model

__version__ = "0.2.0.dev0"

_FOLDERS = {
    "Checkpoint": ".ckpt",
    "CheckpointConfig": ".flows",
    "CheckpointStorage": ".ckpt.blocks",
    "CheckpointStore": ".ckpt",
    "FailureConfig": ".flows",
    "RandomState": ".ckpt",
    "RankLocal": ".ckpt",
    "Result": ".flows",
    "RunConfig": ".flows",
    "ScalingConfig": ".flows",
    "SearchConfig": ".flows",
    "SweepResult": ".flows",
    "TorchCluster": ".flows",
    "TrainContext": ".ckpt",
    "TrainingFailedError": ".flows",
    "atrain": ".flows",
    "checkpoint_directory": ".ckpt",
    "deploy": ".deployments",
    "evaluate": ".flows",
    "get_checkpoint": ".ckpt",
    "get_context": ".ckpt",
    "get_device": ".tasks",
    "log_metrics": ".ckpt",
    "make_deployment": ".deployments",
    "plan": ".flows",
    "prepare_data_loader": ".tasks",
    "prepare_model": ".tasks",
    "prune": ".flows",
    "report": ".ckpt",
    "serve": ".deployments",
    "sweep": ".flows",
    "train": ".flows",
}
__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStorage",
    "CheckpointStore",
    "FailureConfig",
    "RandomState",
    "RankLocal",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SearchConfig",
    "SweepResult",
    "TorchCluster",
    "TrainContext",
    "TrainingFailedError",
    "atrain",
    "checkpoint_directory",
    "deploy",
    "evaluate",
    "get_checkpoint",
    "get_context",
    "get_device",
    "log_metrics",
    "make_deployment",
    "plan",
    "prepare_data_loader",
    "prepare_model",
    "prune",
    "report",
    "serve",
    "sweep",
    "train",
]

if sys.platform == "win32":
    raise ImportError("prefect-torch does not run on Windows: use Linux, for example in WSL 2 or a container")

sys.meta_path.append(MovedModules())

if not TYPE_CHECKING:  # for which a name that does not exist is an error
    __getattr__, __dir__ = lazy_names(__name__, _FOLDERS)
