"""The record of a rank's last collectives; a program that listens as ProcessGroupNCCL does stands for a rank with NCCL."""

import sys

import pytest
from prefect_torch.tasks.gang.flight_recorder import FlightRecorder
from prefect_torch.tasks.gang.process import RankProcess

# What ProcessGroupNCCL does with these variables: DumpPipe, and DebugInfoWriter's default.
LISTEN = """
import os, time
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0 and int(os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
os.mkfifo(pipe)
listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("listens", flush=True)
while not os.read(listening, 128):
    time.sleep(0.01)
with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + os.environ["RANK"], "w") as file:
    file.write("record")
print("wrote", flush=True)
"""


def test_a_rank_writes_its_record_when_asked():
    recorder = FlightRecorder(3)
    process = RankProcess([sys.executable, "-c", LISTEN], {**recorder.environment, "RANK": "3"}, b"")
    seen = []
    for lines in process.lines(0.05):
        seen += lines
        if lines == ["listens"]:
            assert recorder.request()
    process.reap()
    assert seen == ["listens", "wrote"]
    record = recorder.close()
    assert record.read_text() == "record"
    assert list(record.parent.iterdir()) == [record]
    record.unlink()
    record.parent.rmdir()


def test_a_rank_without_nccl_is_asked_in_vain_and_nothing_is_left():
    recorder = FlightRecorder(0)
    assert not recorder.request()
    assert recorder.close() is None
    assert not recorder._folder.exists()


@pytest.mark.parametrize("name", ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_BUFFER_SIZE"])
def test_what_the_user_has_set_stays(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, f"{tmp_path}/mine")
    recorder = FlightRecorder(1)
    assert recorder.environment[name] == f"{tmp_path}/mine"
    assert recorder.close() is None
