"""The clusters that a user chooses from, in a form or in code."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, WithJsonSchema

from .cluster import Cluster
from .dask_cluster import DaskCluster
from .hosts import Hosts
from .kubernetes_cluster import KubernetesCluster
from .ray_cluster import RayCluster
from .slurm_cluster import SlurmCluster

KINDS: dict[str, type[Cluster]] = {
    "hosts": Hosts,
    "ray": RayCluster,
    "slurm": SlurmCluster,
    "dask": DaskCluster,
    "kubernetes": KubernetesCluster,
}


def check_cluster(value: Any) -> Any:
    """Return the cluster that `value` is or describes, by its `kind`."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", "hosts")
    if kind not in KINDS:
        raise ValueError(f"there is no cluster of the kind {kind!r}: give one of {', '.join(KINDS)}")
    return KINDS[kind](**value)


CLUSTER_SCHEMAS = [kind.model_json_schema() for kind in KINDS.values()]
AnyCluster = Annotated[SerializeAsAny[Cluster], BeforeValidator(check_cluster), WithJsonSchema({"anyOf": CLUSTER_SCHEMAS})]
