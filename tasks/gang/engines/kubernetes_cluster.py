"""Pods of a Kubernetes cluster."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from secrets import token_hex
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from .cluster import AgentEnd, Agents, Cluster, MachineRequest
from .kubernetes_api import KubernetesApi, is_starting
from .kubernetes_job import AgentPods, machine_of, number_of, pod_name, pod_of

_POLL_S = 2.0
_LATE_POLL_S = 30.0
_END_S = 5.0  # until the status of a pod that has ended says so; usually a second
_END_POLL_S = 0.5


class KubernetesCluster(Cluster):
    """Pods of a Job that is created for each attempt: a JobSet where the cluster supports JobSets, else an Indexed Job.

    Needs the extra `kubernetes`, and a service account of the flow that may create and delete jobs and jobsets, create secrets,
    and get, list and delete pods. The pods may run on machines that are tainted with one of their resources, such as
    nvidia.com/gpu. Those whose agents have not come when an attempt begins are deleted.
    """

    waits_itself: ClassVar[bool] = True
    _usual_wait_s: ClassVar[float] = 600.0

    kind: Literal["kubernetes"] = "kubernetes"
    image: str | None = Field(default=None, title="Image", description="The image of the flow's own pod when empty.")
    namespace: str | None = Field(
        default=None,
        title="Namespace",
        description="That of the flow's own pod when empty; outside of a pod, that of kubectl's current context.",
    )
    ranks_per_pod: int = Field(default=1, ge=1, title="Ranks per pod", description="For how many ranks a pod has room.")
    limits: dict[str, str] = Field(
        default={}, title="Limits", description="The resources of a pod, such as nvidia.com/gpu: '8' and memory: 200Gi."
    )
    node_selector: dict[str, str] = Field(default={}, title="Node selector", description="Labels of machines that may be used.")
    labels: dict[str, str] = Field(
        default={}, title="Labels", description="Labels of the Job or JobSet and of the pods, such as the queue of Kueue."
    )
    annotations: dict[str, str] = Field(
        default={}, title="Annotations", description="Annotations of the Job or JobSet and of the pods."
    )
    shared_memory: str = Field(default="1Gi", title="Shared memory", description="The size of /dev/shm in a pod.")
    termination_grace_s: int = Field(
        default=60, ge=0, title="Termination grace (seconds)", description="More than grace_s, the grace of the ranks."
    )

    pod_spec: dict[str, Any] = Field(
        default={},
        title="Pod specification",
        description="More fields of the pods, as in Kubernetes' manifests: serviceAccountName, tolerations, volumes and so on.",
    )
    container_spec: dict[str, Any] = Field(
        default={},
        title="Container specification",
        description="More fields of the pods' container: volumeMounts, env, resources and so on.",
    )

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        return _without(("app", "app.kubernetes.io/managed-by"), "labels", labels)

    @field_validator("pod_spec")
    @classmethod
    def _check_pod(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return _without(("containers", "restartPolicy", "terminationGracePeriodSeconds"), "pod_spec", fields)

    @field_validator("container_spec")
    @classmethod
    def _check_container(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return _without(("name", "image", "command", "args"), "container_spec", fields)

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Create the Job, and delete it at the end."""
        cluster = KubernetesApi(self.namespace)
        image, pull_secrets = (self.image, []) if self.image else cluster.own_image()
        pods = AgentPods(
            name=f"prefect-torch-{token_hex(5)}",
            image=image,
            num_pods=math.ceil(wanted.most / self.ranks_per_pod),
            arguments=agents.arguments(slots=self.ranks_per_pod),
            limits=self.limits,
            node_selector=self.node_selector,
            labels=self.labels,
            annotations=self.annotations,
            avoid=sorted(set(map(machine_of, wanted.avoid - wanted.in_use))),
            shared_memory=self.shared_memory,
            grace_s=self.termination_grace_s,
            pull_secrets=pull_secrets,
            pod_spec=self.pod_spec,
            container_spec=self.container_spec,
            owner=cluster.own_reference(),
            suffix=f"+{len(wanted.in_use)}" if wanted.in_use else "",
        )
        for number in range(pods.num_pods):
            agents.expect(pod_name(number))
        ended = threading.Event()
        watched = (_watch, cluster, pods, agents, ended)
        watch = threading.Thread(target=copy_context().run, args=watched, name="pods", daemon=True)
        ends = _Ends(cluster, pods, ended)
        agents.explain_ends(lambda agent: ends.explain(number_of(agent)))
        try:
            cluster.create(pods, agents.key)
            watch.start()
            yield
        finally:
            ended.set()
            if watch.ident is not None:
                watch.join()
            cluster.delete(pods)

    def expected_name(self, agent: str) -> str:
        """Return the name of the agent's pod; the agent's own has the machine, which Kubernetes chooses after the request."""
        return pod_of(agent)

    def machine_of(self, agent: str) -> str:
        """Return the name of the machine that Kubernetes has chosen for the agent's pod."""
        return machine_of(agent)


