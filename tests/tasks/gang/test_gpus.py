"""Which GPUs ranks have, with GPUs that torch believes in; the processes and the locks are real."""

import contextlib
import errno
import fcntl
import os
import pickle
import re
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace

import psutil
import pytest
from forked_programs import Popen, PopenOfProgram
from prefect_torch.tasks.gang.gpus import allocation as allocating
from prefect_torch.tasks.gang.gpus import driver_programs, listing, locks
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation, GpusBusyError, take_free
from prefect_torch.tasks.gang.gpus.listing import Gpu, list_gpus
from prefect_torch.tasks.gang.processes.process import RankProcess
from pretended_gpus import listed, pretended_machine
from small_disk import mounted

HOLD = """
import os, sys, time
from pretended_gpus import listed
from prefect_torch.tasks.gang.gpus import allocation
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.processes.process import RankProcess
allocation.list_gpus = listed
allocated = GpuAllocation(int(sys.argv[1]), 0.0, "the other")
allocated.take(lambda: None)
rank = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
ranks = [RankProcess(rank, {}, b"", [lock]) for lock in allocated.locks]
for rank in ranks:
    print(next(line for lines in rank.lines(0.05) for line in lines), flush=True)
if (forked := os.fork()) != 0:  # by user code
    print(forked, flush=True)
time.sleep(600)
"""


@pytest.fixture
def torchs_machine(monkeypatch):
    """A machine with three GPUs, by its name; the processes that it starts have them, too."""
    monkeypatch.setattr(subprocess, "Popen", PopenOfProgram)  # of the program that lists them
    monkeypatch.setattr(allocating, "_run_logger", lambda: gpus_log)
    monkeypatch.setattr(allocating, "_POLL_S", 0.01)
    with pretended_machine(monkeypatch, 3) as name:
        yield name


@pytest.fixture
def machine(torchs_machine, monkeypatch):
    """The same, without a process that lists them."""
    monkeypatch.setattr(allocating, "list_gpus", listed)
    return torchs_machine


class Log(list):
    def warning(self, text, *arguments):
        self.append(text % arguments)


gpus_log = Log()


@pytest.fixture(autouse=True)
def empty_log():
    gpus_log.clear()


def allocation(count, wait_s=0.0):
    return GpuAllocation(count, wait_s, "this one")


def take(allocated):
    allocated.take(lambda: None)
    return allocated.environment


@pytest.fixture
def held(machine):
    """Another process, whose ranks hold two of the GPUs; yields it, the pids of the ranks and their guards."""
    with Popen([sys.executable, "-c", HOLD, "2"], stdout=subprocess.PIPE, text=True) as holder:
        pids = [int(holder.stdout.readline()) for _ in range(2)]
        forked = psutil.Process(int(holder.stdout.readline()))
        guards = [psutil.Process(pid).parent() for pid in pids]
        yield holder, pids, guards
        holder.kill()
        forked.kill()
        for guard in guards:
            with contextlib.suppress(psutil.NoSuchProcess):
                guard.resume()  # of a test that failed


def test_gpus_are_those_that_torch_sees_by_the_names_that_choose_them(torchs_machine, monkeypatch):
    everything = listed()
    assert list_gpus() == everything
    assert [gpu.choice for gpu in everything] == ["0", "1", "2"]
    monkeypatch.setenv("FAKEGPU_VISIBLE_DEVICES", "2,1")
    assert list_gpus() == [everything[2], everything[1]]


def test_a_slice_of_a_gpu_is_known_by_its_own_name(torchs_machine, monkeypatch):
    monkeypatch.setenv("FAKEGPU_VISIBLE_DEVICES", "MIG-1234")
    assert [gpu.uuid for gpu in list_gpus()] == ["MIG-1234"]


def test_a_torch_that_cannot_list_gpus_says_why(torchs_machine, monkeypatch):
    monkeypatch.setenv("PRETENDED_GPUS", "many")
    reason = r"(?s)torch cannot list the GPUs of this machine, which `prefect-torch doctor` checks:.*'many'"
    with pytest.raises(RuntimeError, match=reason):
        list_gpus()


