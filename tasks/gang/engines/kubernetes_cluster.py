"""Pods of a Kubernetes cluster."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from pydantic import Field

from .cluster import Agents, Cluster, MachineRequest
from .kubernetes_job import JOB_SET_GROUP, JOB_SET_VERSION, AgentPods, job, job_set, machine_of, secret

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POLL_S = 2.0
_HOPELESS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName"}


class KubernetesCluster(Cluster):
    """Pods that a Job of its own has for each attempt: a JobSet where the cluster knows them, else an Indexed Job.

    Needs the extra `kubernetes`, and a service account that may create and delete jobs, jobsets and secrets, and list pods.
    """

    kind: Literal["kubernetes"] = "kubernetes"
    wait_s: float = Field(
        default=600.0, ge=0, le=1e9, title="Wait (seconds)", description="How long pods may take to start, images included."
    )
    image: str | None = Field(default=None, title="Image", description="The image of the flow's own pod when empty.")
    namespace: str | None = Field(default=None, title="Namespace", description="That of the flow's own pod when empty.")
    ranks_per_pod: int = Field(default=1, ge=1, title="Ranks per pod", description="For how many ranks a pod has room.")
    limits: dict[str, str] = Field(
        default={}, title="Limits", description="The resources of a pod, such as nvidia.com/gpu: '8' and memory: 200Gi."
    )
    node_selector: dict[str, str] = Field(default={}, title="Node selector", description="Labels of machines that may be used.")
    shared_memory: str = Field(default="1Gi", title="Shared memory", description="The size of /dev/shm in a pod.")
    termination_grace_s: int = Field(
        default=60, ge=0, title="Termination grace (seconds)", description="More than grace_s, the grace of the ranks."
    )

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Create the Job, and delete it in the end."""
        cluster = _Api(self.namespace)
        pods = AgentPods(
            name=f"prefect-torch-{token_hex(5)}",
            image=self.image or cluster.own_image(),
            num_pods=math.ceil(wanted.most / self.ranks_per_pod),
            arguments=agents.arguments(slots=self.ranks_per_pod),
            limits=self.limits,
            node_selector=self.node_selector,
            avoid=sorted(set(map(machine_of, wanted.avoid - wanted.in_use))),
            shared_memory=self.shared_memory,
            grace_s=self.termination_grace_s,
            owner=cluster.own_reference(),
        )
        for number in range(pods.num_pods):
            agents.expect(f"pod {number}")
        cluster.create(pods, agents.key)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(cluster, pods, agents, ended), daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()
            cluster.delete(pods)


class _Api:
    """The requests to Kubernetes."""

    def __init__(self, namespace: str | None) -> None:
        try:
            kubernetes: Any = import_module("kubernetes")  # its types are incomplete, and it is an extra
        except ModuleNotFoundError as exc:
            raise NotEnoughMachinesError(
                "Kubernetes' client is not installed: pip install 'prefect-torch[kubernetes]'"
            ) from exc
        self._inside = _ACCOUNT.exists()
        if self._inside:
            kubernetes.config.load_incluster_config()
        else:
            kubernetes.config.load_kube_config()
        self._own_namespace = (_ACCOUNT / "namespace").read_text().strip() if self._inside else "default"
        self._namespace = namespace or self._own_namespace
        self._core, self._batch = kubernetes.client.CoreV1Api(), kubernetes.client.BatchV1Api()
        self._custom = kubernetes.client.CustomObjectsApi()
        groups = kubernetes.client.ApisApi().get_api_versions().groups
        self._has_job_sets = any(group.name == JOB_SET_GROUP for group in groups)
        self.error: type[Exception] = kubernetes.client.ApiException

    def own_image(self) -> str:
        if not self._inside:
            raise NotEnoughMachinesError("KubernetesCluster(image=...) is needed, since this flow does not run in a pod")
        return str(self._own_pod().spec.containers[0].image)

    def own_reference(self) -> dict[str, str] | None:
        if not self._inside or self._namespace != self._own_namespace:
            return None  # an owner in another namespace would have its belongings deleted at once
        pod = self._own_pod()
        return {"apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid}

    def create(self, pods: AgentPods, key: str) -> None:
        """Create the Job or JobSet, and then the Secret, which belongs to it; the pods wait for the Secret."""
        if self._has_job_sets:
            made = self._custom.create_namespaced_custom_object(*self._job_sets(), job_set(pods))
        else:
            created = self._batch.create_namespaced_job(self._namespace, job(pods))
            made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": pods.name, "uid": created.metadata.uid}}
        self._core.create_namespaced_secret(self._namespace, secret(pods, key, made))

    def delete(self, pods: AgentPods) -> None:
        """Delete the Job or JobSet, and with it its pods and the Secret."""
        with suppress(self.error):  # its owner, or a garbage collector, was first
            if self._has_job_sets:
                self._custom.delete_namespaced_custom_object(*self._job_sets(), pods.name, propagation_policy="Background")
            else:
                self._batch.delete_namespaced_job(pods.name, self._namespace, propagation_policy="Background")

    def problems(self, pods: AgentPods) -> dict[int, tuple[str, bool]]:
        """Return why pods do not run yet, by their numbers, and whether they never will."""
        found = {}
        for pod in self._core.list_namespaced_pod(self._namespace, label_selector=f"app={pods.name}").items:
            number = int((pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index", -1))
            for status in pod.status.container_statuses or []:
                waiting = status.state.waiting
                if waiting is not None and waiting.reason:
                    found[number] = (f"{waiting.reason}: {waiting.message or ''}".strip(": "), waiting.reason in _HOPELESS)
            if pod.status.phase in {"Failed", "Succeeded"}:
                found[number] = (f"its pod has ended: {pod.status.reason or pod.status.phase}", True)
            for condition in pod.status.conditions or []:
                if condition.reason == "Unschedulable":
                    found[number] = (f"unschedulable: {condition.message}", False)
        return found

    def _job_sets(self) -> tuple[str, str, str, str]:
        return JOB_SET_GROUP, JOB_SET_VERSION, self._namespace, "jobsets"

    def _own_pod(self) -> Any:
        return self._core.read_namespaced_pod(os.environ["HOSTNAME"], self._own_namespace)


def _watch(cluster: _Api, pods: AgentPods, agents: Agents, ended: threading.Event) -> None:
    while not ended.wait(_POLL_S):
        with suppress(cluster.error, OSError):  # looked at again
            for number, (reason, is_hopeless) in cluster.problems(pods).items():
                if is_hopeless:
                    agents.fail(f"pod {number}", reason)
