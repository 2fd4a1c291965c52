"""The requests to Kubernetes that pods of agents need."""

import json
import socket
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any

from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.run_logs import get_run_logger

from .client_process import check_client
from .cluster import AgentEnd
from .kubernetes_job import JOB_OF_SET, JOB_SET_GROUP, JOB_SET_VERSION, AgentPods, job, job_set, secret

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_RIGHTS = (
    "the flow's service account must be allowed to create and delete jobs and jobsets, to create secrets, and to get, list and "
    "delete pods"
)
# For a connection, and for each byte of a response: without limits, the client waits forever for an answer that was lost.
_TIMES: dict[str, Any] = {"_request_timeout": (10.0, 30.0)}
# Where an attempt waits for the answer: with the client's three retries, twelve seconds for one that is lost.
_SHORT_TIMES: dict[str, Any] = {"_request_timeout": (2.0, 3.0)}
_DELETION: dict[str, Any] = {"propagation_policy": "Background", **_TIMES}
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_PREFECTS_CONTAINER = "prefect-job"  # in Prefect's job template, and in ours
_OUT_OF_MEMORY = "OOMKilled"
_ENDED = {"Failed", "Succeeded"}
_HOPELESS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName"}
_SUSPENDED = "Suspended"  # a normal event: what queues Jobs suspends them until it admits them
_UNSCHEDULABLE = {"Unschedulable", "SchedulingGated"}  # the latter until a queue admits the pod
_STARTING = {"ContainerCreating", "PodInitializing"}  # on a machine, which pulls the image for minutes


