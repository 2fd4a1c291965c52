"""Trainings on machines that real clusters lend: Ray, Dask, Slurm; and Kubernetes, as far as its API goes."""

import re
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil
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
from prefect_torch.ckpt.runs.attempts import read_outcomes
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


@pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurmctld and slurmd")
def test_a_training_outlives_slurmd_and_fails_clearly_without_its_only_machine(tmp_path, run, monkeypatch):
    """In an allocation, slurmd is killed after a checkpoint, and the agent two checkpoints later; nothing of either is left."""
    store = CheckpointStore.open(run.storage, run.name)

    def disturb():
        wait_until(store.list, "a checkpoint", 120)
        psutil.Process(int((tmp_path / "slurmd.pid").read_text())).kill()
        reached = len(store.list())
        wait_until(lambda: len(store.list()) >= reached + 2, "two more checkpoints", 60)
        for agent in running("machine.agent", tmp_path):
            agent.kill()

    with slurm_cluster(tmp_path) as configuration:
        monkeypatch.setenv("SLURM_CONF", configuration)
        said = subprocess.run(["salloc", "--no-shell", "--nodes=1"], capture_output=True, text=True, check=True).stderr
        monkeypatch.setenv("SLURM_JOB_ID", re.search(r"job allocation (\d+)", said)[1])
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        cluster = SlurmCluster(ranks_per_node=2, leader_address=LOOPBACK, wait_s=0)
        scaling, config = ScalingConfig(num_workers=2, cluster=cluster), {"epochs": 1000, "pause_s": 0.1}
        reason = r"^2 ranks wanted, the cluster has room for 0: Slurm: its command ended with \d+: .*srun: error: "
        try:
            with pytest.raises(NotEnoughMachinesError, match=reason):
                train("trainings:train_epochs", config, scaling, run, failure=FAILURE)
        finally:
            disturbing.join()
    outcomes = read_outcomes(store)
    assert [(it.ending, it.kind) for it in outcomes] == [("failed", "infrastructure")] * 2
    assert "its agent is gone" in outcomes[0].error
    assert_task_runs_of_ranks_are_final(run.storage, num_attempts=1)
    wait_until(lambda: not [*running("machine.agent", tmp_path), *running("rank.main", tmp_path)], "no process of ours", 10)


def running(word: str, folder: Path) -> list[psutil.Process]:
    """Return the processes with `word` among their arguments whose Slurm is configured in `folder`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word in argument for argument in process.cmdline()):
                found += [process] if process.environ().get("SLURM_CONF", "").startswith(str(folder)) else []
    return found


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
