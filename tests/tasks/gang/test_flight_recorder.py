"""The record of a rank's last collectives; a program that listens as ProcessGroupNCCL does stands for a rank with NCCL."""

import fcntl
import logging
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from prefect_torch.tasks.gang.machine import agent
from prefect_torch.tasks.gang.processes import local_rank
from prefect_torch.tasks.gang.processes.flight_recorder import FlightRecorder
from prefect_torch.tasks.gang.processes.local_rank import LocalRank
from prefect_torch.tasks.gang.processes.process import RankProcess
from prefect_torch.tasks.rank.user_code.function import pack_function
from rank_specs import rank_spec

SPEC = rank_spec(world_size=2, local_world_size=2, function=pack_function("os:getcwd", None))

# What ProcessGroupNCCL does with these variables: DumpPipe, and DebugInfoWriter's default.
LISTEN = """
import os, signal, time
signal.signal(signal.SIGRTMAX, lambda *_: None)  # ranks print their stack traces on it
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0 and int(os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
os.mkfifo(pipe)
listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("listens", flush=True)
def read():
    try:
        return os.read(listening, 128)
    except BlockingIOError:  # it is open for writing, and nothing is written yet
        return b""
while not read():
    time.sleep(0.01)
with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + os.environ["RANK"], "w") as file:
    file.write("record")
print("wrote", flush=True)
"""


def test_a_rank_writes_its_record_when_asked():
    recorder = FlightRecorder(3, os.environ)
    process = RankProcess([sys.executable, "-c", LISTEN], {**recorder.environment, "RANK": "3"}, b"")
    seen = []
    for lines in process.lines(0.05):
        seen += lines
        if lines == ["listens"]:
            assert recorder.request()
    process.reap()
    assert seen == ["listens", "wrote"]
    record = recorder.close()
    assert not recorder._folder.exists()
    assert record.read_text() == "record"
    assert list(record.parent.iterdir()) == [record]
    record.unlink()
    record.parent.rmdir()


def test_a_rank_that_exits_while_it_is_asked_does_not_listen(monkeypatch):
    recorder = FlightRecorder(0, os.environ)
    os.mkfifo(recorder._pipe)
    listening = [os.open(recorder._pipe, os.O_RDONLY | os.O_NONBLOCK)]
    opened = os.fdopen

    def exits_first(*arguments, **options):
        if listening:
            os.close(listening.pop())
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "fdopen", exits_first)
    assert not recorder.request()
    assert recorder.close() is None


def test_a_rank_without_nccl_is_asked_in_vain_and_nothing_is_left():
    recorder = FlightRecorder(0, os.environ)
    assert not recorder.request()
    assert recorder.close() is None
    assert not recorder._folder.exists()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_record_that_cannot_be_kept_is_no_failure_of_its_rank(monkeypatch, tmp_path, is_written):
    """Such as one whose directory a cleaner of the temporary directory has removed."""
    recorder = FlightRecorder(0, os.environ)
    if is_written:
        Path(f"{recorder._folder}/rank-0").write_text("record")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    else:
        shutil.rmtree(recorder._folder)
    assert recorder.close() is None
    assert not recorder._folder.exists()


def test_cleaners_of_the_temporary_directory_see_that_the_directory_is_in_use():
    """By its lock, as systemd-tmpfiles does; the next process removes it if this one is killed."""
    recorder = FlightRecorder(0, os.environ)
    descriptor = os.open(recorder._folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    recorder.close()


@pytest.mark.parametrize("name", ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_BUFFER_SIZE"])
def test_what_the_user_has_set_stays(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, f"{tmp_path}/mine")
    recorder = FlightRecorder(1, os.environ)
    assert recorder.environment[name] == f"{tmp_path}/mine"
    assert recorder.close() is None


def test_the_record_of_an_earlier_training_is_none_of_this_one_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/trace-")
    (tmp_path / "trace-0").write_text("of last week")
    os.utime(tmp_path / "trace-0", (1.0, 1.0))
    recorder = FlightRecorder(0, os.environ)
    assert recorder.close() is None
    assert not recorder._folder.exists()
    written = FlightRecorder(0, os.environ)
    (tmp_path / "trace-0").write_text("of today")
    assert written.close() == tmp_path / "trace-0"
    assert not written._folder.exists()


@pytest.fixture
def listening(monkeypatch):
    """Have ranks of both kinds of machines run the program that listens."""
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")  # it runs the program, and no other
    monkeypatch.setattr(local_rank, "python_command", lambda module: [sys.executable, "-c", LISTEN])
    monkeypatch.setattr(agent, "python_command", lambda module: [sys.executable, "-c", LISTEN])
    monkeypatch.setattr(local_rank, "get_run_logger", lambda: logging.getLogger("rank"))


def test_a_rank_of_this_machine_is_given_the_recorders_variables(listening, caplog):
    rank = LocalRank(replace(SPEC, rank=1, records_collectives=True))
    seen = []
    for lines in rank.lines(0.05):
        seen += lines
        if lines == ["listens"]:
            assert rank.write_stack_traces()
    rank.finish()
    assert seen == ["listens", "wrote"]
    assert remove_record(caplog.text.partition("last collectives are in ")[2].partition(":")[0]) == "record"


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_rank_of_another_machine_is_given_the_recorders_variables(listening, tmp_path, is_chosen):
    """Unless the cluster's `environment` has them."""
    chosen = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path / 'own'}/trace-"} if is_chosen else {}
    (tmp_path / "own").mkdir()
    sent, ended = [], threading.Event()

    class Leader:
        """Orders the record once the rank listens."""

        def send(self, header, payload=b""):
            sent.append(header)
            if header.get("lines") == ["listens"]:
                rank.obey("write_stack_traces")
            if header["type"] == "exit":
                ended.set()

    header = {"rank": 1, "program": "the rank's", "records_collectives": True}
    rank = agent._Rank(Leader(), header, {**os.environ, "RANK": "1", **chosen}, b"", [], None)
    assert ended.wait(30)
    rank.thread.join()
    assert [line for header in sent for line in header.get("lines", [])] == ["listens", "wrote"]
    assert (sent[-1]["record"] == str(tmp_path / "own" / "trace-1")) == is_chosen
    assert remove_record(sent[-1]["record"]) == "record"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_gets_the_exit_of_a_rank_that_its_agent_fails_to_supervise(listening):
    sent, ended = [], threading.Event()

    class Leader:
        def send(self, header, payload=b""):
            if header["type"] == "lines":
                raise MemoryError
            sent.append(header)
            ended.set()

    header = {"rank": 1, "program": "the rank's", "records_collectives": True}
    rank = agent._Rank(Leader(), header, {**os.environ, "RANK": "1"}, b"", [], None)
    assert ended.wait(30)
    rank.thread.join()
    assert [(it["type"], it["rank"], it["returncode"]) for it in sent] == [("exit", 1, None)]


def remove_record(path):
    text = Path(path).read_text()
    shutil.rmtree(Path(path).parent)
    return text
