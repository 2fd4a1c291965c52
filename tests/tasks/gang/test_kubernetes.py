"""What becomes of a training while Kubernetes' API is away; with the real client, and no server."""

import json
import logging
import re
import socket
import threading
import time
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import kubernetes
import kubernetes_validate
import pytest
import yaml
from agents import OpenLink
from engine_servers import KubernetesServer
from prefect_servers import wait_until
from prefect_torch.tasks.gang.engines import kubernetes_api, kubernetes_cluster
from prefect_torch.tasks.gang.engines.cluster import AgentEnd, MachineRequest
from prefect_torch.tasks.gang.engines.kubernetes_api import KubernetesApi
from prefect_torch.tasks.gang.engines.kubernetes_cluster import KubernetesCluster
from prefect_torch.tasks.gang.engines.kubernetes_job import JOB_SET_GROUP, AgentPods, job, job_set
from prefect_torch.tasks.gang.machine import gathering as gathering_module
from prefect_torch.tasks.gang.machine import lending
from prefect_torch.tasks.gang.machine.avoided import AvoidedMachines
from prefect_torch.tasks.gang.machine.gathering import gather
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.gang.machine.versions import versions
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from pydantic import ValidationError
from servers import free_port

SEVERAL_MACHINES = Path(__file__).parents[3] / "docs/how-to/several-machines.md"


class Asked:
    """What a cluster gets of those who ask it for machines."""

    key, is_over = "key", False

    def arguments(self, name=None, slots=None):
        return ["127.0.0.1:1"]

    def expect(self, name):
        pass

    def fail(self, name, reason):
        pass

    def delay(self, reasons):
        pass

    def late(self):
        return set()

    def announce(self, names):
        pass

    def explain_ends(self, explain):
        pass


@pytest.fixture
def api(monkeypatch):
    """Return a connection to a Kubernetes that nobody answers for, but for what a test adds."""
    monkeypatch.setattr(kubernetes_api, "get_run_logger", lambda: logging.getLogger("kubernetes"))
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    configuration = kubernetes.client.Configuration()
    configuration.host, configuration.retries = f"http://127.0.0.1:{free_port()}", 0
    client = kubernetes.client.ApiClient(configuration)
    monkeypatch.setattr(kubernetes.config, "load_kube_config", lambda: None)
    monkeypatch.setattr(kubernetes.config, "list_kube_config_contexts", lambda: ([], {"context": {}}))
    monkeypatch.setattr(kubernetes.client.ApisApi, "get_api_versions", lambda self, **_: SimpleNamespace(groups=[]))
    for name in ("CoreV1Api", "BatchV1Api", "CustomObjectsApi"):
        made = getattr(kubernetes.client, name)(client)
        monkeypatch.setattr(kubernetes.client, name, lambda made=made: made)
    return KubernetesApi(None)


PODS = AgentPods("name", "image", 1, [], {}, {}, [], "1Gi", 60, None)
WANTED = MachineRequest(1, 1, use_gpu=False, avoid=frozenset())


def test_an_api_that_is_away_at_the_end_is_told_and_hides_no_result(api, monkeypatch, caplog):
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    monkeypatch.setattr(api, "create", lambda *_: None)
    with KubernetesCluster(image="image").lend(WANTED, Asked()):
        (watch,) = (it for it in threading.enumerate() if it.name == "pods")
        time.sleep(0.1)
        assert watch.is_alive()
    assert "could not be deleted from Kubernetes" in caplog.text


