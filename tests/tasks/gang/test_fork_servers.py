import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import cloudpickle
import psutil
import pytest
from forked_programs import started_as_usual
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.machine.forks import close_here
from prefect_torch.tasks.gang.processes import fork_servers
from prefect_torch.tasks.gang.processes.fork_servers import ForkServer, ForkServers, ProcessContext, python_command
from prefect_torch.tasks.gang.processes.process import RankProcess
from prefect_torch.tasks.rank.rendezvous import Address
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.rank.starting.fork_server import is_device
from prefect_torch.tasks.rank.user_code.function import pack_function

RANK = "prefect_torch.tasks.rank.main"
# What a rank has from its parents, as its function's module finds it.
SHOW = """
import ctypes, gc, json, os, random, signal, sys, threading, numpy, torch
def blocked(): return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
death = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(death))
same = {
    **os.environ, "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "flags": repr(sys.flags),
    "signals": {int(it): repr(signal.getsignal(it)) for it in sorted(signal.valid_signals())}, "blocked": blocked(),
    "umask": status["Umask"], "ignored": status["SigIgn"], "caught": status["SigCgt"], "cpus": status["Cpus_allowed"],
    "limits": open("/proc/self/limits").read(), "nice": os.nice(0), "death": death.value,
    "leads session": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    "main": sorted(vars(sys.modules["__main__"])),
    "encodings": [(it.encoding, it.errors, it.write_through) for it in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin is empty": sys.stdin.read() == "", "descriptors": len(os.listdir("/proc/self/fd")),
    "torch threads": torch.get_num_threads(), "child": os.environ.pop("CHILD", ""), "collects": gc.isenabled(),
}
drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
for shown in [*same.items(), ("drawn", drawn)]: print("SHOWN " + json.dumps(shown), flush=True)
os._exit(0)
"""
LEAD = f"""
import os, sys
from prefect_torch.tasks.gang.processes.fork_servers import ForkServers, python_command
from prefect_torch.tasks.gang.processes.process import RankProcess
servers = ForkServers()
with open(sys.argv[1], "rb") as spec, open(sys.argv[2], "w") as told:
    stdin = spec.read()
    for server in (servers.find(os.environ), None):
        process = RankProcess(python_command("{RANK}"), {{**os.environ, "RANK": "3"}}, stdin, (), server)
        print(*(line for lines in process.lines(0.1) for line in lines), process.reap().returncode, file=told)
servers.close()
"""
WAIT = "import os, time\nprint('UP', os.getpid(), os.getppid(), os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
BY_COMMAND = [sys.executable, "-c", "print('by its command')"]  # at once: it imports no torch, as a rank does


@pytest.fixture(scope="module", autouse=True)
def programs_are_started_as_usual():
    """Also where tests that ran before have them forked."""
    with started_as_usual():
        yield


@pytest.fixture(scope="module")
def servers():
    found = ForkServers()
    yield found
    found.close()


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Start a rank whose function's module is the given text; where none is forked, by `command`."""
    monkeypatch.chdir(tmp_path)
    processes = []

    def start(text, server, command=None, **environment):
        path = tmp_path / f"function_{len(processes)}.py"
        path.write_text(text)
        variables_of_rank = {**variables(), "RANK": "3", **environment}
        process = RankProcess(command or python_command(RANK), variables_of_rank, spec_of(path), (), server)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def variables():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def spec_of(path):
    spec = RankSpec(
        rank=3,
        world_size=4,
        local_world_size=4,
        rendezvous=Address("127.0.0.1", 9),
        storage=StorageSpec(str(path.parent)),
        run="run",
        attempt=1,
        restored=None,
        function=pack_function(f"{path}:fn", None),
        use_gpu=False,
        backend=None,
    )
    return cloudpickle.dumps(spec)


def output_of(process):
    lines = [line for some in process.lines(0.02) for line in some]
    return lines, process.reap()


def first_line(process):
    return next(line for lines in process.lines(0.02) for line in lines)


@contextmanager
def soon():
    """Yield a function that waits until a condition is true."""
    deadline = time.monotonic() + 120

    def wait(is_true):
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    yield wait


def test_a_forked_rank_has_what_a_spawned_one_has_and_random_numbers_of_its_own(rank, servers):
    server = servers.find(variables())
    text = f"def fn(): ...\n{SHOW}"
    show = [rank(text, it) for it in (server, server, None)]
    shown = []
    for process in show:
        lines, ended = output_of(process)
        assert ended.returncode == 0, lines
        shown.append(dict(json.loads(line.removeprefix("SHOWN ")) for line in lines if line.startswith("SHOWN ")))
    assert server.is_alive
    first_drawn, second_drawn, _ = (it.pop("drawn") for it in shown)
    first, second, spawned = shown
    for forked in (first, second):
        assert forked.keys() == spawned.keys()
        for name, value in spawned.items():
            assert forked[name] == value or name == "argv", name  # which has the name of the file
    assert all(one != another for one, another in zip(first_drawn, second_drawn, strict=True))


