import errno
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path

import psutil
import pytest
from left_behind import open_files
from prefect_servers import wait_until
from prefect_torch.tasks.gang.processes import process as process_module
from prefect_torch.tasks.gang.processes.local_rank import prepare_ranks, rank_result
from prefect_torch.tasks.gang.processes.process import ProcessExit, RankProcess
from prefect_torch.tasks.rank.spec import RankResult
from prefect_torch.tasks.rank.starting import guard

# A rank does this first.
OUTLASTING = (
    "import ctypes, os, signal, subprocess, sys, time\n"
    "from prefect_torch.tasks.rank.starting import guard\nguard.outlast_sigterm()\n"
)


def run(program: str, stdin: bytes = b"") -> tuple[list[str], object]:
    process = RankProcess([sys.executable, "-u", "-c", program], dict(os.environ), stdin)
    lines = [line for some in process.lines(0.05) for line in some]
    return lines, process.reap()


def test_lines_of_both_streams_come_in_order_with_the_ending():
    lines, ending = run("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    assert lines == ["one", "two"]
    assert (ending.returncode, ending.message) == (3, b"")


def test_with_too_few_descriptors_no_training_starts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (63, 63))
    with pytest.raises(OSError, match="may have 63 files and sockets open"):
        prepare_ranks(2)


def test_stdin_and_the_result_pipe_carry_any_amount():
    program = "import sys, os; data = sys.stdin.buffer.read(); os.fdopen(int(sys.argv[-1]), 'wb').write(data[::-1])"
    data = bytes(range(256)) * 20_000
    assert run(program, data)[1].message == data[::-1]


def test_a_process_that_dies_before_it_reads_does_not_block():
    assert run("import os; os._exit(4)", b"x" * 5_000_000)[1].returncode == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_told(number):
    assert run(f"import os; os.kill(os.getpid(), {int(number)})")[1].returncode == -number


def test_output_that_is_no_text_and_has_no_end_of_line_comes_through():
    assert run(r"import sys; sys.stdout.buffer.write(b'\xff\xfe tail')")[0] == ["\ufffd\ufffd tail"]


@pytest.mark.parametrize("outlasts", [True, False])
def test_terminate_lets_the_process_clean_up(outlasts):
    program = "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(9))\nprint('up')\ntime.sleep(60)"
    begun = OUTLASTING if outlasts else ""
    process = RankProcess([sys.executable, "-u", "-c", begun + program], dict(os.environ), b"")
    for lines in process.lines(0.05):
        if lines:
            process.terminate()
    assert process.reap().returncode == 9


def test_a_rank_outlasts_the_sigterm_that_all_processes_of_its_unit_get_and_ends_by_the_next():
    program = "for number in range(2):\n    os.kill(os.getpid(), signal.SIGTERM)\n    print(number)"
    lines, ending = run(OUTLASTING + program)
    assert (lines, ending.returncode) == (["0"], -signal.SIGTERM)