def test_an_api_that_never_answers_holds_no_training_up(api, monkeypatch, caplog):
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    monkeypatch.setattr(api, "create", lambda *_: None)
    for times in (kubernetes_api._TIMES, kubernetes_api._DELETION):
        assert times["_request_timeout"] == (10.0, 30.0)
        monkeypatch.setitem(times, "_request_timeout", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api._core.api_client.configuration.host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun_s = time.monotonic()
        with KubernetesCluster(image="image").lend(WANTED, Asked()):
            time.sleep(0.1)
        assert time.monotonic() - begun_s < 5
    assert "could not be deleted from Kubernetes" in caplog.text


def test_a_secret_that_is_refused_leaves_no_job_and_the_cluster_is_asked_again(api, monkeypatch):
    called = []
    created = SimpleNamespace(metadata=SimpleNamespace(uid="uid"))
    monkeypatch.setattr(api._batch, "create_namespaced_job", lambda *_, **__: called.append("create") or created)
    monkeypatch.setattr(api._batch, "delete_namespaced_job", lambda *_, **__: called.append("delete"))
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    with pytest.raises(NotEnoughMachinesError, match="Kubernetes gives no machines"):
        KubernetesCluster(image="image").lend(WANTED, Asked()).__enter__()
    assert called == ["create", "delete"]


def test_a_refused_request_names_the_rights_that_are_needed(api, monkeypatch):
    forbidden = kubernetes.client.ApiException(status=403, reason="Forbidden")
    monkeypatch.setattr(api._batch, "create_namespaced_job", Mock(side_effect=forbidden))
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    with pytest.raises(NotEnoughMachinesError, match="create secrets, and to get, list and delete pods"):
        KubernetesCluster(image="image").lend(WANTED, Asked()).__enter__()


@pytest.mark.parametrize("group", ["batch", JOB_SET_GROUP])
def test_the_documented_role_allows_what_is_requested_and_nothing_else(monkeypatch, tmp_path, group):
    """A manifest also where there are no JobSets, of which `kubectl create role` would say that it does not know them."""
    (role,) = re.findall(r"```yaml\n(# role\.yaml.*?)```", SEVERAL_MACHINES.read_text(), re.DOTALL)
    rules = yaml.safe_load(role)["rules"]
    allowed = {(verb, rule["apiGroups"][0], rule["resources"][0]) for rule in rules for verb in rule["verbs"]}
    requested = set()

    class Late(Asked):
        """An attempt that begins without its pod, once it is known why that is not created."""

        @property
        def is_over(self):
            return ("list", "", "events") in requested

        def late(self):
            return {"pod 0"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            api, _, below = self.path.partition("?")[0].partition("/namespaces/own/")
            resource, _, name = below.partition("/")
            verb = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "list"}[self.command]
            if resource:
                requested.add((verb, api.split("/")[2] if api.startswith("/apis/") else "", resource))
            answer = {"apiVersion": "v1", "kind": "Any", "metadata": {"name": "any", "uid": "uid"}}
            if verb == "get":
                answer["spec"] = {"containers": [{"name": "flow", "image": "registry/own:1"}]}
            if verb == "list":
                pods = [listed(0, name="late", phase="Pending")] if resource == "pods" and Late().is_over else []
                answer |= {"groups": [{"name": group, "versions": []}], "items": pods}
            body = json.dumps(answer).encode()
            self.send_response(201 if self.command == "POST" else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET  # noqa: N815 - names of the base class

        def log_message(self, *_):
            pass

    own_pod(tmp_path, {"kubernetes.io": {"pod": {"name": "flow"}}})
    monkeypatch.setattr(kubernetes_api, "_ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    configuration = kubernetes.client.Configuration()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        configuration.host = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setattr(kubernetes.client.Configuration, "_default", configuration)
        with KubernetesCluster().lend(WANTED, Late()):
            wait_until(lambda: ("delete", "", "pods") in requested, lambda: requested)
        http.shutdown()
    other = "jobs" if group == JOB_SET_GROUP else "jobsets"
    assert requested == {right for right in allowed if right[2] != other}


def own_pod(account, claims):
    """Write the service account's files as a pod has them."""
    (account / "namespace").write_text("own")
    payload = urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    (account / "token").write_text(f"header.{payload}.signature")


@pytest.mark.parametrize(
    ("names", "annotations", "image"),
    [
        (["linkerd-proxy", "prefect-job"], None, "registry/prefect-job"),
        (["istio-proxy", "flow", "logs"], {"kubectl.kubernetes.io/default-container": "flow"}, "registry/flow"),
        (["flow", "istio-proxy"], {"kubectl.kubernetes.io/default-container": "gone"}, "registry/flow"),
    ],
)
def test_the_image_is_that_of_the_flow_beside_the_containers_of_a_service_mesh(
    api, monkeypatch, tmp_path, names, annotations, image
):
    """It is pulled with the Secrets of the flow's pod; those of `pod_spec` are appended, as for the image of a sidecar."""
    own_pod(tmp_path, {})
    secrets = [kubernetes.client.V1LocalObjectReference(name="registry")]
    containers = [SimpleNamespace(name=name, image=f"registry/{name}") for name in names]
    pod = SimpleNamespace(
        metadata=SimpleNamespace(name="flow", uid="7", annotations=annotations),
        spec=SimpleNamespace(containers=containers, image_pull_secrets=secrets),
    )
    monkeypatch.setattr(kubernetes_api, "_ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    monkeypatch.setattr(api._core, "read_namespaced_pod", lambda *_, **__: pod)
    created = []
    monkeypatch.setattr(KubernetesApi, "create", lambda _, pods, key: created.append(job(pods)["spec"]["template"]["spec"]))
    monkeypatch.setattr(KubernetesApi, "delete", lambda *_: None)
    monkeypatch.setattr(KubernetesApi, "problems", lambda *_: {})
    for given in ({}, {"imagePullSecrets": [{"name": "other"}]}):
        with KubernetesCluster(pod_spec=given).lend(WANTED, Asked()):
            pass
    assert [pod["containers"][0]["image"] for pod in created] == [image, image]
    assert [pod["imagePullSecrets"] for pod in created] == [
        [{"name": "registry"}],
        [{"name": "registry"}, {"name": "other"}],
    ]


def test_outside_of_a_pod_and_without_a_kubeconfig_there_is_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    with pytest.raises(
        ValueError,
        match=r"^outside of a pod, KubernetesCluster needs a kubeconfig with a current context: Invalid kube-config file",
    ):
        KubernetesApi(None)


def test_outside_of_a_pod_an_image_is_needed(api, monkeypatch):
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    with pytest.raises(ValueError, match=r"KubernetesCluster\(image=\.\.\.\) is needed"):
        KubernetesCluster().lend(WANTED, Asked()).__enter__()


def test_pods_have_the_fields_that_they_are_given_beside_ours(api, monkeypatch):
    created = []
    made = SimpleNamespace(metadata=SimpleNamespace(uid="uid"))
    monkeypatch.setattr(api._batch, "create_namespaced_job", lambda _, job, **__: created.append(job) or made)
    monkeypatch.setattr(api._batch, "delete_namespaced_job", lambda *_, **__: None)
    monkeypatch.setattr(api._core, "create_namespaced_secret", lambda *_, **__: None)
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    spot = {"key": "spot", "operator": "Exists"}
    cluster = KubernetesCluster(
        image="image",
        limits={"nvidia.com/gpu": "8", "memory": "200Gi"},
        node_selector={"zone": "a"},
        labels={"kueue.x-k8s.io/queue-name": "gpus"},
        annotations={"sidecar.istio.io/inject": "false"},
        pod_spec={
            "serviceAccountName": "trainings",
            "tolerations": [spot],
            "nodeSelector": {"gpu": "h100"},
            "hostNetwork": True,
        },
        container_spec={
            "resources": {"requests": {"cpu": "4"}},
            "env": [{"name": "A", "value": "1"}],
            "imagePullPolicy": "Always",
        },
    )
    with cluster.lend(MachineRequest(1, 1, use_gpu=True, avoid=frozenset({"node-1/0"})), Asked()):
        (job,) = created
    kubernetes_validate.validate(job, "1.31", strict=True)
    of_pod, pod = job["spec"]["template"]["metadata"], job["spec"]["template"]["spec"]
    for metadata, ours in ((job["metadata"], "app.kubernetes.io/managed-by"), (of_pod, "app")):
        assert metadata["labels"].keys() == {ours, "kueue.x-k8s.io/queue-name"}
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert metadata["annotations"] == {"sidecar.istio.io/inject": "false"}
    (container,) = pod["containers"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, spot]
    assert (pod["serviceAccountName"], pod["hostNetwork"], pod["restartPolicy"]) == ("trainings", True, "Never")
    assert pod["nodeSelector"] == {"zone": "a", "gpu": "h100"}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "memory": "200Gi"}, "requests": {"cpu": "4"}}
    assert [it["name"] for it in container["env"]] == ["NODE_NAME", "INDEX", "PREFECT_TORCH_AGENT_KEY", "A"]
    assert container["imagePullPolicy"] == "Always"


def test_avoided_machines_are_excluded_by_name_from_each_alternative_of_the_pods_own_affinity():
    """One of the alternatives has to match: another one of ours would replace theirs, or theirs ours."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": zones[0]}]}
    own = {"nodeAffinity": {**preferred, required: {"nodeSelectorTerms": zones}}, "podAntiAffinity": {}}
    pods = replace(PODS, avoid=["node-1", "node-2"], pod_spec={"affinity": own})
    manifest = job(pods)
    kubernetes_validate.validate(manifest, "1.31", strict=True)
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("node-1", "node-2")]
    assert manifest["spec"]["template"]["spec"]["affinity"] == {
        "nodeAffinity": {**preferred, required: {"nodeSelectorTerms": [{**zone, "matchFields": excluded} for zone in zones]}},
        "podAntiAffinity": {},
    }
    alone = job(replace(pods, pod_spec={}))["spec"]["template"]["spec"]["affinity"]
    assert alone == {"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchFields": excluded}]}}}


def test_a_job_set_has_the_labels_by_which_a_queue_admits_it():
    metadata = job_set(replace(PODS, labels={"kueue.x-k8s.io/queue-name": "gpus"}, annotations={"team": "a"}))["metadata"]
    assert metadata["labels"] == {"kueue.x-k8s.io/queue-name": "gpus", "app.kubernetes.io/managed-by": "prefect-torch"}
    assert metadata["annotations"] == {"team": "a"}


@pytest.mark.parametrize(
    "claims", [{"kubernetes.io": {"namespace": "own", "pod": {"name": "flow-1", "uid": "7"}}}, {"sub": "a"}]
)
def test_the_flows_own_pod_is_found_where_the_host_name_is_the_machines(api, monkeypatch, tmp_path, claims):
    """As in a pod with hostNetwork; only its token has its name."""
    own_pod(tmp_path, claims)
    asked = []
    pod = SimpleNamespace(metadata=SimpleNamespace(name="flow-1", uid="7"))
    monkeypatch.setattr(kubernetes_api, "_ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    monkeypatch.setattr(api._core, "read_namespaced_pod", lambda *named, **_: asked.append(named) or pod)
    assert KubernetesApi(None).own_reference()["uid"] == "7"
    assert asked == [("flow-1" if "kubernetes.io" in claims else socket.gethostname(), "own")]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("pod_spec", {"containers": []}),
        ("container_spec", {"image": "x", "command": ["sh"]}),
        ("labels", {"app": "x", "app.kubernetes.io/managed-by": "x"}),
    ],
)
def test_a_field_of_the_pods_that_is_ours_is_refused(field, given):
    with pytest.raises(ValidationError, match=f"{field} has {', '.join(sorted(given))}, which this package sets"):
        KubernetesCluster(**{field: given})


CONTAINER = {"name": "it", "image": "image", "imageID": "", "ready": False, "restartCount": 0}


def listed(number, name="pod", **status):
    """Return a pod as Kubernetes lists it."""
    annotations = {"batch.kubernetes.io/job-completion-index": str(number)}
    return {"metadata": {"name": name, "annotations": annotations}, "status": status}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}


def waiting(reason, message):
    return [{**CONTAINER, "state": {"waiting": {"reason": reason, "message": message}}}]


def terminated(reason, exit_code):
    return [{**CONTAINER, "state": {"terminated": {"reason": reason, "exitCode": exit_code}}}]


@pytest.mark.parametrize(
    ("kind", "reason", "message"),
    [("Warning", "FailedCreate", "exceeded quota: requests.nvidia.com/gpu"), ("Normal", "Suspended", "Job suspended")],
)
def test_each_pod_that_does_not_run_says_why_and_one_that_is_not_created_too(tmp_path, monkeypatch, kind, reason, message):
    server = KubernetesServer(tmp_path, knows_job_sets=False)
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.configuration))
    server.listed = {
        "pods": [
            listed(0, conditions=[UNSCHEDULABLE]),
            listed(1, initContainerStatuses=waiting("ImagePullBackOff", "no such image")),
            listed(2, phase="Running"),
            listed(4, phase="Pending", conditions=[{**UNSCHEDULABLE, "reason": "SchedulingGated", "message": "by a queue"}]),
        ],
        "events": [
            {"metadata": {"name": name}, "involvedObject": {"kind": "Job", "name": "job"}, **event}
            for name, event in {
                "event-1": {"type": kind, "reason": reason, "message": message},
                "event-2": {"type": "Normal", "reason": "SuccessfulCreate", "message": "Created pod: job-0"},
            }.items()
        ],
    }
    try:
        problems = KubernetesApi(None).problems(replace(PODS, num_pods=5))
        server.listed["events"] = []  # or the flow may not read them
        unknown = KubernetesApi(None).problems(replace(PODS, num_pods=5))
    finally:
        server.stop()
    assert problems == {
        0: ("unschedulable: 0/3 nodes are available", False),
        1: ("ImagePullBackOff: no such image", True),
        3: (f"{reason}: {message}", False),
        4: ("unschedulable: by a queue", False),
    }
    assert unknown[3] == ("Kubernetes has not created it yet", False)


def test_a_pod_that_has_ended_says_why(tmp_path, monkeypatch):
    server = KubernetesServer(tmp_path, knows_job_sets=False)
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.configuration))
    server.listed["pods"] = [
        listed(0, phase="Failed", containerStatuses=[*terminated("OOMKilled", 137), *terminated("Completed", 0)]),
        listed(1, phase="Failed", reason="Evicted", message="low on resource: ephemeral-storage"),
        listed(2, phase="Running", containerStatuses=terminated("OOMKilled", 137)),
        listed(3, phase="Succeeded"),
    ]
    try:
        api = KubernetesApi(None)
        ends = api.ends(PODS)
    finally:
        server.stop()
    assert ends == {
        0: AgentEnd("its pod has ended: OOMKilled", is_out_of_memory=True),
        1: AgentEnd("its pod has ended: Evicted: low on resource: ephemeral-storage"),
        3: AgentEnd("its pod has ended: Succeeded"),
    }


@pytest.fixture
def explain(api, monkeypatch):
    """Return what a cluster with the pods of `api` is asked why an agent has ended; nothing else lists them meanwhile."""
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 600.0)
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    monkeypatch.setattr(api, "create", lambda *_: None)
    monkeypatch.setattr(api, "delete", lambda *_: None)
    asked = Asked()
    asked.explain_ends = Mock()
    with KubernetesCluster(image="image").lend(WANTED, asked):
        yield asked.explain_ends.call_args.args[0]


def test_pods_that_end_together_are_listed_once(api, explain, monkeypatch):
    """All ranks may run out of memory in the same step: a listing for each of 500 pods has 500 pods."""
    monkeypatch.setattr(kubernetes_cluster, "_END_POLL_S", 600.0)
    status = SimpleNamespace(phase="Failed", reason="Evicted", message=None, container_statuses=None)
    annotations = [{"batch.kubernetes.io/job-completion-index": str(number)} for number in range(20)]
    pods = [SimpleNamespace(metadata=SimpleNamespace(annotations=it), status=status) for it in annotations]
    listing = Mock(return_value=SimpleNamespace(items=pods))
    monkeypatch.setattr(api._core, "list_namespaced_pod", listing)
    with ThreadPoolExecutor(20) as machines:
        ends = list(machines.map(explain, [f"node/{number}" for number in range(20)]))
    assert ends == [AgentEnd("its pod has ended: Evicted")] * 20
    assert listing.call_count == 1


def test_an_api_that_never_answers_leaves_the_end_of_a_pod_unexplained_within_seconds(api, explain, monkeypatch):
    """No attempt follows before, and the client tries four times."""
    assert kubernetes_api._SHORT_TIMES["_request_timeout"] == (2.0, 3.0)
    monkeypatch.setitem(kubernetes_api._SHORT_TIMES, "_request_timeout", (0.2, 0.2))
    monkeypatch.setattr(kubernetes_cluster, "_END_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api._core.api_client.configuration.host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun_s = time.monotonic()
        assert explain("node/0") is None
        assert time.monotonic() - begun_s < 20


@pytest.mark.parametrize("reason", ["OOMKilled", "Evicted"])
def test_the_loss_of_a_pod_says_why_it_ended_and_one_without_memory_is_no_reason_to_avoid_its_machine(monkeypatch, reason):
    """The kernel kills all processes of a container together, so that no agent is left to count it."""
    is_out_of_memory = reason == "OOMKilled"
    pods = Pods({}, [{}, {0: AgentEnd(reason, is_out_of_memory=is_out_of_memory)}])
    monkeypatch.setattr(kubernetes_cluster, "_END_S", 60.0)
    monkeypatch.setattr(kubernetes_cluster, "_END_POLL_S", 0.01)
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: pods)
    with gather(KubernetesCluster(image="image", leader_address="127.0.0.1"), WANTED) as gathering:
        link = OpenLink()
        gathering._enter(link, {"name": "node/0", "address": "127.0.0.1", "versions": versions(), "slots": 1})
        (machine,) = gathering.wait(lambda: None)
        rank = machine.run("any", None, None)
        link.close()
        for _ in range(2):  # the cluster is asked once
            result = rank.finish()
            assert result.kind == ("out_of_memory" if is_out_of_memory else "infrastructure")
            assert result.error == f"its machine node/0 is lost: its agent is gone: closed: {reason}"
    avoided = AvoidedMachines(lambda name: name)
    assert avoided.record_losses([machine]) == {"node/0"}
    assert avoided.now == (set() if is_out_of_memory else {"node/0"})


def test_the_reason_for_which_a_pod_does_not_come_is_logged_and_part_of_the_error(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: Pods({0: ("unschedulable: 0/3 nodes", False)}))
    monkeypatch.setattr(gathering_module, "_START_S", 1.0)
    cluster = KubernetesCluster(image="image", leader_address="127.0.0.1", wait_s=0)
    with (
        pytest.raises(NotEnoughMachinesError, match="pod 0: its agent did not come within 1 s: unschedulable: 0/3 nodes"),
        Machines(cluster, 1, 1, use_gpu=False).lend(lambda: None),
    ):
        pass
    assert caplog.text.count("pod 0 has not come yet: unschedulable: 0/3 nodes") == 1


class Pods:
    """A Kubernetes that has created the pods, of which some have problems."""

    errors = ()

    def __init__(self, problems, ends=()):
        self._problems, self._ends = problems, iter(ends)

    def own_reference(self):
        return None

    def create(self, pods, key):
        pass

    def problems(self, pods):
        return self._problems

    def ends(self, pods):
        return next(self._ends)

    def delete(self, pods):
        pass


@pytest.mark.parametrize("reason", ["ContainerCreating", "unschedulable: 0/3 nodes", "Kubernetes has not created it yet"])
def test_a_pod_that_pulls_its_image_is_awaited_and_one_that_has_no_machine_is_not(monkeypatch, reason):
    """Where the other one suffices: a machine that is found takes minutes at most, and one that is not may take days."""
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    pods = Pods({})
    pods.problems = Mock(return_value={1: (reason, False)})
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: pods)
    monkeypatch.setattr(gathering_module, "_MORE_S", 0.0)
    cluster, request = KubernetesCluster(image="image", leader_address="127.0.0.1"), replace(WANTED, most=2)
    with gather(cluster, request) as gathering:
        wait_until(lambda: pods.problems.call_count > 1, "the leader knows what the first look has found")
        gathering._enter(OpenLink(), hello_of(0))
        looks = []

        def look():
            looks.append(gathering)
            if len(looks) == 4 and reason == "ContainerCreating":
                gathering._enter(OpenLink(), hello_of(1))

        names = [machine.name for machine in gathering.wait(look)]
        assert names == (["node/0", "node/1"] if reason == "ContainerCreating" else ["node/0"])


def hello_of(number):
    return {"name": f"node/{number}", "address": "127.0.0.1", "versions": versions(), "slots": 1}


def test_pods_are_looked_at_only_while_agents_are_awaited(monkeypatch):
    """Not every two seconds for as long as a training takes."""

    def watches():
        return [it for it in threading.enumerate() if it.name == "pods"]

    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: Pods({}))
    with gather(KubernetesCluster(image="image", leader_address="127.0.0.1"), WANTED) as gathering:
        assert watches()
        hello = {"name": "node/0", "address": "127.0.0.1", "versions": versions(), "slots": 1}
        gathering._enter(OpenLink(), hello)
        assert gathering.wait(lambda: None)
        wait_until(lambda: not watches(), "no pod is looked at")


@pytest.mark.parametrize(
    ("come", "without_gpu", "ended", "missing"),
    [
        ([2, 0, 1], [], [3], ["pod 3: its pod has ended: Evicted"]),
        ([3, 2, 1, 0], [], [], []),
        ([2, 1], [3], [0], ["pod 0: its pod has ended: Evicted", f"pod 3: {gathering_module._NO_GPU}"]),
    ],
)
def test_no_pod_is_awaited_once_each_has_come_or_failed_and_only_those_that_failed_are_missing(
    monkeypatch, come, without_gpu, ended, missing
):
    """An agent's name begins with the machine, which Kubernetes chooses."""
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    monkeypatch.setattr(
        kubernetes_cluster, "KubernetesApi", lambda _: Pods(dict.fromkeys(ended, ("its pod has ended: Evicted", True)))
    )
    monkeypatch.setattr(gathering_module, "_START_S", 5.0)
    cluster = KubernetesCluster(image="image", leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(4, 4, use_gpu=False, avoid=frozenset())) as gathering:
        for number in [*without_gpu, *come]:
            hello = {"name": f"node-{9 - number}/{number}", "address": "127.0.0.1", "versions": versions()}
            gathering._enter(OpenLink(), {**hello, "slots": int(number in come)})
        machines = gathering.wait(lambda: None, everyone=True)
        assert [machine.name for machine in machines] == [f"node-{9 - number}/{number}" for number in sorted(come)]
        assert sorted(gathering.missing()) == missing


def test_a_pod_that_has_not_come_when_the_attempt_begins_is_deleted(tmp_path, monkeypatch):
    """While it is pending, a machine is bought for it, or pods of others are evicted; one that has ended keeps its log."""
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")  # no rank is started
    monkeypatch.setattr(kubernetes_cluster, "_POLL_S", 0.01)
    monkeypatch.setattr(gathering_module, "_MORE_S", 0.0)
    server = KubernetesServer(tmp_path, knows_job_sets=False)
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.configuration))
    server.pending = {1, 2}
    server.listed["pods"] = [
        listed(0, name="job-0", phase="Pending"),  # Kubernetes says a moment later that it runs
        listed(1, name="job-1", phase="Pending", conditions=[UNSCHEDULABLE]),
        listed(2, name="job-2", phase="Failed"),
    ]
    try:
        with gather(KubernetesCluster(image="own/image:1", leader_address="127.0.0.1"), replace(WANTED, most=3)) as gathering:
            (machine,) = gathering.wait(lambda: None)
            wait_until(lambda: not any(it.name == "pods" for it in threading.enumerate()), lambda: server.requests)
            assert machine.lost is None
    finally:
        server.stop()
    deleted = [path for method, path in server.requests if method == "DELETE"]
    assert deleted[:-1] == ["/api/v1/namespaces/team/pods/job-1"]