def test_the_line_of_a_forked_rank_is_that_of_a_rank(rank, servers):
    process = rank(f"def fn(): ...\n{WAIT}", servers.find(variables()))
    _, pid, guard, number = first_line(process).split()
    assert number == "3"
    assert psutil.Process(int(pid)).cmdline() == [sys.executable, RANK, "rank=3"]
    with soon() as wait:  # the guard executes its program beside the rank
        wait(lambda: any(word.endswith("guard.py") for word in psutil.Process(int(guard)).cmdline()))


def test_a_forked_rank_prints_its_stack_traces_and_is_terminated(rank, servers):
    process = rank(f"def fn(): ...\n{WAIT}", servers.find(variables()))
    seen = []
    for lines in process.lines(0.02):
        if lines and not seen:
            process.write_stack_traces()
        seen += lines
        if any("most recent call first" in line for line in lines):
            process.terminate()
    assert process.reap().returncode == -signal.SIGTERM


def test_an_idle_server_imports_what_the_first_optimizer_needs(rank, servers):
    server = servers.find(variables())
    with soon() as wait:
        wait(lambda: "torch._dynamo" in psutil.Process(server._process.pid).cmdline())
    text = "import os, sys, torch\nhad = 'torch._dynamo' in sys.modules\nmodel = torch.nn.Linear(2, 2)"
    step = "optimizer = torch.optim.SGD(model.parameters())\nmodel(torch.rand(2)).sum().backward()\noptimizer.step()"
    lines, ended = output_of(rank(f"def fn(): ...\n{text}\n{step}\nprint('had', had)\nos._exit(0)", server))
    assert (lines, ended.returncode) == (["had True"], 0)


def test_a_server_looks_for_no_garbage_while_it_imports(rank, servers):
    text = "import gc, os\nprint(gc.get_stats()[0]['collections'])\nos._exit(0)"
    (number,), _ = output_of(rank(f"def fn(): ...\n{text}", servers.find(variables())))
    assert int(number) < 100  # else hundreds


def test_all_that_a_forked_rank_has_started_ends_with_it(rank, servers):
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    lines, ended = output_of(rank(f"def fn(): ...\n{text}\nimport os\nos._exit(5)", servers.find(variables())))
    assert ended.returncode == 5
    assert not psutil.pid_exists(int(lines[0]))


def test_a_forked_rank_dies_with_its_guard(rank, servers):
    process = rank(f"def fn(): ...\n{WAIT}", servers.find(variables()))
    _, pid, guard, _ = first_line(process).split()
    os.kill(int(guard), signal.SIGKILL)
    _, ended = output_of(process)
    assert ended.returncode is None
    with soon() as wait:
        wait(lambda: not psutil.pid_exists(int(pid)))


SUPERVISOR = """
import os, sys, time
from prefect_torch.tasks.gang.processes.fork_servers import FORK_SERVERS, python_command
from prefect_torch.tasks.gang.processes.process import RankProcess
assert not {"torch", "prefect"} & sys.modules.keys()
environment = {**os.environ, "RANK": "3"}
process = RankProcess(python_command("prefect_torch.tasks.rank.main"), environment, open(sys.argv[1], "rb").read(), (),
                      FORK_SERVERS.find(environment))
for lines in process.lines(0.02):
    for line in lines:
        if (forked := os.fork()) == 0:
            time.sleep(600)
        print(line, forked, flush=True)
"""


def test_closed_streams_of_the_supervisor_are_not_those_of_its_ranks(tmp_path):
    (tmp_path / "function.py").write_text("import os, sys\nfn = print\nprint('UP', file=sys.stderr, flush=True)\nos._exit(0)\n")
    (tmp_path / "spec").write_bytes(spec_of(tmp_path / "function.py"))
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", LEAD, tmp_path / "spec", tmp_path / "told"]
    assert subprocess.run(command, env=variables(), check=False).returncode == 0
    assert (tmp_path / "told").read_text() == "UP 0\nUP 0\n"


def test_a_supervisor_that_is_killed_takes_the_rank_and_the_server_along_though_a_fork_of_it_goes_on(tmp_path):
    (tmp_path / "function.py").write_text(f"def fn(): ...\n{WAIT}")
    (tmp_path / "spec").write_bytes(spec_of(tmp_path / "function.py"))
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "spec")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        up, *_, forked = supervisor.stdout.readline().split()
        assert up == "UP"
        below = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(below) == 4  # the server, the guard, the rank, and what is forked
        supervisor.kill()
    alive = psutil.Process(int(forked))
    assert psutil.wait_procs([it for it in below if it != alive], timeout=120)[1] == []
    alive.kill()


def test_a_server_ends_with_its_client_also_while_it_imports(tmp_path):
    begun = tmp_path / "begun"
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n"
        "class Endless:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'torch':\n"
        f"            pathlib.Path({str(begun)!r}).touch()\n"
        "            time.sleep(600)\n"
        "if 'prefect_torch.tasks.rank.starting.fork_server' in sys.argv:\n"
        "    sys.meta_path.insert(0, Endless)\n"
    )
    server = ForkServer(ProcessContext.of_rank({**variables(), "PYTHONPATH": str(tmp_path)}))
    with soon() as wait:
        wait(begun.exists)
    close_here(server._control.detach())
    assert server._process.wait(30) == -signal.SIGIO


