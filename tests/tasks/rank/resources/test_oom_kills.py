"""A process that the kernel killed for lack of memory is told from one that somebody killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect_torch.tasks.rank.resources.oom_kills import count_oom_kills

LIMIT_BYTES = 128 << 20
# What a rank's supervisor does, in a cgroup that its process, as a small one, stays well within.
SUPERVISE = """
import os, signal, sys
from prefect_torch.tasks.rank.resources.oom_kills import OomKills
from prefect_torch.tasks.gang.processes.process import RankProcess
from prefect_torch.tasks.rank.failures import of_returncode

def end_of(program):
    oom_kills = OomKills()
    process = RankProcess([sys.executable, "-S", "-c", program], dict(os.environ), b"")
    for _ in process.lines(0.05):
        pass
    ending = process.reap()
    return ending.returncode, of_returncode(ending.returncode, oom_killed=bool(oom_kills.happened()))

print(end_of("import os; os.kill(os.getpid(), 9)"), end_of("bytearray(1 << 30)"), end_of("import os; os.kill(os.getpid(), 9)"))
"""


@pytest.fixture
def limited_cgroup():
    """A file that takes a pid into a cgroup with little memory."""
    name = f"prefect-torch-{os.getpid()}"
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
            yield folder / "cgroup.procs"
        except OSError:
            continue
        else:
            return
        finally:
            folder.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here: it takes root, and the memory controller")


def test_a_death_by_the_oom_killer_is_told_from_any_other(limited_cgroup):
    told = subprocess.run(
        [sys.executable, "-c", SUPERVISE],
        preexec_fn=lambda: limited_cgroup.write_text(str(os.getpid())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout.split("\n")[0] == "(-9, 'infrastructure') (-9, 'out_of_memory') (-9, 'infrastructure')", told.stderr


def write_counter(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom 8\noom_kill {number}\noom_group_kill 9\n")


@pytest.fixture
def machine(tmp_path):
    """A machine where 7 processes ran out of memory, whatever cgroup they were in."""
    (tmp_path / "self").mkdir()
    write_counter(tmp_path / "vmstat", 7)
    return tmp_path


def be_in(machine, cgroup, mount):
    (machine / "self/cgroup").write_text(cgroup)
    (machine / "self/mountinfo").write_text(f"25 1 0:22 / {machine}/proc rw - proc proc rw\n31 23 0:28 {mount}\n")


def test_a_containers_own_count_is_taken(machine):
    be_in(machine, "0::/\n", f"/ {machine}/fs rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate")
    write_counter(machine / "fs/memory.events", 2)
    assert count_oom_kills(machine) == 2


def test_a_process_in_a_cgroup_of_the_machine_takes_that_ones_count(machine):
    be_in(machine, "0::/user.slice/run.scope\n", f"/ {machine}/fs rw - cgroup2 cgroup2 rw")
    write_counter(machine / "fs/user.slice/run.scope/memory.events", 3)
    assert count_oom_kills(machine) == 3


@pytest.mark.parametrize(("root", "below"), [("/", "docker/1f"), ("/docker/1f", "."), ("/docker", "1f")])
def test_version_1_is_read_wherever_its_hierarchy_is_mounted(machine, root, below):
    be_in(machine, "5:cpu:/\n4:memory,misc:/docker/1f\n0::/\n", f"{root} {machine}/fs rw - cgroup cgroup rw,memory")
    write_counter(machine / "fs" / below / "memory.oom_control", 4)
    assert count_oom_kills(machine) == 4


def test_without_a_cgroup_that_counts_the_machines_count_is_taken(machine):
    be_in(machine, "0::/\n", f"/ {machine}/fs rw - cgroup2 cgroup2 rw")
    assert count_oom_kills(machine) == 7


def test_where_nobody_counts_nothing_is_known(tmp_path):
    assert count_oom_kills(tmp_path) is None
