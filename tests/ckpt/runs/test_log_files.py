"""The log files of ranks beside a run."""

import threading
from contextlib import suppress
from itertools import count

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt import StorageError
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


@pytest.fixture
def put(run, monkeypatch):
    """The key and size of each object that was stored."""
    put, put_bytes = [], run.storage.put_bytes
    monkeypatch.setattr(run.storage, "put_bytes", lambda key, data: (put.append((key, len(data))), put_bytes(key, data)))
    return put


def test_a_long_log_is_stored_in_parts_whose_pieces_are_replaced_by_the_whole_part(run, put, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_BYTES", 200)
    files = LogFiles(run, run.layout.logs(1))
    lines = [f"line {number}" for number in range(30)]
    for line in lines:
        files.append(0, [line])
        files.flush()
        assert texts(run)[-1] == ("rank-0", line)
    assert texts(run) == [("rank-0", line) for line in lines]
    files.close()
    assert texts(run) == [("rank-0", line) for line in lines]
    assert run.keys(run.layout.logs(1)) == [f"run/logs/000001/rank-0.{number:06d}.log" for number in range(7)]
    assert max(size for _, size in put) <= 200


def test_a_log_that_grows_for_hours_costs_a_few_times_its_bytes_and_stores_no_object_twice(run, put):
    files = LogFiles(run, run.layout.logs(1))
    for number in range(2500):
        files.append(0, [f"line {number}"])
        files.flush()
    stored = list(run.storage.list("run/logs/"))
    assert texts(run) == [("rank-0", f"line {number}") for number in range(2500)]
    assert sum(size for _, size in put) <= 3 * sum(info.bytes for info in stored)
    assert len({key for key, _ in put}) == len(put) == 2500
    assert len(stored) <= 3 * 32


def test_lines_are_read_once_while_their_pieces_are_replaced(run, monkeypatch):
    files, get_bytes = LogFiles(run, run.layout.logs(1)), run.storage.get_bytes
    lines = [f"line {number}" for number in range(32)]
    for line in lines[:31]:
        files.append(0, [line])
        files.flush()
    waiting = lines[31:]

    def get(key):
        if waiting:  # between the listing and the first read
            files.append(0, [waiting.pop()])
            files.flush()
        return get_bytes(key)

    monkeypatch.setattr(run.storage, "get_bytes", get)
    assert texts(run) == [("rank-0", line) for line in lines]
    assert len(run.keys(run.layout.logs(1))) == 1


@pytest.mark.parametrize("is_stored", [True, False])
def test_lines_are_there_once_after_an_error_of_any_put(run, monkeypatch, is_stored):
    files, put_bytes, puts = LogFiles(run, run.layout.logs(1)), run.storage.put_bytes, count()
    lines = [f"line {number}" for number in range(70)]

    def put(key, data):
        fails = next(puts) % 2 == 0
        if is_stored or not fails:
            put_bytes(key, data)
        if fails:
            raise StorageError("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(run.storage, "put_bytes", put)
        for line in lines:
            files.append(0, [line])
            with suppress(StorageError):
                files.flush()
    files.flush()
    assert texts(run) == [("rank-0", line) for line in lines]


def test_where_nothing_may_be_deleted_each_line_is_read_once(run, monkeypatch):
    def delete(keys):
        raise PermissionError("s3:DeleteObject is not allowed")

    monkeypatch.setattr(run.storage, "delete", delete)
    files = LogFiles(run, run.layout.logs(1))
    lines = [f"line {number}" for number in range(70)]
    for line in lines:
        files.append(0, [line])
        files.flush()
    assert texts(run) == [("rank-0", line) for line in lines]
    files.close()
    assert texts(run) == [("rank-0", line) for line in lines]
    assert len(run.keys(run.layout.logs(1))) == 71


def test_the_parts_of_a_log_are_read_at_the_same_time(run, monkeypatch):
    others, get_bytes = threading.Barrier(8), run.storage.get_bytes
    for rank in range(32):
        run.storage.put_bytes(f"run/logs/000001/rank-{rank}.000000.log", b"when a line\n")

    def get(key):
        others.wait(60)  # one after the other, no read would return
        return get_bytes(key)

    monkeypatch.setattr(run.storage, "get_bytes", get)
    assert texts(run) == [(f"rank-{rank}", "a line") for rank in range(32)]


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
