"""Trainings on machines that real clusters lend: Ray, Dask, Slurm; and Kubernetes, as far as its API goes."""

import re
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from agents import WITHOUT_COMPILER
from engine_servers import (
    HAS_SLURM,
    LOOPBACK,
    KubernetesServer,
    dask_cluster,
    drain_node_of_ray,
    ray_cluster,
    slurm_cluster,
)
from prefect_servers import assert_task_runs_of_ranks_are_final, wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.flows import (
    DaskCluster,
    FailureConfig,
    KubernetesCluster,
    NotEnoughMachinesError,
    RankFailedError,
    RayCluster,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
    train,
)

pytestmark = pytest.mark.timeout(300)
FAILURE = FailureConfig(max_infrastructure_failures=1)
NO_FAILURE = FailureConfig(max_infrastructure_failures=0, max_preemptions=0)


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    """Yield the address of a cluster of one worker, the nanny of that, and what starts more."""
    with dask_cluster(tmp_path_factory.mktemp("dask")) as (address, start):
        (first,) = start("first")
        yield address, first, start


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pt", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def train_and_lose_machines(training, scaling, run, told, losses, world_sizes):
    """Train; in epoch k of the k-th attempt, in which its ranks wait, the k-th of the losses comes."""
    moments = [f"{number}-{number}" for number in range(1, len(losses) + 1)]

    def lose():
        for moment, lose_one in zip(moments, losses, strict=True):
            wait_until((told / moment).exists, f"epoch and attempt {moment}")
            lose_one()

    config = {"epochs": len(losses) + 2, "told": str(told), "waits": dict.fromkeys(moments, "never")}
    failure = FailureConfig(max_infrastructure_failures=len(losses))
    with ThreadPoolExecutor(1) as loser:
        losing = loser.submit(lose)
        result = training("machine_trainings:train_exactly", config, scaling, run, failure=failure)
        losing.result()
    assert result.return_value["begun"] == len(losses)
    assert result.return_value["attempt"] == len(losses) + 1
    assert [attempt.world_size for attempt in list_attempts(CheckpointStore.open(run.storage, run.name))] == world_sizes
    assert_task_runs_of_ranks_are_final(run.storage)


def kill(daemon: psutil.Process) -> None:
    """Kill a process; return when none of the agent, guards and ranks below it is left."""
    ours = [below for below in daemon.children(recursive=True) if "prefect_torch" in words_of(below)]
    assert len(ours) >= 3
    daemon.kill()
    assert not psutil.wait_procs(ours, 30)[1]


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it has ended meanwhile
        return " ".join(process.cmdline())
    return ""


def test_a_training_on_ray_goes_on_without_the_machine_of_a_killed_raylet(short_folder, run, tmp_path):
    """Also: no rank starts unless Ray has room for all; and Ray reserves memory, too."""
    with ray_cluster(short_folder) as (address, second):
        many = ScalingConfig(num_workers=3, cluster=RayCluster(address=address, leader_address=LOOPBACK, wait_s=0))
        with pytest.raises(NotEnoughMachinesError, match=r"3 ranks wanted, the cluster has room for 2: "):
            train("trainings:train_epochs", {"epochs": 1}, many, RunConfig(storage=run.storage), failure=NO_FAILURE)
        cluster = RayCluster(
            address=address,
            resources_per_worker={"CPU": 1, "memory": 1e8},
            leader_address=LOOPBACK,
            placement_strategy="SPREAD",
            wait_s=0,
            environment=WITHOUT_COMPILER,
        )
        (raylet,) = [child for child in second.children() if child.name() == "raylet"]
        scaling = ScalingConfig(num_workers=(1, 2), cluster=cluster)
        train_and_lose_machines(train, scaling, run, tmp_path, [lambda: kill(raylet)], [2, 1])


def test_a_training_on_ray_leaves_a_machine_that_ray_drains_with_a_last_checkpoint(short_folder, run, tmp_path):
    """No work is lost, and no budget of failures pays for it."""
    config = {"epochs": 3, "told": str(tmp_path), "waits": {"1-1": "never"}}
    failure = FailureConfig(max_infrastructure_failures=0, max_preemptions=1)

    def drain(address):
        wait_until((tmp_path / "1-1").exists, "the second epoch")
        drain_node_of_ray(address, "second")

    with ray_cluster(short_folder) as (address, _), ThreadPoolExecutor(1) as other:
        cluster = RayCluster(
            address=address, leader_address=LOOPBACK, placement_strategy="SPREAD", wait_s=0, environment=WITHOUT_COMPILER
        )
        draining = other.submit(drain, address)
        scaling = ScalingConfig(num_workers=(1, 2), cluster=cluster)
        result = train("machine_trainings:train_exactly", config, scaling, run, failure=failure)
        draining.result()
    assert [attempt.world_size for attempt in list_attempts(CheckpointStore.open(run.storage, run.name))] == [2, 1]
    assert result.return_value["begun"] == 2


def test_a_training_on_dask_goes_on_without_a_killed_nanny_and_with_a_restarted_worker(dask, tmp_path, run):
    """The cluster is named in Prefect's own way. A worker ends with its nanny; a nanny starts its worker again."""
    from prefect_dask import DaskTaskRunner  # noqa: PLC0415 - it imports Dask: in one worker of the tests, not in each

    address, first, start = dask
    (second,) = start("second")
    training = train.with_options(task_runner=DaskTaskRunner(address=address))
    losses = [lambda: kill(second), lambda: kill(worker_of(first))]
    # Without GPUs, all ranks are spread evenly over the workers that are left.
    train_and_lose_machines(training, ScalingConfig(num_workers=(1, 2)), run, tmp_path, losses, [2, 2, 2])


