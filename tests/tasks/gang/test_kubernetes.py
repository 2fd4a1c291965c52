"""What becomes of a training while Kubernetes' API is away; with the real client, and no server."""

import logging
import threading
import time
from types import SimpleNamespace

import kubernetes
import pytest
from prefect_torch.tasks.gang.engines import kubernetes_api, kubernetes_cluster
from prefect_torch.tasks.gang.engines.cluster import MachineRequest
from prefect_torch.tasks.gang.engines.kubernetes_api import KubernetesApi
from prefect_torch.tasks.gang.engines.kubernetes_cluster import KubernetesCluster
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from servers import free_port


class Asked:
    """What a cluster gets of those who ask it for machines."""

    key = "key"

    def arguments(self, name=None, slots=None):
        return ["127.0.0.1:1"]

    def expect(self, name):
        pass

    def fail(self, name, reason):
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
    monkeypatch.setattr(kubernetes.client.ApisApi, "get_api_versions", lambda self: SimpleNamespace(groups=[]))
    for name in ("CoreV1Api", "BatchV1Api", "CustomObjectsApi"):
        made = getattr(kubernetes.client, name)(client)
        monkeypatch.setattr(kubernetes.client, name, lambda made=made: made)
    return KubernetesApi(None)


WANTED = MachineRequest(1, 1, use_gpu=False, avoid=frozenset())


def test_an_api_that_is_away_at_the_end_is_told_and_hides_no_result(api, monkeypatch, caplog):
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    monkeypatch.setattr(api, "create", lambda *_: None)
    with KubernetesCluster(image="image").lend(WANTED, Asked()):
        (watch,) = (it for it in threading.enumerate() if it.name.endswith("(_watch)"))
        time.sleep(0.1)
        assert watch.is_alive()
    assert "could not be deleted from Kubernetes" in caplog.text


def test_a_secret_that_is_refused_leaves_no_job_and_the_cluster_is_asked_again(api, monkeypatch):
    called = []
    created = SimpleNamespace(metadata=SimpleNamespace(uid="uid"))
    monkeypatch.setattr(api._batch, "create_namespaced_job", lambda *_: called.append("create") or created)
    monkeypatch.setattr(api._batch, "delete_namespaced_job", lambda *_, **__: called.append("delete"))
    monkeypatch.setattr(kubernetes_cluster, "KubernetesApi", lambda _: api)
    with pytest.raises(NotEnoughMachinesError, match="Kubernetes gives no machines"):
        KubernetesCluster(image="image").lend(WANTED, Asked()).__enter__()
    assert called == ["create", "delete"]
