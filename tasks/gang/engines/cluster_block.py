"""Clusters as Prefect blocks: saved once, and named by every training."""

import re
from typing import Annotated, Any, cast

from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem
from pydantic import BeforeValidator, Field, HttpUrl, SerializeAsAny, WithJsonSchema, field_serializer

from .choice import CLUSTER_SCHEMAS, AnyCluster, check_cluster
from .cluster import Cluster

_SLUG = "torch-cluster"
_SAVED = rf"^{_SLUG}/[a-z0-9-]+$"


class TorchCluster(Block):
    """Keep the machines of trainings under a name.

    Example:
        Save a cluster once, and train on it:
        ```python
        from prefect_torch.flows import TorchCluster, ScalingConfig, SlurmCluster, train

        TorchCluster(cluster=SlurmCluster(partition="gpu", gpus_per_node=8)).save("slurm")
        saved = TorchCluster.load("BLOCK_NAME")
        train("my_training:train_fn", scaling=ScalingConfig(num_workers=16, use_gpu=True, cluster=saved))
        train("my_training:train_fn", scaling=ScalingConfig(num_workers=16, use_gpu=True, cluster="torch-cluster/slurm"))
        ```

    """

    _block_type_name = "Torch Cluster"
    _block_type_slug = _SLUG
    _description = "The machines of trainings: hosts, or those of Ray, Dask, Slurm or Kubernetes."
    _documentation_url = cast("HttpUrl", "https://docs.prefect.io/v3/concepts/blocks")
    _logo_url = cast("HttpUrl", LocalFileSystem._logo_url)  # noqa: SLF001 - the logo of this package's other block

    cluster: AnyCluster = Field(title="Cluster", description="The machines, by their kind.")

    @field_serializer("cluster")
    def _as_given(self, cluster: Cluster) -> dict[str, Any]:
        """Return the fields that were given: a machine with an older version refuses those that it does not know."""
        return cluster.model_dump(mode="json", exclude_unset=True)


def check_choice(value: Any) -> Any:
    """Return the cluster that `value` is or describes, or "torch-cluster/NAME" of a saved one, which is not loaded yet.

    Raises:
        ValueError: If `value` is neither.

    """
    if isinstance(value, TorchCluster):
        return value.cluster
    if isinstance(value, str):
        if not re.match(_SAVED, value):
            raise ValueError(f"cluster={value!r}: give a cluster, or {_SLUG}/NAME of a saved block")
        return value
    return check_cluster(value)


def load_cluster(cluster: Cluster | str) -> Cluster:
    """Return the cluster; a saved one is loaded by its name from Prefect's API.

    Raises:
        ValueError: If there is no such block.

    """
    if not isinstance(cluster, str):
        return cluster
    name = cluster.partition("/")[2]
    try:
        saved = cast("TorchCluster", TorchCluster.load(name, _sync=True))  # type: ignore[call-arg]  # added at run time
    except ValueError as exc:
        if not isinstance(exc.__cause__, ObjectNotFound):
            raise
        raise ValueError(f"there is no block {cluster!r}: save one with TorchCluster(cluster=...).save({name!r})") from None
    return saved.cluster


_NAME = {"type": "string", "title": "Saved cluster", "pattern": _SAVED}
ClusterChoice = Annotated[
    SerializeAsAny[Cluster] | str, BeforeValidator(check_choice), WithJsonSchema({"anyOf": [*CLUSTER_SCHEMAS, _NAME]})
]
