"""The flows `train`, `sweep`, `evaluate` and `prune`, their configurations and results.

Imports are lazy: Prefect makes a flow's form from the schemas of all its parameters, which takes a tenth of a second for each
flow, and a program that trains needs no other. Only Prefect's embedded server is tied to this process immediately: a flow of
the user's own may start that server before it uses one of these names.
"""

from typing import TYPE_CHECKING

from prefect_torch.lazy_names import lazy_names
from prefect_torch.tasks.rank.user_code.shadowing import check_is_package as _check_is_package

_check_is_package("prefect")  # before the first import of prefect, which would fail less clearly, or run the user's file

from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_new_servers as _tie_new_servers  # noqa: E402

if TYPE_CHECKING:
    from prefect_torch.flows.sweeps.domains import choice, grid, loguniform, randint, uniform
    from prefect_torch.flows.sweeps.failures import SweepFailedError
    from prefect_torch.flows.sweeps.journal.journal import JournalDamagedError
    from prefect_torch.flows.sweeps.optuna_study.storage import open_study_storage
    from prefect_torch.flows.sweeps.search_config import SearchConfig
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
        RestartsUsedUpError,
        RunConfig,
        ScalingConfig,
        SlurmCluster,
        StorageNotSeenError,
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

_MODULES = {
    "CheckpointConfig": "prefect_torch.tasks",
    "DaskCluster": "prefect_torch.tasks",
    "FailureConfig": "prefect_torch.tasks",
    "GpusBusyError": "prefect_torch.tasks",
    "Hosts": "prefect_torch.tasks",
    "JournalDamagedError": "prefect_torch.flows.sweeps.journal.journal",
    "KubernetesCluster": "prefect_torch.tasks",
    "NotEnoughMachinesError": "prefect_torch.tasks",
    "PlanLine": "prefect_torch.flows.planning",
    "RankFailedError": "prefect_torch.tasks",
    "RayCluster": "prefect_torch.tasks",
    "RestartsUsedUpError": "prefect_torch.tasks",
    "Result": "prefect_torch.flows.result",
    "RunConfig": "prefect_torch.tasks",
    "ScalingConfig": "prefect_torch.tasks",
    "SearchConfig": "prefect_torch.flows.sweeps.search_config",
    "SlurmCluster": "prefect_torch.tasks",
    "StorageNotSeenError": "prefect_torch.tasks",
    "SweepFailedError": "prefect_torch.flows.sweeps.failures",
    "SweepResult": "prefect_torch.flows.sweep_result",
    "SyncConfig": "prefect_torch.tasks",
    "TorchCluster": "prefect_torch.tasks",
    "TrainingFailedError": "prefect_torch.flows.result",
    "TrainingPlan": "prefect_torch.flows.planning",
    "Trial": "prefect_torch.flows.sweep_result",
    "atrain": "prefect_torch.flows.async_training",
    "choice": "prefect_torch.flows.sweeps.domains",
    "evaluate": "prefect_torch.flows.evaluation",
    "grid": "prefect_torch.flows.sweeps.domains",
    "loguniform": "prefect_torch.flows.sweeps.domains",
    "open_study_storage": "prefect_torch.flows.sweeps.optuna_study.storage",
    "plan": "prefect_torch.flows.planning",
    "prune": "prefect_torch.flows.pruning",
    "randint": "prefect_torch.flows.sweeps.domains",
    "sweep": "prefect_torch.flows.sweeping",
    "train": "prefect_torch.flows.training",
    "uniform": "prefect_torch.flows.sweeps.domains",
}

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
    "RestartsUsedUpError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SearchConfig",
    "SlurmCluster",
    "StorageNotSeenError",
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
    "open_study_storage",
    "plan",
    "prune",
    "randint",
    "sweep",
    "train",
    "uniform",
]

_tie_new_servers()

if not TYPE_CHECKING:  # for which a name that does not exist is an error
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
