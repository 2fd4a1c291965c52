"""Trainings on machines that real clusters lend: Ray, Dask, Slurm; and Kubernetes, as far as its API goes."""

import tempfile
import threading
from pathlib import Path

import pytest
from engine_servers import (
    HAS_SLURM,
    LOOPBACK,
    KubernetesServer,
    dask_cluster,
    ray_cluster,
    slurm_cluster,
)
from prefect_dask import DaskTaskRunner
from prefect_servers import assert_task_runs_of_ranks_are_final, wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import (
    FailureConfig,
    KubernetesCluster,
    NotEnoughMachinesError,
    RayCluster,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
    train,
)

pytestmark = pytest.mark.timeout(300)
FAILURE = FailureConfig(max_infrastructure_failures=1)
NO_FAILURE = FailureConfig(max_infrastructure_failures=0)


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="run", storage=str(tmp_path / "store"))


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pt", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def train_and_lose_a_machine(training, scaling, run, lose, *, then):
    """Train on two machines, of which one is lost after the first checkpoint; the training goes on with the other."""
    store = CheckpointStore.open(run.storage, run.name)

    def lose_after_a_checkpoint():
        wait_until(store.list, "a checkpoint", 120)
        lose()

    losing = threading.Thread(target=lose_after_a_checkpoint)
    losing.start()
    try:
        result = training("trainings:train_epochs", {"epochs": 12, "pause_s": 0.3}, scaling, run, failure=FAILURE)
    finally:
        losing.join()
    assert result.attempts == 2
    assert result.return_value["begun"] >= 1
    by_attempt = {manifest.attempt: manifest.world_size for manifest in store.list()}
    assert by_attempt == {1: 2, 2: then}
    assert_task_runs_of_ranks_are_final(run.storage)


def test_a_training_on_ray_goes_on_without_a_lost_machine(short_folder, run):
    """Also: no rank starts unless Ray has room for all."""
    with ray_cluster(short_folder) as (address, lose):
        many = ScalingConfig(num_workers=3, cluster=RayCluster(address=address, leader_address=LOOPBACK, wait_s=0))
        with pytest.raises(NotEnoughMachinesError, match=r"3 ranks wanted, the cluster has room for 2: "):
            train("trainings:train_epochs", {"epochs": 1}, many, RunConfig(storage=run.storage), failure=NO_FAILURE)
        cluster = RayCluster(address=address, leader_address=LOOPBACK, placement_strategy="SPREAD", wait_s=0)
        train_and_lose_a_machine(train, ScalingConfig(num_workers=(1, 2), cluster=cluster), run, lose, then=1)


def test_a_training_on_dask_goes_on_without_a_lost_machine(tmp_path, run):
    """The cluster is named in Prefect's own way."""
    with dask_cluster(tmp_path) as (address, lose):
        training = train.with_options(task_runner=DaskTaskRunner(address=address))
        # Without GPUs, all ranks are spread evenly over the workers that are left.
        train_and_lose_a_machine(training, ScalingConfig(num_workers=(1, 2)), run, lose, then=2)


@pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurmctld and slurmd")
def test_a_training_on_slurm(tmp_path, run, monkeypatch):
    with slurm_cluster(tmp_path) as configuration:
        monkeypatch.setenv("SLURM_CONF", configuration)
        cluster = SlurmCluster(ranks_per_node=2, leader_address=LOOPBACK)
        result = train("trainings:train_epochs", {"epochs": 1}, ScalingConfig(num_workers=2, cluster=cluster), run)
    assert result.return_value == {"begun": 0, "attempt": 1}


@pytest.mark.parametrize("knows_job_sets", [False, True])
def test_a_training_in_pods(tmp_path, run, monkeypatch, knows_job_sets):
    """Kubernetes' published schemas accept the manifests; the pods are processes here."""
    kubernetes = pytest.importorskip("kubernetes")
    server = KubernetesServer(tmp_path, knows_job_sets=knows_job_sets)
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.configuration))
    try:
        cluster = KubernetesCluster(image="own/image:1", limits={"cpu": "1"}, leader_address=LOOPBACK)
        result = train("trainings:train_epochs", {"epochs": 1}, ScalingConfig(num_workers=2, cluster=cluster), run)
    finally:
        server.stop()
    assert result.return_value == {"begun": 0, "attempt": 1}
    kind = (
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
        if knows_job_sets
        else "/apis/batch/v1/namespaces/default/jobs"
    )
    (first, second, last) = server.requests
    assert first == ("POST", kind)
    assert second == ("POST", "/api/v1/namespaces/default/secrets")
    assert (last[0], last[1].rpartition("/")[0]) == ("DELETE", kind)