def test_a_pod_that_is_created_after_the_attempt_has_begun_is_deleted_then(monkeypatch):
    """As beyond a quota, once others have ended. An API that is away is asked again."""
    monkeypatch.setattr(kubernetes_cluster, "_LATE_POLL_S", 0.01)
    done = Mock(side_effect=[OSError, set(), {1}, {0}])
    kubernetes_cluster._withdraw(SimpleNamespace(errors=(), withdraw=done), PODS, {0, 1}, threading.Event())
    assert done.call_count == 4


def test_an_attempt_goes_on_if_its_flow_may_delete_no_pods(api, monkeypatch, caplog):
    """As with a role of before, which allowed no more than the other requests."""
    pod = SimpleNamespace(metadata=SimpleNamespace(name="it"), status=SimpleNamespace(phase="Pending"))
    monkeypatch.setattr(KubernetesApi, "_list", lambda *_: [(1, pod), (2, pod)])
    refuse = Mock(side_effect=kubernetes.client.ApiException(status=403, reason="Forbidden"))
    monkeypatch.setattr(api._core, "delete_namespaced_pod", refuse)
    assert api.withdraw(PODS, {1, 2, 3}) == {1, 2, 3}
    assert refuse.call_count == 1
    assert "must be allowed to create" in caplog.text
