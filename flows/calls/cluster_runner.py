"""`train.with_options(task_runner=RayTaskRunner(...))`: Prefect's way to name a cluster, here that of the ranks."""

import sys
from typing import Any

from prefect.context import FlowRunContext
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect_torch.tasks import DaskCluster, RayCluster, ScalingConfig
from prefect_torch.tasks.gang.engines.cluster import Cluster
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK


class ClusterThreads(ThreadPoolTaskRunner[Any]):
    """Threads for the task runs of ranks, whose processes are on the machines of a cluster.

    Prefect's task runners for Ray and Dask would run the task runs on the cluster: without a gang, and a lost task
    run would stay Running.

    Args:
        cluster: The cluster.

    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(max_workers=sys.maxsize)
        self.cluster = cluster

    def duplicate(self) -> "ClusterThreads":
        """Return another runner for the same cluster."""
        return ClusterThreads(self.cluster)


def use_threads(options: dict[str, Any], own: TaskRunner[Any]) -> dict[str, Any]:
    """Return the options of a flow with a task runner that has a thread for each rank, and knows the cluster that was named.

    With fewer threads than ranks, ranks would wait for those that cannot start; with as many, no prune could run. A flow
    without ranks keeps the threads that it is given.

    Args:
        options: The options.
        own: The task runner of the flow itself.

    Raises:
        ValueError: If the task runner would start a cluster of its own, or is none of threads, Ray or Dask.

    """
    runner = options.get("task_runner")
    if isinstance(runner, type):
        runner = runner()
    if not isinstance(runner, TaskRunner):
        return options
    if isinstance(runner, ThreadPoolTaskRunner):
        if own is not ONE_THREAD_PER_RANK and not isinstance(own, ClusterThreads):
            return options
        return {**options, "task_runner": runner if isinstance(runner, ClusterThreads) else ONE_THREAD_PER_RANK}
    package = type(runner).__module__.partition(".")[0]
    if package not in {"prefect_ray", "prefect_dask"}:
        raise ValueError(
            f"task_runner={type(runner).__name__}(...): the task runs of ranks are threads of the flow's process, and each "
            "rank is a process of its own: leave the task runner out"
        )
    address = getattr(runner, "address", None)
    if address is None:
        raise ValueError(f"{type(runner).__name__}(address=...) is needed: a training starts no cluster")
    cluster = RayCluster(address=address) if package == "prefect_ray" else DaskCluster(address=address)
    return {**options, "task_runner": ClusterThreads(cluster)}


def with_cluster_of_runner(scaling: ScalingConfig) -> ScalingConfig:
    """Return `scaling` with the cluster of this flow run's task runner, unless it names one itself."""
    context = FlowRunContext.get()
    runner = None if context is None else context.task_runner
    if scaling.cluster is not None or not isinstance(runner, ClusterThreads):
        return scaling
    return scaling.model_copy(update={"cluster": runner.cluster})
