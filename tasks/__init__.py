"""Prefect tasks that train, evaluate and prune, their options, and the functions that prepare a rank's model and data.

Imports are lazy: the process of a rank imports modules of this package, and must not wait seconds for prefect, which it never
uses.
"""

from typing import TYPE_CHECKING

from prefect_torch.lazy_names import lazy_names

if TYPE_CHECKING:
    from prefect_torch.tasks.gang.engines.cluster_block import TorchCluster
    from prefect_torch.tasks.gang.engines.dask_cluster import DaskCluster
    from prefect_torch.tasks.gang.engines.hosts import Hosts
    from prefect_torch.tasks.gang.engines.kubernetes_cluster import KubernetesCluster
    from prefect_torch.tasks.gang.engines.ray_cluster import RayCluster
    from prefect_torch.tasks.gang.engines.slurm_cluster import SlurmCluster
    from prefect_torch.tasks.gang.gpus.allocation import GpusBusyError
    from prefect_torch.tasks.gang.rank_task import train_rank
    from prefect_torch.tasks.options.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from prefect_torch.tasks.options.sync import SyncConfig
    from prefect_torch.tasks.prepare.data_loader import prepare_data_loader
    from prefect_torch.tasks.prepare.device import get_device
    from prefect_torch.tasks.prepare.model import prepare_model
    from prefect_torch.tasks.rank.errors import (
        NotEnoughMachinesError,
        RankFailedError,
        RestartsUsedUpError,
        StorageNotSeenError,
    )
    from prefect_torch.tasks.training.workers_task import train_workers

    from .evaluation_task import evaluate_checkpoint
    from .prune_task import prune_checkpoints

_MODULES = {
    "CheckpointConfig": ".options.config",
    "DaskCluster": ".gang.engines.dask_cluster",
    "FailureConfig": ".options.config",
    "GpusBusyError": ".gang.gpus.allocation",
    "Hosts": ".gang.engines.hosts",
    "KubernetesCluster": ".gang.engines.kubernetes_cluster",
    "NotEnoughMachinesError": ".rank.errors",
    "RankFailedError": ".rank.errors",
    "RayCluster": ".gang.engines.ray_cluster",
    "RestartsUsedUpError": ".rank.errors",
    "RunConfig": ".options.config",
    "ScalingConfig": ".options.config",
    "SlurmCluster": ".gang.engines.slurm_cluster",
    "StorageNotSeenError": ".rank.errors",
    "SyncConfig": ".options.sync",
    "TorchCluster": ".gang.engines.cluster_block",
    "evaluate_checkpoint": ".evaluation_task",
    "get_device": ".prepare.device",
    "prepare_data_loader": ".prepare.data_loader",
    "prepare_model": ".prepare.model",
    "prune_checkpoints": ".prune_task",
    "train_rank": ".gang.rank_task",
    "train_workers": ".training.workers_task",
}

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
    "RestartsUsedUpError",
    "RunConfig",
    "ScalingConfig",
    "SlurmCluster",
    "StorageNotSeenError",
    "SyncConfig",
    "TorchCluster",
    "evaluate_checkpoint",
    "get_device",
    "prepare_data_loader",
    "prepare_model",
    "prune_checkpoints",
    "train_rank",
    "train_workers",
]

if not TYPE_CHECKING:  # for which a name that does not exist is an error
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