def test_a_training_on_dask_goes_on_with_a_worker_that_comes_later(dask, tmp_path, run):
    """Its first attempt waits for that, on the one that the test before has left; no budget pays for its end."""
    address, _, start = dask

    def grow():
        wait_until((tmp_path / "1-1").exists, "an attempt on the first worker")
        start("third")

    with ThreadPoolExecutor(1) as other:
        grown = other.submit(grow)
        cluster = DaskCluster(address=address, ranks_per_worker=1, leader_address=LOOPBACK, wait_s=0)
        scaling = ScalingConfig(num_workers=(1, 2), cluster=cluster, regrow_after_s=0.5)
        config = {"epochs": 3, "told": str(tmp_path), "waits": {"1-1": "never"}}
        result = train("machine_trainings:train_exactly", config, scaling, run, failure=NO_FAILURE)
        grown.result()
    assert (result.return_value["begun"], result.return_value["world size"]) == (2, 2)
    store = CheckpointStore.open(run.storage, run.name)
    assert [attempt.world_size for attempt in list_attempts(store)] == [1, 2]
    assert [(it.ending, it.kind) for it in read_outcomes(store)] == [("preempted", None), ("completed", None)]


def worker_of(nanny: psutil.Process) -> psutil.Process:
    (worker,) = [child for child in nanny.children() if "spawn_main" in words_of(child)]
    return worker


@pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurmctld and slurmd")
def test_a_training_on_slurm(tmp_path, run, monkeypatch):
    with slurm_cluster(tmp_path, "n0") as configuration:
        monkeypatch.setenv("SLURM_CONF", configuration)
        cluster = SlurmCluster(ranks_per_node=2, leader_address=LOOPBACK, environment=WITHOUT_COMPILER)
        result = train("trainings:train_epochs", {"epochs": 1}, ScalingConfig(num_workers=2, cluster=cluster), run)
    assert result.return_value == {"begun": 0, "attempt": 1}


@pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurmctld and slurmd")
def test_a_training_outlives_slurmd_and_fails_clearly_without_its_only_machine(tmp_path, run, monkeypatch):
    """In an allocation, slurmd is killed after a checkpoint, and the agent two checkpoints later; nothing of either is left."""
    store = CheckpointStore.open(run.storage, run.name)

    def disturb():
        wait_until(store.list, "a checkpoint", 120)
        psutil.Process(int((tmp_path / "slurmd-n0.pid").read_text())).kill()
        reached = len(store.list())
        wait_until(lambda: len(store.list()) >= reached + 2, "two more checkpoints", 60)
        for agent in running("machine.agent", tmp_path):
            agent.kill()

    with slurm_cluster(tmp_path, "n0") as configuration:
        monkeypatch.setenv("SLURM_CONF", configuration)
        said = subprocess.run(["salloc", "--no-shell", "--nodes=1"], capture_output=True, text=True, check=True).stderr
        monkeypatch.setenv("SLURM_JOB_ID", re.search(r"job allocation (\d+)", said)[1])
        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        cluster = SlurmCluster(ranks_per_node=2, leader_address=LOOPBACK, wait_s=0, environment=WITHOUT_COMPILER)
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
        cluster = KubernetesCluster(
            image="own/image:1",
            limits={"cpu": "1"},
            leader_address=LOOPBACK,
            environment=WITHOUT_COMPILER,
            pod_spec={
                "serviceAccountName": "trainings",
                "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            },
            container_spec={
                "env": [{"name": "OF_THE_POD", "value": "yes"}],
                "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
            },
        )
        result = train("trainings:train_epochs", {"epochs": 1}, ScalingConfig(num_workers=2, cluster=cluster), run)
    finally:
        server.stop()
    assert result.return_value == {"begun": 0, "attempt": 1}
    kind = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets" if knows_job_sets else "/apis/batch/v1/namespaces/team/jobs"
    (first, second, last) = server.requests
    assert first == ("POST", kind)
    assert second == ("POST", "/api/v1/namespaces/team/secrets")
    assert (last[0], last[1].rpartition("/")[0]) == ("DELETE", kind)


def test_a_pod_that_was_killed_for_lack_of_memory_is_the_cause_before_the_ranks_that_it_disconnects(tmp_path, run, monkeypatch):
    """It counts as out of memory, of which no restart is allowed here; Kubernetes says so a moment later."""
    kubernetes = pytest.importorskip("kubernetes")
    server = KubernetesServer(tmp_path, knows_job_sets=False)
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(server.configuration))
    store = CheckpointStore.open(run.storage, run.name)
    terminated = {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    container = {"name": "agent", "image": "image", "imageID": "", "ready": False, "restartCount": 0, **terminated}
    annotations = {"batch.kubernetes.io/job-completion-index": "1"}

    def run_out_of_memory():
        wait_until(store.list, "a checkpoint", 120)
        server.pods[1].kill()
        server.pods[1].wait(20)
        server.listed["pods"] = [
            {"metadata": {"annotations": annotations}, "status": {"phase": "Failed", "containerStatuses": [container]}}
        ]

    try:
        cluster = KubernetesCluster(image="own/image:1", leader_address=LOOPBACK, environment=WITHOUT_COMPILER)
        scaling, config = ScalingConfig(num_workers=2, cluster=cluster), {"epochs": 1000, "pause_s": 0.1}
        with ThreadPoolExecutor(1) as other:
            running_out = other.submit(run_out_of_memory)
            with pytest.raises(
                RankFailedError, match=r"machine node-1/1 is lost: its agent is gone: .*: its pod has ended: OOMK"
            ):
                train("trainings:train_epochs", config, scaling, run, failure=FAILURE)
            running_out.result()
    finally:
        server.stop()
    assert [(it.ending, it.kind) for it in read_outcomes(store)] == [("failed", "out_of_memory")]
