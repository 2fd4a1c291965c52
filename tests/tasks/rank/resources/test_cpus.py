"""How many CPUs a rank may use, and which, on machines that files describe."""

import os
import subprocess
import sys

import pytest
from prefect_torch.tasks.rank.resources import cpus as cpus_module
from prefect_torch.tasks.rank.resources.cpus import count_cpus

HERE = len(os.sched_getaffinity(0))


def be_in(machine, cgroup, mount):
    (machine / "self").mkdir(exist_ok=True)
    (machine / "self/cgroup").write_text(cgroup)
    (machine / "self/mountinfo").write_text(f"25 1 0:22 / {machine}/proc rw - proc proc rw\n31 23 0:28 {mount}\n")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_they_are_those_of_the_affinity(tmp_path):
    assert count_cpus(tmp_path) == HERE
    module = "prefect_torch.tasks.rank.resources"
    here = f"import os; os.sched_setaffinity(0, {{0}}); from {module} import cpus; print(cpus.count_cpus())"
    assert subprocess.run([sys.executable, "-c", here], capture_output=True, check=True, text=True).stdout == "1\n"


@pytest.mark.skipif(HERE < 2, reason="a limit of one CPU is none on one CPU")
@pytest.mark.parametrize(("quota", "cpus"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", HERE)])
def test_a_containers_limit_counts(quota, cpus, tmp_path):
    be_in(tmp_path, "0::/\n", f"/ {tmp_path}/fs rw - cgroup2 cgroup rw")
    write(tmp_path / "fs/cpu.max", quota)
    assert count_cpus(tmp_path) == cpus


@pytest.mark.skipif(HERE < 2, reason="a limit of one CPU is none on one CPU")
def test_the_limit_of_a_pod_counts_for_its_containers(tmp_path):
    be_in(tmp_path, "0::/pod/container\n", f"/ {tmp_path}/fs rw - cgroup2 cgroup rw")
    write(tmp_path / "fs/pod/container/cpu.max", "max 100000")
    write(tmp_path / "fs/pod/cpu.max", "100000 100000")
    assert count_cpus(tmp_path) == 1


@pytest.mark.skipif(HERE < 2, reason="a limit of one CPU is none on one CPU")
@pytest.mark.parametrize(("quota", "cpus"), [("100000", 1), ("-1", HERE)])
def test_version_1_of_cgroups_limits_too(quota, cpus, tmp_path):
    be_in(tmp_path, "4:cpu,cpuacct:/docker/1f\n0::/\n", f"/docker/1f {tmp_path}/fs rw - cgroup cgroup rw,cpu,cpuacct")
    write(tmp_path / "fs/cpu.cfs_quota_us", quota)
    write(tmp_path / "fs/cpu.cfs_period_us", "100000")
    assert count_cpus(tmp_path) == cpus


STAY_NEAR = """
import os, sys, threading
from pathlib import Path
from prefect_torch.tasks.rank.resources.cpus import stay_near
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
cpus = stay_near(sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[1]))
print(cpus, sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(other.native_id)))
"""


@pytest.mark.skipif(HERE < 2, reason="two nodes take two CPUs")
@pytest.mark.parametrize(
    ("devices", "own", "says"),
    [
        (["0000:17:00.0", "0000:65:00.0"], 1, "last"),
        (["0000:17:00.0"], 0, "all"),  # else a half of the machine would be idle
        (["0000:99:00.0"], 0, "all"),  # a machine that does not say where it is
    ],
)
def test_a_rank_stays_beside_its_gpu_if_the_training_has_gpus_on_every_node(devices, own, says, tmp_path):
    *first, last = sorted(os.sched_getaffinity(0))
    write(tmp_path / "devices/system/cpu/online", ",".join(map(str, [*first, last])))
    write(tmp_path / "devices/system/node/node0/cpulist", ",".join(map(str, first)))
    write(tmp_path / "devices/system/node/node1/cpulist", f"{last}\n")
    for address, node in (("0000:17:00.0", 0), ("0000:65:00.0", 1), ("0000:99:00.0", -1)):
        write(tmp_path / f"bus/pci/devices/{address}/numa_node", f"{node}\n")
    command = [sys.executable, "-c", STAY_NEAR, str(tmp_path), ",".join(devices), str(own)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    everything = [*first, last]
    assert printed == (f"{last} [{last}] [{last}]\n" if says == "last" else f"None {everything} {everything}\n")


def test_a_thread_that_ends_meanwhile_does_not_matter(tmp_path, monkeypatch):
    write(tmp_path / "devices/system/cpu/online", "0-1")
    for node in (0, 1):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", str(node))
        write(tmp_path / f"bus/pci/devices/{node}/numa_node", str(node))

    def gone(thread, near):
        raise ProcessLookupError

    monkeypatch.setattr(cpus_module.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(cpus_module.os, "sched_setaffinity", gone)
    assert cpus_module.stay_near(["0", "1"], 1, tmp_path) == "1"
