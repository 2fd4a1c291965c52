"""How much memory a rank can take."""

from prefect_torch.tasks.rank.resources.available_memory import available_bytes

MEMORY = "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n"


def make_proc(tmp_path, version, **files):
    proc, mounted = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    mounted.mkdir()
    (proc / "meminfo").write_text(MEMORY)
    kind, controller, option = ("cgroup2", "", "rw") if version == 2 else ("cgroup", "memory", "rw,memory")
    (proc / "self/cgroup").write_text(f"{0 if version == 2 else 5}:{controller}:/\n")
    (proc / "self/mountinfo").write_text(f"30 20 0:25 / {mounted} rw - {kind} cgroup {option}\n")
    for name, text in files.items():
        (mounted / name.replace("__", ".")).write_text(text)
    return proc


def test_a_machine_without_limits_has_what_its_kernel_calls_available(tmp_path):
    assert available_bytes(make_proc(tmp_path, 2, memory__max="max\n", memory__current="5\n")) == 2**20


def test_a_limit_of_either_version_leaves_what_the_group_does_not_use(tmp_path):
    assert available_bytes(make_proc(tmp_path / "two", 2, memory__max="9000\n", memory__current="5000\n")) == 4000
    files = {"memory__limit_in_bytes": "8000\n", "memory__usage_in_bytes": "7000\n"}
    assert available_bytes(make_proc(tmp_path / "one", 1, **files)) == 1000


def test_a_group_above_its_limit_and_a_system_that_does_not_tell_have_nothing(tmp_path):
    assert available_bytes(make_proc(tmp_path, 2, memory__max="5\n", memory__current="9\n")) == 0
    assert available_bytes(tmp_path / "nowhere") == 0
