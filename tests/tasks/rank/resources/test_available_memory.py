"""How much memory a rank can take."""

import pytest
from prefect_torch.tasks.rank.resources.available_memory import available_bytes

MEMORY = "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n"
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
NO_LIMIT = {1: 9223372036854771712, 2: "max"}
CACHED = {1: "cache 9\ninactive_file 1\ntotal_inactive_file 3000\n", 2: "file 9\ninactive_file 3000\nactive_file 7\n"}


def make_proc(tmp_path, version, path="/"):
    proc, mounted = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    mounted.mkdir()
    (proc / "meminfo").write_text(MEMORY)
    kind, controller, option = ("cgroup2", "", "rw") if version == 2 else ("cgroup", "memory", "rw,memory")
    (proc / "self/cgroup").write_text(f"{0 if version == 2 else 5}:{controller}:{path}\n")
    (proc / "self/mountinfo").write_text(f"30 20 0:25 / {mounted} rw - {kind} cgroup {option}\n")
    return proc


def write_group(folder, version, limit, usage, stat=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIMIT[version]).write_text(f"{limit}\n")
    (folder / USAGE[version]).write_text(f"{usage}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize("version", [1, 2])
def test_a_machine_without_limits_has_what_its_kernel_calls_available(tmp_path, version):
    proc = make_proc(tmp_path, version)
    write_group(tmp_path / "cgroup", version, NO_LIMIT[version], 5)
    assert available_bytes(proc) == 2**20


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_leaves_what_the_group_does_not_use(tmp_path, version):
    proc = make_proc(tmp_path, version)
    write_group(tmp_path / "cgroup", version, 9000, 5000)
    assert available_bytes(proc) == 4000


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_slurm_job_counts_for_its_tasks_which_have_none(tmp_path, version):
    proc = make_proc(tmp_path, version, "/job_7/step_0/task_0")
    write_group(tmp_path / "cgroup/job_7", version, 9000, 5000)
    for below in ("step_0", "step_0/task_0"):
        write_group(tmp_path / "cgroup/job_7" / below, version, NO_LIMIT[version], 100)
    assert available_bytes(proc) == 4000


@pytest.mark.parametrize("version", [1, 2])
def test_files_in_the_page_cache_make_way(tmp_path, version):
    """A job that has read its data set uses its whole limit, mostly for these."""
    proc = make_proc(tmp_path, version)
    write_group(tmp_path / "cgroup", version, 9000, 8500, CACHED[version])
    assert available_bytes(proc) == 3500
    write_group(tmp_path / "cgroup", version, 9000, 100, CACHED[version])
    assert available_bytes(proc) == 9000, "the two files are not read at the same moment"


def test_a_group_above_its_limit_and_a_system_that_does_not_tell_have_nothing(tmp_path):
    proc = make_proc(tmp_path, 2)
    write_group(tmp_path / "cgroup", 2, 5, 9)
    assert available_bytes(proc) == 0
    assert available_bytes(tmp_path / "nowhere") == 0