def _without(ours: Sequence[str], name: str, fields: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(fields.keys() & set(ours)):
        raise ValueError(f"{name} has {', '.join(taken)}, which this package sets: use the other fields of KubernetesCluster")
    return fields


def _watch(cluster: KubernetesApi, pods: AgentPods, agents: Agents, ended: threading.Event) -> None:
    while not (ended.wait(_POLL_S) or agents.is_over):
        with suppress(*cluster.errors, OSError):  # the next poll tries again
            problems = {pod_name(number): problem for number, problem in cluster.problems(pods).items()}
            agents.delay({name: reason for name, (reason, _) in problems.items()})
            waiting = {name for name, (reason, _) in problems.items() if not is_starting(reason)}
            agents.announce({pod_name(number) for number in range(pods.num_pods)} - waiting)
            for name, (reason, is_hopeless) in problems.items():
                if is_hopeless:
                    agents.fail(name, reason)
    late = agents.late()
    _withdraw(cluster, pods, {number for number in range(pods.num_pods) if pod_name(number) in late}, ended)


def _withdraw(cluster: KubernetesApi, pods: AgentPods, late: set[int], ended: threading.Event) -> None:
    """Delete the pods whose agents were late for the attempt, also those that Kubernetes creates only afterwards.

    A pending pod is a request: it holds a quota, has a machine bought for it, or pods of a lower priority evicted.
    """
    while late and not ended.is_set():
        with suppress(*cluster.errors, OSError):  # the next poll tries again
            late -= cluster.withdraw(pods, late)
        if late:
            ended.wait(_LATE_POLL_S)


class _Ends:
    """Why pods have ended, by listings that are shared: if all end together, each of them is asked about.

    Args:
        cluster: The cluster.
        pods: The pods.
        ended: Set once they are no longer used.

    """

    def __init__(self, cluster: KubernetesApi, pods: AgentPods, ended: threading.Event) -> None:
        self._cluster, self._pods, self._ended = cluster, pods, ended
        self._listing = threading.Lock()
        self._listed: Mapping[int, AgentEnd] = {}
        self._listed_s = -math.inf

    def explain(self, number: int) -> AgentEnd | None:
        """Return why a pod has ended; None if Kubernetes does not say so soon, as for a machine that was switched off."""
        ends_s = time.monotonic() + _END_S
        while (end := self._list().get(number)) is None and time.monotonic() < ends_s:
            if self._ended.wait(_END_POLL_S):
                break
        return end

    def _list(self) -> Mapping[int, AgentEnd]:
        with self._listing:
            if time.monotonic() - self._listed_s >= _END_POLL_S:
                with suppress(*self._cluster.errors, OSError):  # the next poll tries again
                    self._listed = self._cluster.ends(self._pods)
                self._listed_s = time.monotonic()
            return self._listed