class KubernetesApi:
    """A connection to Kubernetes, as the flow's pod or as this user.

    Args:
        namespace: Where the pods are; that of the flow's own pod if None, or outside of a pod that of kubectl.

    Attributes:
        errors: The exceptions of a request that is refused or not answered.

    """

    def __init__(self, namespace: str | None) -> None:
        check_client("kubernetes", "Kubernetes' client", "kubernetes")
        kubernetes: Any = import_module("kubernetes")  # its types are incomplete, and it is an extra
        from urllib3.exceptions import HTTPError  # noqa: PLC0415 - the client's own dependency

        self.errors: tuple[type[Exception], ...] = (kubernetes.client.ApiException, HTTPError)
        self._inside = _ACCOUNT.exists()
        if self._inside:
            kubernetes.config.load_incluster_config()
            self._own_namespace = (_ACCOUNT / "namespace").read_text().strip()
        else:
            try:
                kubernetes.config.load_kube_config()
                _, context = kubernetes.config.list_kube_config_contexts()
            except kubernetes.config.ConfigException as exc:
                raise ValueError(
                    f"outside of a pod, KubernetesCluster needs a kubeconfig with a current context: {exc}"
                ) from exc
            self._own_namespace = context["context"].get("namespace") or "default"
        self._namespace = namespace or self._own_namespace
        self._core, self._batch = kubernetes.client.CoreV1Api(), kubernetes.client.BatchV1Api()
        self._custom = kubernetes.client.CustomObjectsApi()
        with self._explained():
            groups = kubernetes.client.ApisApi().get_api_versions(**_TIMES).groups
        self._has_job_sets = any(group.name == JOB_SET_GROUP for group in groups)

    def own_image(self) -> tuple[str, list[dict[str, str]]]:
        """Return the image of the flow's own container, and the Secrets with which it is pulled.

        A service mesh may have put its container before the flow's.

        Raises:
            ValueError: If the flow does not run in a pod.

        """
        if not self._inside:
            raise ValueError("KubernetesCluster(image=...) is needed, since this flow does not run in a pod")
        with self._explained():
            pod = self._own_pod()
        images = {container.name: container.image for container in pod.spec.containers}
        named = ((pod.metadata.annotations or {}).get(_DEFAULT_CONTAINER), _PREFECTS_CONTAINER, pod.spec.containers[0].name)
        image = next(images[name] for name in named if name in images)
        return str(image), [{"name": secret.name} for secret in pod.spec.image_pull_secrets or []]

    def own_reference(self) -> dict[str, str] | None:
        """Return an owner reference to the flow's own pod; None outside of a pod, or if the pods are in another namespace."""
        if not self._inside or self._namespace != self._own_namespace:
            return None  # Kubernetes immediately deletes objects whose owner is in another namespace
        with self._explained():
            pod = self._own_pod()
        return {"apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid}

    def create(self, pods: AgentPods, key: str) -> None:
        """Create the Job or JobSet, and then the Secret, which belongs to it; the pods wait for the Secret.

        Raises:
            NotEnoughMachinesError: If a request is refused or not answered; the other object may exist.

        """
        with self._explained():
            if self._has_job_sets:
                made = self._custom.create_namespaced_custom_object(*self._job_sets(), job_set(pods), **_TIMES)
            else:
                created = self._batch.create_namespaced_job(self._namespace, job(pods), **_TIMES)
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": pods.name, "uid": created.metadata.uid}}
            self._core.create_namespaced_secret(self._namespace, secret(pods, key, made), **_TIMES)

    def delete(self, pods: AgentPods) -> None:
        """Delete the Job or JobSet, and with it its pods and the Secret; only log a failure, lest it hide another error."""
        try:
            if self._has_job_sets:
                self._custom.delete_namespaced_custom_object(*self._job_sets(), pods.name, **_DELETION)
            else:
                self._batch.delete_namespaced_job(pods.name, self._namespace, **_DELETION)
        except self.errors as exc:
            if getattr(exc, "status", None) != HTTPStatus.NOT_FOUND:  # if not found, it has been deleted already
                get_run_logger().warning("%s could not be deleted from Kubernetes: %s", pods.name, exc)

    def withdraw(self, pods: AgentPods, numbers: AbstractSet[int]) -> set[int]:
        """Delete those pods of these numbers that there are, and return the numbers that are done with.

        A number gets no other pod: a deleted one counts as failed, of which `backoffLimitPerIndex` allows none. If the flow may
        delete no pods, that is logged, and all numbers are done with.
        """
        there = {number: pod for number, pod in self._list(pods, _TIMES) if number in numbers}
        try:
            for pod in there.values():
                if pod.status.phase not in _ENDED:
                    self._core.delete_namespaced_pod(pod.metadata.name, self._namespace, **_TIMES)
        except self.errors as exc:
            if getattr(exc, "status", None) != HTTPStatus.FORBIDDEN:
                raise
            get_run_logger().warning("pods of %s that came too late stay: %s; %s", pods.name, exc, _RIGHTS)
            return set(numbers)
        return set(there)

    def problems(self, pods: AgentPods) -> dict[int, tuple[str, bool]]:
        """Return, by the pod's number, why a pod does not run yet, and whether it never will."""
        found: dict[int, tuple[str, bool]] = {}
        missing = set(range(pods.num_pods))
        for number, pod in self._list(pods, _TIMES):
            missing.discard(number)
            for status in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
                waiting = status.state.waiting
                if waiting is not None and waiting.reason:
                    found[number] = (f"{waiting.reason}: {waiting.message or ''}".strip(": "), waiting.reason in _HOPELESS)
            if pod.status.phase in _ENDED:
                found[number] = (_end(pod).reason, True)
            for condition in pod.status.conditions or []:
                if condition.reason in _UNSCHEDULABLE:
                    found[number] = (f"unschedulable: {condition.message}", False)
        refusal = self._refusal(pods) or "Kubernetes has not created it yet" if missing else ""
        return {**found, **dict.fromkeys(missing, (refusal, False))}

    def ends(self, pods: AgentPods) -> dict[int, AgentEnd]:
        """Return, by their numbers, why pods have ended, without those that are gone; wait for the answer for seconds only."""
        return {number: _end(pod) for number, pod in self._list(pods, _SHORT_TIMES) if pod.status.phase in _ENDED}

    def _list(self, pods: AgentPods, times: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Return the pods that there are, with their numbers."""
        found = self._core.list_namespaced_pod(self._namespace, label_selector=f"app={pods.name}", **times).items
        return [
            (int((pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index", -1)), pod) for pod in found
        ]

    def _refusal(self, pods: AgentPods) -> str | None:
        """Return why Kubernetes does not create pods of the Job, as far as the flow may read its events: a quota, a queue."""
        name = f"{pods.name}-{JOB_OF_SET}" if self._has_job_sets else pods.name
        of_job = f"involvedObject.kind=Job,involvedObject.name={name}"
        with suppress(*self.errors):
            events = self._core.list_namespaced_event(self._namespace, field_selector=of_job, **_TIMES).items
            why = [it for it in events if it.type == "Warning" or it.reason == _SUSPENDED]
            return f"{why[-1].reason}: {why[-1].message}" if why else None
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the error of a request as NotEnoughMachinesError: the cluster is asked again, and no user code is at fault."""
        try:
            yield
        except self.errors as exc:
            advice = f"; {_RIGHTS}" if getattr(exc, "status", None) == HTTPStatus.FORBIDDEN else ""
            raise NotEnoughMachinesError(f"Kubernetes gives no machines: {exc}{advice}") from exc

    def _job_sets(self) -> tuple[str, str, str, str]:
        return JOB_SET_GROUP, JOB_SET_VERSION, self._namespace, "jobsets"

    def _own_pod(self) -> Any:
        return self._core.read_namespaced_pod(_own_name(), self._own_namespace, **_TIMES)


def is_starting(reason: str) -> bool:
    """Return whether a pod that does not run yet, for this reason, has a machine on which it is about to."""
    return reason.partition(":")[0] in _STARTING


def _end(pod: Any) -> AgentEnd:
    """Return why a pod has ended: Kubernetes' reason, such as Evicted, else that of a container, such as OOMKilled."""
    ended = [status.state.terminated for status in pod.status.container_statuses or [] if status.state.terminated is not None]
    reasons = {it.reason for it in ended if it.exit_code and it.reason}
    of_pod = ": ".join(filter(None, [pod.status.reason, pod.status.message]))
    reason = of_pod or ", ".join(sorted(reasons)) or pod.status.phase
    return AgentEnd(f"its pod has ended: {reason}", is_out_of_memory=_OUT_OF_MEMORY in reasons)


def _own_name() -> str:
    """Return the name of the flow's own pod, from its token: with `hostNetwork`, the host name is that of the machine."""
    claims = (_ACCOUNT / "token").read_text().split(".")[1]
    bound_to = json.loads(urlsafe_b64decode(f"{claims}==")).get("kubernetes.io", {})
    return str(bound_to["pod"]["name"]) if "pod" in bound_to else socket.gethostname()  # a token of before Kubernetes 1.21
