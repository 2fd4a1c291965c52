"""The clusters that a user chooses from, in a form or in code."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, WithJsonSchema

from .cluster import Cluster
from .hosts import Hosts

_KINDS: dict[str, type[Cluster]] = {"hosts": Hosts}


def check_cluster(value: Any) -> Any:
    """Return the cluster that `value` is or describes, by its `kind`."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", "hosts")
    if kind not in _KINDS:
        raise ValueError(f"there is no cluster of the kind {kind!r}: give one of {', '.join(_KINDS)}")
    return _KINDS[kind](**value)


ClusterChoice = Annotated[SerializeAsAny[Cluster], BeforeValidator(check_cluster), WithJsonSchema(Hosts.model_json_schema())]
