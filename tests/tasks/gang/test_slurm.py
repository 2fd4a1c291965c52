"""What a real Slurm of two machines, which are two slurmds of this one, lends in which case."""

import logging
import re
import subprocess
import time
from contextlib import closing

import pytest
from engine_servers import HAS_SLURM, LOOPBACK, slurm_cluster
from prefect_servers import wait_until
from prefect_torch.ckpt.runs.attempts.owner import SlurmStart
from prefect_torch.tasks import SlurmCluster
from prefect_torch.tasks.gang.engines.cluster import MachineRequest
from prefect_torch.tasks.gang.machine import avoided, lending
from prefect_torch.tasks.gang.machine import gathering as gathering_module
from prefect_torch.tasks.gang.machine.gathering import gather
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError

pytestmark = pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurmctld and slurmd")


@pytest.fixture(scope="module")
def configuration(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), "n0", "n1") as file:
        yield file


@pytest.fixture(autouse=True)
def slurm(configuration, monkeypatch):
    """Have this process outside of a job; none is left in the end."""
    monkeypatch.setenv("SLURM_CONF", configuration)
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")  # no rank is started
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    yield
    answer("scancel", "--user=root")
    wait_until(lambda: not answer("squeue", "--noheader"), "no job is left", 30)


def answer(*command):
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    return asked.stdout + asked.stderr


def test_each_machine_of_a_job_has_an_agent_whatever_tasks_the_step_of_the_flow_has(monkeypatch):
    """As a flow has them that `srun python flow.py` started, in a job with more GPUs than the machines that are left."""
    said = answer("salloc", "--no-shell", "--nodes=2")
    job = re.search(r"job allocation (\d+)", said)[1]
    step = {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS": "8"}
    for name, value in {**step, "SLURM_JOB_ID": job}.items():
        monkeypatch.setenv(name, value)
    cluster = SlurmCluster(leader_address=LOOPBACK, wait_s=30)
    with gather(cluster, MachineRequest(2, 2, use_gpu=False, avoid=frozenset())) as gathering:
        machines = gathering.wait(lambda: None)
        assert [machine.name for machine in machines] == ["n0", "n1"]
        assert [machine.place for machine in machines] == [0, 1]
        assert not gathering.missing()


@pytest.mark.parametrize("is_down", [True, False], ids=["down", "excluded"])
def test_a_job_without_one_of_its_machines_has_the_others(monkeypatch, is_down):
    """srun would start no agent at all on fewer machines than it is asked for."""
    said = answer("salloc", "--no-shell", "--no-kill", "--nodes=2")
    job = re.search(r"job allocation (\d+)", said)[1]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    if is_down:
        answer("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        cluster = SlurmCluster(leader_address=LOOPBACK, wait_s=30, srun_arguments=[] if is_down else ["--exclude=n[1]"])
        with gather(cluster, MachineRequest(1, 2, use_gpu=False, avoid=frozenset())) as gathering:
            assert [machine.name for machine in gathering.wait(lambda: None)] == ["n0"]
        why = f"^2 ranks wanted, the cluster has room for 1: the Slurm job {job} has {1 if is_down else 2} machine"
        with (
            pytest.raises(NotEnoughMachinesError, match=why),
            gather(cluster, MachineRequest(2, 2, use_gpu=False, avoid=frozenset())),
        ):
            pass
    finally:
        if is_down:
            answer("scontrol", "update", "nodename=n1", "state=resume")


@pytest.mark.parametrize("given", [[], ["--exclusive", "--cpus-per-task=1"]])
def test_an_allocation_has_an_agent_on_each_of_as_many_machines_as_there_are(given):
    cluster = SlurmCluster(leader_address=LOOPBACK, wait_s=30, srun_arguments=given)
    with gather(cluster, MachineRequest(1, 2, use_gpu=False, avoid=frozenset())) as gathering:
        assert {machine.name for machine in gathering.wait(lambda: None)} == {"n0", "n1"}
        assert not gathering.missing()


def test_a_machine_is_avoided_only_for_a_while_if_slurm_has_no_other_for_now(monkeypatch, caplog):
    """A request may wait in the queue for a day."""
    monkeypatch.setattr(avoided, "_AVOID_S", 4.0)
    monkeypatch.setattr(gathering_module, "_START_S", 0.5)
    answer("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    try:
        with closing(Machines(SlurmCluster(leader_address=LOOPBACK), 1, 1, use_gpu=False)) as machines:
            with machines.lend(lambda: None) as lease:
                assert lease.names == ("n0",)
                lease.machines[0].release()
            assert machines._avoided.ever == {"n0"}
            machines._avoided._since_s["n0"] = time.monotonic()  # not while its allocation ended, which may take as long
            with machines.lend(lambda: None) as lease:
                assert lease.names == ("n0",)
    finally:
        answer("scontrol", "update", "nodename=n1", "state=resume")
    assert "queued and waiting for resources" in caplog.text
    assert "the cluster is asked again, and may lend n0 again" in caplog.text


def test_a_job_that_is_requeued_is_another_start_of_the_same_job(tmp_path, monkeypatch):
    """By which a process knows that one of an earlier start is gone."""
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ncd {tmp_path}\nenv > told\nmv told ${{SLURM_RESTART_COUNT:-0}}\nexec sleep 600\n")
    job = answer("sbatch", "--parsable", "--requeue", "--output=/dev/null", str(script)).strip()
    starts = []
    for number in ("0", "1"):
        wait_until((tmp_path / number).exists, "the job has begun", 60)
        variables = dict(line.split("=", 1) for line in (tmp_path / number).read_text().splitlines() if "=" in line)
        for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            monkeypatch.setenv(name, variables.get(name, "0"))
        starts.append(SlurmStart.current())
        if number == "0":
            answer("scontrol", "requeue", job)
            wait_until(lambda: answer("squeue", "--noheader", "--format=%T").split() == ["PENDING"], "it waits", 30)
            answer("scontrol", "update", f"jobid={job}", "starttime=now")  # else Slurm waits for two minutes
    assert starts == [SlurmStart(f"test/{job}", 0), SlurmStart(f"test/{job}", 1)]