def test_a_rank_of_a_slurm_step_outlasts_both_sigterms_of_a_time_limit_and_is_still_terminated_at_once(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    program = "for number in range(2):\n    os.kill(os.getpid(), signal.SIGTERM)\nprint('up', flush=True)\ntime.sleep(600)"
    process = RankProcess([sys.executable, "-c", OUTLASTING + program], dict(os.environ), b"")
    for lines in process.lines(0.05):
        if lines:
            process.terminate()
    assert process.reap().returncode == -signal.SIGKILL


@pytest.mark.parametrize("step", [None, "0"])
def test_what_a_rank_starts_ends_by_the_first_sigterm(monkeypatch, step):
    """As `Process.terminate` and `Popen.terminate` expect."""
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    program = (
        "ready, write = os.pipe()\nif (child := os.fork()) == 0:\n    os.write(write, b'.')\n    time.sleep(600)\n"
        "os.read(ready, 1)\nos.kill(child, signal.SIGTERM)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "child = subprocess.Popen(['sleep', '600'])\nchild.terminate()\nprint(child.wait())"
    )
    assert run(OUTLASTING + program)[0] == ["-15", "-15"]


def test_a_rank_in_native_code_is_terminated_at_once_though_it_would_outlast_a_sigterm():
    """As one that waits in a collective for the rank that failed."""
    program = f"{OUTLASTING}print('up', flush=True)\nwhile True: ctypes.PyDLL(None).sleep(600)"
    process = RankProcess([sys.executable, "-c", program], dict(os.environ), b"")
    for lines in process.lines(0.05):
        if lines:
            process.terminate()
    assert process.reap().returncode == -signal.SIGTERM


def test_kill_ends_what_ignores_every_request_and_all_it_started():
    grandchild = "import os, time; os.setsid(); print('grandchild', os.getpid(), flush=True); time.sleep(600)"
    program = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}])\ntime.sleep(600)"
    )
    process = RankProcess([sys.executable, "-u", "-c", program], dict(os.environ), b"")
    pid = None
    for lines in process.lines(0.05):
        for line in lines:
            pid = int(line.split()[1])
            process.terminate()
            process.kill()
    assert process.reap().returncode == -signal.SIGKILL
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_what_a_process_leaves_behind_ends_with_it():
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    lines, ending = run(program)
    assert ending.returncode == 0
    assert not psutil.pid_exists(int(lines[0]))


def test_a_process_whose_name_is_no_text_is_in_the_way_of_no_guard():
    """The kernel cuts a name in the middle of a character; any process of the machine may have such a one."""
    child = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'caf\\xc3', 0, 0, 0); print('named', flush=True); time.sleep(600)"
    )
    program = (
        f"import subprocess, sys\nchild = {child!r}\n"
        "left = subprocess.Popen([sys.executable, '-c', child], start_new_session=True, stdout=subprocess.PIPE)\n"
        "print(left.stdout.readline().decode().strip(), left.pid)"
    )
    (line,), ending = run(program)
    named, pid = line.split()
    assert (named, ending.returncode) == ("named", 0)
    assert not psutil.pid_exists(int(pid))