@pytest.mark.parametrize(
    ("kind", "is_rocm", "variable"),
    [
        ("cuda", False, "CUDA_VISIBLE_DEVICES"),
        ("cuda", True, "HIP_VISIBLE_DEVICES"),
        ("xpu", False, "ZE_AFFINITY_MASK"),
        (None, False, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_variable_is_that_of_the_kind_of_gpu(kind, is_rocm, variable, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert listing._variable(kind, is_rocm=is_rocm) == variable
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    assert listing._variable("cuda", is_rocm=True) == "CUDA_VISIBLE_DEVICES"


def test_what_is_free_is_enough_from_the_fewest_on_and_more_are_taken_when_they_are_free(machine):
    other, range_of = allocation(2), GpuAllocation(5, 0.0, "this one", fewest=2)
    take(other)
    with pytest.raises(GpusBusyError, match=r"^needs 2 free GPUs, and of 3 these are in use: GPU 0 .*, GPU 1 "):
        take(range_of)
    assert range_of.locks == ()
    other.keep(1)
    assert take(range_of) == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
    held = range_of.locks
    assert take(range_of) == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
    other.release()
    assert take(range_of) == {"FAKEGPU_VISIBLE_DEVICES": "1,2,0"}, "a rank keeps its GPU"
    assert range_of.locks[:2] == held
    range_of.release()
    with pytest.raises(ValueError, match=r"num_workers=\(4, 5\) with use_gpu=True needs 4 GPUs, and this machine has 3"):
        take(GpuAllocation(5, None, "this one", fewest=4))


def test_two_trainings_take_different_gpus_and_a_third_is_refused(machine):
    first, second, third = allocation(1), allocation(2), allocation(1)
    assert take(first) == {"FAKEGPU_VISIBLE_DEVICES": "0"}
    assert take(second) == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
    user = re.escape(f"by this one (process {os.getpid()})")
    with pytest.raises(
        GpusBusyError, match=f"needs 1 free GPU, and of 3 these are in use: GPU 0 {user}, GPU 1 {user}"
    ) as refused:
        take(third)
    arrived = pickle.loads(pickle.dumps(refused.value))
    assert arrived.in_use == refused.value.in_use
    assert str(arrived) == f"{arrived.in_use}; wait_for_gpus_s=0 is over: give more seconds, or end one of them"
    assert take(first) == {"FAKEGPU_VISIBLE_DEVICES": "0"}  # it has it already
    second.release()
    assert take(third) == {"FAKEGPU_VISIBLE_DEVICES": "1"}
    first.release()
    third.release()


def test_a_gpu_that_has_failed_is_taken_again_only_if_too_few_others_are_free(machine):
    two = allocation(2)
    take(two)
    two.leave_out(0)
    assert take(two) == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
    two.leave_out(1)
    assert take(two) == {"FAKEGPU_VISIBLE_DEVICES": "1,0"}  # no other is free
    two.leave_out(2)  # no rank of these
    two.release()
    all_of_them = allocation(3)
    take(all_of_them)
    all_of_them.leave_out(1)
    with pytest.raises(GpusBusyError):
        take(allocation(1))  # nobody gets it meanwhile
    assert take(all_of_them) == {"FAKEGPU_VISIBLE_DEVICES": "0,2,1"}
    all_of_them.release()
    elastic = GpuAllocation(3, 0.0, "this one", fewest=2)
    take(elastic)
    elastic.leave_out(1)
    assert take(elastic) == {"FAKEGPU_VISIBLE_DEVICES": "0,2"}  # enough
    elastic.release()
    assert gpus_log[0] == "GPU 0 has failed: it is left out as long as enough others are free"


def test_the_visible_gpus_are_a_pool(machine, monkeypatch):
    first = allocation(1)
    take(first)
    monkeypatch.setenv("FAKEGPU_VISIBLE_DEVICES", "0,2")
    second = allocation(1)
    assert take(second) == {"FAKEGPU_VISIBLE_DEVICES": "2"}
    with pytest.raises(ValueError, match="num_workers=3 with use_gpu=True needs 3 GPUs, and this machine has 2"):
        allocation(3).check()
    first.release()
    second.release()


def test_slices_that_are_named_by_their_instances_have_a_lock_each(torchs_machine, monkeypatch):
    monkeypatch.setattr(locks, "_PREFIX", f"{locks._PREFIX}fake-{torchs_machine}-")
    pools = [[Gpu(name, "A100 MIG 1g.5gb", "CUDA_VISIBLE_DEVICES", name)] for name in ("MIG-GPU-8f/1/0", "MIG-GPU-8f/2/0")]
    allocated = [GpuAllocation(1, 0.0, "this one", pool) for pool in (*pools, pools[0])]
    assert [take(each) for each in allocated[:2]] == [{"CUDA_VISIBLE_DEVICES": pool[0].choice} for pool in pools]
    with pytest.raises(GpusBusyError, match="GPU MIG-GPU-8f/1/0 by this one"):
        take(allocated[2])
    for each in allocated:
        each.release()


def test_a_machine_of_slices_says_why_a_process_has_one(monkeypatch):
    monkeypatch.setattr(
        allocating,
        "list_gpus",
        lambda _: [Gpu("MIG-1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "CUDA_VISIBLE_DEVICES", "MIG-1")],
    )
    with pytest.raises(ValueError, match=r"this machine has 1 \(a process sees one slice of a GPU in MIG mode\)"):
        allocation(2).check()


def test_a_long_name_of_a_flow_run_is_cut_where_others_read_it(machine):
    allocated, other = GpuAllocation(3, None, "ä" * 600), allocation(1)
    take(allocated)
    with pytest.raises(GpusBusyError, match="GPU 0 by äää"):
        take(other)
    allocated.release()


def test_who_uses_a_gpu_is_named_without_what_a_terminal_would_obey(machine):
    """Every user of the machine may write it."""
    allocated, other = GpuAllocation(3, None, "a\x1b[2J\rb"), allocation(1)
    take(allocated)
    with pytest.raises(GpusBusyError, match=r"GPU 0 by a \[2J b"):
        take(other)
    allocated.release()


@pytest.mark.parametrize("place", [0, 1])
def test_a_gpu_is_in_use_though_a_file_of_its_lock_was_deleted(machine, place):
    """By systemd, when the user of a service that trains logs out, or by a cleaner of old files."""
    allocated, uuid = allocation(3), listed()[0].uuid
    take(allocated)
    (locks._LOCKS[place] / f"{locks._PREFIX}{uuid}").unlink()
    for _ in range(2):
        with pytest.raises(GpusBusyError, match="needs 1 free GPU, and of 3 these are in use: GPU 0 by this one "):
            take(allocation(1))
    allocated.release()
    next_one = allocation(1)
    take(next_one)
    next_one.release()


def test_gpus_are_taken_where_there_is_no_directory_for_the_second_file_of_a_lock(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "_LOCKS", (locks._LOCKS[0], tmp_path / "missing"))
    allocated = allocation(3)
    take(allocated)
    with pytest.raises(GpusBusyError):
        take(allocation(1))
    allocated.release()


def test_gpus_are_taken_where_the_second_file_of_a_lock_is_on_a_filesystem_without_locks(machine, monkeypatch):
    flock, first = fcntl.flock, locks._LOCKS[0].stat().st_dev

    def refuse(descriptor, operation):
        if os.fstat(descriptor).st_dev != first:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    allocated = allocation(3)
    take(allocated)
    with pytest.raises(GpusBusyError):
        take(allocation(1))
    allocated.release()


def test_too_few_free_gpus_are_left_to_others_while_a_training_waits_for_them(machine):
    one, waiting, rounds = allocation(1), allocation(3, None), []
    take(one)

    def look():
        rounds.append(None)
        if len(rounds) == 3:
            other = allocation(2)
            take(other)
            other.release()
            one.release()

    waiting.take(look)
    assert len(rounds) == 3
    users = f"GPU 0 by this one (process {os.getpid()})"
    assert gpus_log == [f"waiting for GPUs: needs 3 free GPUs, and of 3 these are in use: {users}"]
    assert waiting.environment == {"FAKEGPU_VISIBLE_DEVICES": "0,1,2"}
    waiting.release()


def test_a_training_that_waits_can_be_terminated(machine):
    one = allocation(3)
    take(one)

    class TerminatedError(Exception):
        pass

    def terminate():
        raise TerminatedError

    with pytest.raises(TerminatedError):
        allocation(1, None).take(terminate)
    one.release()


@pytest.fixture
def hanging_driver(monkeypatch):
    """A driver that does not answer."""
    monkeypatch.setattr(listing, "python_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(allocating, "_run_logger", lambda: gpus_log)
    monkeypatch.setattr(driver_programs, "_POLL_S", 0.02)


@pytest.mark.timeout(60)
def test_a_driver_that_hangs_is_named_and_given_up(hanging_driver, monkeypatch):
    monkeypatch.setattr(allocating, "_SLOW_LISTING_S", 0.1)
    monkeypatch.setattr(listing, "_LONGEST_LISTING_S", 1.5)
    looks = count(0.0, 0.5)  # a clock that goes on with each look, however long the start of the program takes
    monkeypatch.setattr(driver_programs, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    with pytest.raises(RuntimeError, match=r"torch has not listed the GPUs .* after 1\.5 s: their driver may hang"):
        allocation(1, None).check()
    (line,) = gpus_log
    named = r"torch has not listed the GPUs of this machine after \d+ s: their driver may hang, so try nvidia-smi"
    assert re.match(named, line)


def test_without_gpus_nothing_is_asked_or_taken(monkeypatch):
    monkeypatch.setattr(allocating, "list_gpus", None)
    allocated = allocation(0)
    allocated.check()
    assert take(allocated) == {}
    assert allocated.locks == ()


def test_ranks_keep_their_gpus_until_they_are_gone_though_the_flow_was_killed(held):
    holder, pids, guards = held
    waiting = allocation(2)
    with pytest.raises(GpusBusyError, match=re.escape(f"GPU 0 by the other (process {holder.pid}), GPU 1 by the other")):
        take(waiting)
    for guard in guards:
        guard.suspend()
    holder.kill()
    holder.wait()
    with pytest.raises(GpusBusyError, match="GPU 0 by the other"):
        take(waiting)
    for guard in guards:
        guard.resume()
    patient = allocation(3, 60.0)
    take(patient)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    patient.release()


def test_a_rank_does_not_inherit_the_lock(machine):
    allocated = allocation(1)
    take(allocated)
    show = "import os; print([os.readlink(f'/proc/self/fd/{it}') for it in os.listdir('/proc/self/fd') if it > '2'])"
    rank = RankProcess([sys.executable, "-c", show.replace("readlink", "path.realpath")], {}, b"", allocated.locks)
    (printed,) = [line for lines in rank.lines(0.05) for line in lines]
    assert locks._PREFIX not in printed
    rank.reap()
    allocated.release()


def test_the_locks_are_open_to_every_user_whatever_the_umask(machine):
    before = os.umask(0o077)
    try:
        allocated = allocation(1)
        take(allocated)
    finally:
        os.umask(before)
    (lock,) = allocated.locks
    assert os.fstat(lock).st_mode & 0o777 == 0o666
    allocated.release()


LOOK_ALL_THE_TIME = """
from pretended_gpus import listed
from prefect_torch.tasks.gang.gpus import allocation
allocation.list_gpus, allocation._POLL_S = listed, 0.0
allocation._run_logger = lambda: __import__("logging").getLogger()
one, everything = allocation.GpuAllocation(1, 0.0, "one"), allocation.GpuAllocation(3, None, "everything")
one.take(lambda: None)
print("looks", flush=True)
everything.take(lambda: None)
"""


def test_gpus_that_another_only_tries_to_take_are_not_in_use(machine):
    """It waits for all, of which one is in use, so the others are free whenever somebody looks."""
    with Popen([sys.executable, "-c", LOOK_ALL_THE_TIME], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "looks\n"
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                allocated = allocation(2)
                assert take(allocated) == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
                allocated.release()
        finally:
            other.kill()


def test_an_agent_takes_what_is_free_and_keeps_what_it_needs(machine):
    other = GpuAllocation(1, 0.0, "the other")
    other.take(lambda: None)
    allocated = take_free(None, "an agent")
    assert allocated.environment == {"FAKEGPU_VISIBLE_DEVICES": "1,2"}
    assert len(take_free(5, "another agent").locks) == 0
    allocated.keep(1)
    assert allocated.environment == {"FAKEGPU_VISIBLE_DEVICES": "1"}
    third = take_free(5, "another agent")
    assert third.environment == {"FAKEGPU_VISIBLE_DEVICES": "2"}
    for each in (other, allocated, third):
        each.release()


def test_gpus_are_taken_where_the_memory_of_the_locks_is_full(machine, monkeypatch, tmp_path):
    with mounted(tmp_path / "locks", "size=64k") as disk:
        monkeypatch.setattr(locks, "_LOCKS", (disk,))
        with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(bytes(4096))
        first = allocation(2)
        take(first)
        with pytest.raises(GpusBusyError, match="GPU 0 by an unknown process, GPU 1 by an unknown process"):
            take(allocation(2))
        first.release()


def test_gpus_that_cannot_be_taken_together_are_left_to_others(machine, monkeypatch, tmp_path):
    with mounted(tmp_path / "locks", "nr_inodes=3") as disk:  # the directory, the lock on all, and one GPU's
        monkeypatch.setattr(locks, "_LOCKS", (disk,))
        with pytest.raises(OSError, match="No space left"):
            take(allocation(2))
        other = allocation(1)
        assert take(other) == {"FAKEGPU_VISIBLE_DEVICES": "0"}
        other.release()


def test_a_link_in_the_place_of_a_lock_is_not_followed(machine, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    gpu = listed()[0]
    link = locks._LOCKS[0] / f"{locks._PREFIX}{gpu.uuid}"
    link.symlink_to(mine)
    try:
        with pytest.raises(OSError, match="symbolic links"):
            allocation(1).take(lambda: None)
    finally:
        link.unlink()
    assert mine.read_text() == "precious"


def test_whoever_holds_the_lock_on_all_blocks_nobody_for_longer_than_it_waits(machine, monkeypatch):
    monkeypatch.setattr(locks, "_PREFIX", f"{locks._PREFIX}fake-{machine}-")
    monkeypatch.setattr(locks, "LONGEST_TAKING_S", 0.05)
    asked = []
    with locks.one_at_a_time(), pytest.raises(GpusBusyError, match="all, by a process that has been taking some"):
        allocation(1, 0.2).take(lambda: asked.append(1))
    assert asked
    allocated = allocation(1)
    allocated.take(lambda: None)
    allocated.release()
