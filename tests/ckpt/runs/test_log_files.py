"""The log files of ranks beside a run."""

import threading

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt.runs import log_files
from prefect_torch.ckpt.runs.log_files import LogFiles, read_logs
from prefect_torch.ckpt.runs.run import Run


@pytest.fixture
def run():
    return Run.open(MemoryStorage(), "run")


def texts(run, attempt=1, rank=None):
    return [(name, line.partition(" ")[2]) for name, line in read_logs(run, run.layout.logs(attempt), rank)]


def test_lines_are_read_rank_by_rank_in_their_order(run):
    files = LogFiles(run, run.layout.logs(1))
    files.append(10, ["ten"])
    files.append(2, ["a", "b"])
    files.flush()
    files.append(2, ["c \ud800"])
    files.flush()
    run.storage.put_bytes("run/logs/000001/launcher.log", b"when theirs\n")
    both = [("rank-2", "a"), ("rank-2", "b"), ("rank-2", "c \\ud800"), ("rank-10", "ten")]
    assert texts(run) == [*both, ("launcher", "theirs")]
    assert texts(run, rank=10) == [("rank-10", "ten")]
    assert texts(run, attempt=2) == []


def test_a_line_ends_where_a_rank_ended_it(run):
    files = LogFiles(run, run.layout.logs(1))
    files.append(0, ["a\x0cb\u2028c\rd", "", "last"])
    files.flush()
    assert texts(run) == [("rank-0", "a\x0cb\u2028c\rd"), ("rank-0", ""), ("rank-0", "last")]
    run.storage.put_bytes("run/logs/000001/rank-1.1.log", b"")
    assert texts(run, rank=1) == []


def test_a_long_log_is_stored_in_parts_of_which_only_the_last_is_written_again(run, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_BYTES", 200)
    files = LogFiles(run, run.layout.logs(1))
    put, put_bytes = [], run.storage.put_bytes
    monkeypatch.setattr(run.storage, "put_bytes", lambda key, data: (put.append((key, len(data))), put_bytes(key, data)))
    lines = [f"line {number}" for number in range(30)]
    for line in lines:
        files.append(0, [line])
        files.flush()
    files.flush()
    assert texts(run) == [("rank-0", line) for line in lines]
    assert len(put) == 30
    assert len(list(run.storage.list("run/logs/"))) == len({key for key, _ in put}) > 3
    assert max(size for _, size in put) <= 200


def test_the_logs_of_many_ranks_are_stored_at_the_same_time(run, monkeypatch):
    others, put_bytes = threading.Barrier(8), run.storage.put_bytes

    def put(key, data):
        others.wait(60)  # one after the other, no put would return
        put_bytes(key, data)

    monkeypatch.setattr(run.storage, "put_bytes", put)
    files = LogFiles(run, run.layout.logs(1))
    for rank in range(32):
        files.append(rank, [f"line of {rank}"])
    files.flush()
    assert texts(run) == [(f"rank-{rank}", f"line of {rank}") for rank in range(32)]


def test_where_nothing_may_be_deleted_a_former_log_stays_with_a_warning(run, monkeypatch, caplog):
    def delete(keys):
        raise PermissionError("s3:DeleteObject is not allowed")

    run.storage.put_bytes("run/logs/000001/rank-1.000000.log", b"when former\n")
    monkeypatch.setattr(run.storage, "delete", delete)
    files = LogFiles(run, run.layout.logs(1))
    files.remove_former()
    files.append(0, ["new"])
    files.flush()
    assert texts(run) == [("rank-0", "new"), ("rank-1", "former")]
    assert "stays among the lines of this one: s3:DeleteObject is not allowed" in caplog.text


def test_lines_survive_a_storage_that_fails_for_a_while(run, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_BYTES", 50)
    files = LogFiles(run, run.layout.logs(1))
    with monkeypatch.context() as patched:
        patched.setattr(run.storage, "put_bytes", lambda key, data: (_ for _ in ()).throw(OSError("full")))
        for number in range(100):
            files.append(0, [f"line {number}"])
            with pytest.raises(OSError, match="full"):
                files.flush()
    files.flush()
    assert files.num_lost > 0
    kept = [line for _, line in texts(run)]
    assert len(kept) > 50
    assert kept == [f"line {number}" for number in range(100)][-len(kept) :]