def test_a_server_that_was_killed_spares_its_ranks_and_is_started_again(rank, servers):
    server = servers.find(variables())
    survivor = rank(f"def fn(): ...\n{WAIT}", server)
    _, pid, *_ = first_line(survivor).split()
    server._process.kill()
    lines, ended = output_of(rank("def fn(): ...", server, command=BY_COMMAND))
    assert (lines[-1], ended.returncode) == ("by its command", 0)
    assert psutil.Process(int(pid)).is_running()
    assert not server.has_refused
    successor = servers.find(variables())
    assert successor is not server
    assert successor.is_alive


def test_a_server_that_stands_still_is_killed_and_started_again(rank, servers, monkeypatch):
    server = servers.find(variables())
    survivor = rank(f"def fn(): ...\n{WAIT}", server)
    _, pid, *_ = first_line(survivor).split()
    server._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fork_servers, "_ANSWERS_WITHIN_S", 0.2)
    lines, ended = output_of(rank("def fn(): ...", server, command=BY_COMMAND))
    assert (lines[-1], ended.returncode) == ("by its command", 0)
    assert psutil.Process(int(pid)).is_running()
    assert (server.is_alive, server.has_refused) == (False, False)


@pytest.mark.parametrize("danger", ["threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "sys.exit('no')"])
def test_where_a_fork_is_not_safe_ranks_are_spawned(rank, servers, tmp_path, danger, capfd):
    """A library has a thread, or cannot be imported there."""
    (tmp_path / "libraries/torch").mkdir(parents=True)
    (tmp_path / "libraries/sitecustomize.py").write_text(
        f"import sys, threading, time\nif 'prefect_torch.tasks.rank.starting.fork_server' in sys.argv:\n    {danger}\n"
    )
    environment = {**variables(), "PYTHONPATH": str(tmp_path / "libraries")}
    server = servers.find(environment)
    lines, ended = output_of(rank("def fn(): ...", server, command=BY_COMMAND, **environment))
    assert (lines[-1], ended.returncode) == ("by its command", 0)
    assert server.has_refused
    assert servers.find(environment) is None


@pytest.mark.parametrize(
    "path", ["/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128", "/dev/infiniband/uverbs0"]
)
def test_an_open_device_is_a_danger(path):
    assert is_device(path)


@pytest.mark.parametrize(
    "path", ["/dev/null", "/dev/urandom", "/dev/shm/sem.x", "/dev/pts/0", "/usr/lib/libcuda.so", "pipe:[1]"]
)
def test_other_files_are_no_danger(path):
    assert not is_device(path)


def test_where_a_fork_is_not_safe_with_the_compiler_ranks_are_forked_without(rank, servers, tmp_path):
    """Also one that is requested while the server imports once more."""
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/sitecustomize.py").write_text(
        "import select, sys, threading, time\n"
        "class ThreadOfTheCompiler:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch._dynamo': threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "        if name == 'torch' and 'without-compiler' in sys.argv:\n"
        f"            open({str(tmp_path / 'imports')!r}, 'w').close()\n"
        "            select.select([int(sys.argv[2])], [], [], 60)\n"
        "if 'prefect_torch.tasks.rank.starting.fork_server' in sys.argv: sys.meta_path.insert(0, ThreadOfTheCompiler())\n"
    )
    environment = {**variables(), "PYTHONPATH": str(tmp_path / "libraries")}
    server = servers.find(environment)
    with soon() as wait:
        wait((tmp_path / "imports").exists)
    text = "import sys\nprint('torch._dynamo' in sys.modules)\nprint(open('/proc/self/cmdline').read())\n"
    lines, ended = output_of(rank(f"def fn(): ...\n{text}import os\nos._exit(0)", server, **environment))
    assert ended.returncode == 0
    assert lines[0] == "False"
    assert RANK in lines[1]
    assert "-c" not in lines[1]  # it was forked


def test_a_server_is_shared_where_a_new_process_would_find_the_same(monkeypatch):
    plain = ProcessContext.of_rank({"A": "1"})
    assert ProcessContext.of_rank({"A": "1", "RANK": "3", "CUDA_VISIBLE_DEVICES": "2", "PREFECT_API_URL": "x"}) == plain
    assert ProcessContext.of_rank({"A": "1", "OMP_NUM_THREADS": "3"}) != plain
    before = os.umask(0o123)
    try:
        assert ProcessContext.of_rank({"A": "1"}) != plain
    finally:
        os.umask(before)
    monkeypatch.setattr(sys, "path", [])
    assert ProcessContext.of_rank({"A": "1"}) != plain


def test_the_server_used_longest_ago_makes_room(monkeypatch):
    closed = []

    class Server:
        is_alive, has_refused = True, False

        def __init__(self, context):
            self.name = dict(context.environment)["NAME"]

        def close(self):
            closed.append(self.name)

    monkeypatch.setattr(fork_servers, "ForkServer", Server)
    servers = ForkServers()
    names = [servers.find({"NAME": name}).name for name in "ababacab"]
    assert names == list("ababacab")
    assert closed == ["b", "c"]