def test_the_shared_memory_of_a_process_that_is_killed_is_removed_behind_it():
    """By Python's own process for that, which is a descendant, too."""
    program = (
        "import os, signal\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "print(SharedMemory(create=True, size=1 << 20).name, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    lines, ending = run(program)
    assert ending.returncode == -signal.SIGKILL
    assert not Path("/dev/shm", lines[0]).exists()


@pytest.mark.timeout(60)
def test_a_helper_that_does_not_end_is_killed_after_a_moment_even_if_it_has_a_zombie():
    """It has the name of one that may clean up after the others."""
    helper = "import os, sys, time\nif os.fork() == 0: os._exit(0)\nprint('up', flush=True)\ntime.sleep(600)"
    program = (
        "import subprocess, sys\n"
        f"helper = subprocess.Popen([sys.executable, '-c', {helper!r}, 'srun'], stdout=subprocess.PIPE)\n"
        "print(helper.pid, helper.stdout.readline())"
    )
    started_s = time.monotonic()
    lines, ending = run(program)
    assert not psutil.pid_exists(int(lines[0].split()[0]))
    assert (ending.returncode, 1.0 < time.monotonic() - started_s < 20.0) == (0, True)


def test_orphans_of_a_process_are_no_zombies_while_it_goes_on():
    program = (
        "import os, psutil, time\nfor _ in range(20): os.system('true &')\n"
        "guard, until = psutil.Process(os.getppid()), time.monotonic() + 60\n"
        "while len(guard.children()) > 1 and time.monotonic() < until: time.sleep(0.01)\n"
        "print(len(guard.children()))"
    )
    assert run(program)[0] == ["1"]


def test_a_supervisor_that_is_killed_takes_the_process_along():
    program = (
        "import os, sys\nfrom prefect_torch.tasks.gang.processes.process import RankProcess\n"
        "process = RankProcess([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'],"
        " dict(os.environ), b'')\n"
        "for lines in process.lines(0.05):\n    for line in lines: print(line, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        pid = int(supervisor.stdout.readline())
        assert psutil.pid_exists(pid)
        supervisor.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "the process ends", every_s=0.02)


def test_a_bar_of_a_rank_is_one_line_and_not_one_per_refresh():
    program = "import tqdm\nfor _ in tqdm.trange(300, mininterval=0, miniters=1): pass\nprint('after')"
    bar, after = run(program)[0]
    assert "300/300" in bar
    assert after == "after"


@pytest.mark.parametrize(("returncode", "raises"), [(-signal.SIGKILL, False), (0, True)])
def test_a_result_that_a_kill_has_cut_short_is_none(returncode, raises):
    whole = pickle.dumps(RankResult(return_value=pickle.dumps("x" * 1000)))
    assert rank_result(ProcessExit(-signal.SIGKILL, whole), oom_killed=False).kind is None
    cut = ProcessExit(returncode, whole[:500])
    if raises:
        with pytest.raises(pickle.UnpicklingError):
            rank_result(cut, oom_killed=False)
    else:
        assert rank_result(cut, oom_killed=True).kind == "out_of_memory"
        assert rank_result(cut, oom_killed=False).kind == "infrastructure"


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    pipe, made = os.pipe, set()

    def noted_pipe():
        ends = pipe()
        if threading.current_thread() is threading.main_thread():  # no thread of another test
            made.add(Path(f"pipe:[{os.fstat(ends[0]).st_ino}]"))
        return ends

    monkeypatch.setattr(process_module.os, "pipe", noted_pipe)
    too_large = {**os.environ, "BIG": "x" * 200_000}  # MAX_ARG_STRLEN is 128 KiB
    for _ in range(3):
        with pytest.raises(OSError, match="Argument list too long"):
            RankProcess([sys.executable, "-c", ""], too_large, b"")
    assert len(made) >= 15
    assert not open_files() & made


def test_a_child_that_outlives_a_killed_guard_does_not_keep_the_supervisor_waiting():
    sleep = "subprocess.Popen(['sleep', '600'])"
    program = f"import os, subprocess, time; print({sleep}.pid, os.getppid(), flush=True); time.sleep(600)"
    process = RankProcess([sys.executable, "-c", program], dict(os.environ), b"")
    seen, child = [], 0
    for lines in process.lines(0.05):
        seen += lines
        if lines and not child:
            child, guard_pid = map(int, lines[0].split())
            os.kill(guard_pid, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    assert seen[1:] == [f"WARNING: the rank has ended, and sleep ({child}) that it started has not"]
    assert process.reap().returncode is None


def test_a_process_for_which_there_are_no_descriptors_leaves_none(monkeypatch):
    pipe, made = os.pipe, []

    def pipes_until_there_are_none():
        if len(made) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe())
        return made[-1]

    monkeypatch.setattr(process_module.os, "pipe", pipes_until_there_are_none)
    with pytest.raises(OSError, match="Too many open files"):
        RankProcess([sys.executable, "-c", ""], {}, b"")
    for descriptor in chain(*made):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


class Kernel:
    """Stands for `os` where a rank has left a process of another user, and a zombie of that one."""

    def __init__(self):
        self.written = b""

    def kill(self, pid, number):
        if pid == 1:
            raise PermissionError

    def write(self, descriptor, data):
        self.written += data

    def waitpid(self, pid, options):
        assert options == os.WNOHANG, "it would wait for ever"
        return 0, 0

    WNOHANG = os.WNOHANG


def test_a_guard_tells_of_a_process_that_it_may_not_kill_and_does_not_wait_for_it(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(guard, "os", kernel)
    monkeypatch.setattr(guard, "_has_children", lambda: True)
    monkeypatch.setattr(guard, "_descendants", lambda: {1: "S", 8: "Z"})
    guard._kill_descendants()
    assert re.fullmatch(rb"WARNING: the rank's .* goes on: it is another user's\n", kernel.written)
