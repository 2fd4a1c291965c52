"""The manifests of the pods that run agents: an Indexed Job, alone or in a JobSet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .agent_process import AGENT

JOB_SET_GROUP, JOB_SET_VERSION = "jobset.x-k8s.io", "v1alpha2"
KEY = "agent-key"
_REPLICATED = "agents"
JOB_OF_SET = f"{_REPLICATED}-0"  # the end of the name of its Job
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_LEFT_S = 600  # how long an ended Job is kept, for kubectl logs


@dataclass(frozen=True, slots=True)
class AgentPods:
    """The settings of the pods of one attempt.

    Attributes:
        name: The name of the Job and of the Secret with the agents' key.
        image: The image of the pods.
        num_pods: The number of pods.
        arguments: The agents' arguments, apart from their names.
        limits: The resources of a pod, such as {"nvidia.com/gpu": "8"}.
        node_selector: The labels of machines that may be used.
        labels: Labels of the Job or JobSet and of the pods.
        annotations: Annotations of the same.
        avoid: The names of machines that must not be used.
        shared_memory: The size of /dev/shm, through which loaders' workers and NCCL exchange data.
        grace_s: How long a pod may take to end: the grace of the ranks.
        owner: A reference to the flow's pod, with which Kubernetes deletes the Job; None without an owner.
        pull_secrets: References to the Secrets with which the image is pulled.
        pod_spec: More fields of a pod; lists are appended to those made here.
        container_spec: More fields of its container, likewise.
        suffix: The end of the agents' names; another one for each Job of an attempt, since their pods may share machines.

    """

    name: str
    image: str
    num_pods: int
    arguments: Sequence[str]
    limits: Mapping[str, str]
    node_selector: Mapping[str, str]
    avoid: Sequence[str]
    shared_memory: str
    grace_s: int
    owner: Mapping[str, str] | None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: Sequence[Mapping[str, str]] = ()
    pod_spec: Mapping[str, Any] = field(default_factory=dict)
    container_spec: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""


def job(pods: AgentPods) -> dict[str, Any]:
    """Return the Job: one pod per index, and no pod is restarted."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(pods),
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.num_pods,
            "parallelism": pods.num_pods,
            # A pod that is lost must not end the others: they have the grace for a last checkpoint.
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": pods.num_pods,
            "ttlSecondsAfterFinished": _LEFT_S,
            "template": {"metadata": _labelled(pods, {"app": pods.name}), "spec": _pod(pods)},
        },
    }


def job_set(pods: AgentPods) -> dict[str, Any]:
    """Return a JobSet that contains only this Job, for clusters whose queues admit JobSets."""
    return {
        "apiVersion": f"{JOB_SET_GROUP}/{JOB_SET_VERSION}",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": _LEFT_S,
            "replicatedJobs": [{"name": _REPLICATED, "replicas": 1, "template": {"spec": job(pods)["spec"]}}],
        },
    }


def secret(pods: AgentPods, key: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Secret with the agents' key, which is deleted with the Job or JobSet `made`."""
    owner = {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": pods.name, "ownerReferences": [owner]},
        "stringData": {KEY: key},
    }


def machine_of(agent: str) -> str:
    """Return the name of the machine on which the agent of this name runs."""
    return agent.rpartition("/")[0]


def pod_of(agent: str) -> str:
    """Return the name of the pod in which the agent of this name runs."""
    return pod_name(number_of(agent))


def number_of(agent: str) -> int:
    """Return the number of the pod in which the agent of this name runs."""
    return int(agent.rpartition("/")[2].partition("+")[0])


def pod_name(index: int | str) -> str:
    """Return the name of a pod of a training, for messages."""
    return f"pod {index}"


def _metadata(pods: AgentPods) -> dict[str, Any]:
    owned = {} if pods.owner is None else {"ownerReferences": [dict(pods.owner)]}
    return {"name": pods.name, **_labelled(pods, {"app.kubernetes.io/managed-by": "prefect-torch"}), **owned}


def _labelled(pods: AgentPods, ours: Mapping[str, str]) -> dict[str, Any]:
    """Return the labels and annotations of an object, with our own labels."""
    return {"labels": {**pods.labels, **ours}, "annotations": dict(pods.annotations)}


def _pod(pods: AgentPods) -> dict[str, Any]:
    made = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_s,
        "imagePullSecrets": [dict(it) for it in pods.pull_secrets],
        "nodeSelector": dict(pods.node_selector),
        "tolerations": [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in pods.limits if "/" in name],
        "containers": [_merged(_container(pods), pods.container_spec)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}}],
    }
    merged: dict[str, Any] = _merged(made, pods.pod_spec)
    return _kept_off(pods.avoid, merged) if pods.avoid else merged


def _kept_off(machines: Sequence[str], pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod with a node affinity that excludes `machines` from each of its alternatives, of which one has to match."""
    # By name: the label kubernetes.io/hostname may have another one, as on EKS. Such a requirement has exactly one value.
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in machines]
    affinity = pod.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    alternatives = (of_nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    terms = [{**term, "matchFields": [*term.get("matchFields", []), *excluded]} for term in alternatives]
    return {**pod, "affinity": {**affinity, "nodeAffinity": {**of_nodes, _REQUIRED: {"nodeSelectorTerms": terms}}}}


def _container(pods: AgentPods) -> dict[str, Any]:
    return {
        "name": "agent",
        "image": pods.image,
        "command": ["python", "-m", AGENT],
        "args": [*pods.arguments, "--name", f"$(NODE_NAME)/$(INDEX){pods.suffix}"],
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "PREFECT_TORCH_AGENT_KEY", "valueFrom": {"secretKeyRef": {"name": pods.name, "key": KEY}}},
        ],
        "resources": {"limits": dict(pods.limits)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - in the pod
    }


def _merged(made: Any, given: Any) -> Any:
    """Return `made` with the fields of `given`: mappings are merged, lists are appended, other values replace those made."""
    if isinstance(made, Mapping) and isinstance(given, Mapping):
        return {**made, **{name: _merged(made.get(name), value) for name, value in given.items()}}
    return [*made, *given] if isinstance(made, list) and isinstance(given, list) else given
