"""Writes past the page cache are only a faster way to the same file."""

import errno
import mmap
import os

import pytest
import xxhash
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage

MANY = 9 * 2**20 + 4096


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def memory():
    """Aligned memory, as states are staged in."""
    pages = mmap.mmap(-1, MANY)
    pages[:] = os.urandom(MANY)
    return memoryview(pages)


@pytest.fixture
def direct_writes(monkeypatch):
    """Count what is written past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no O_DIRECT")
    write, counted = os.write, []

    def count(descriptor, data):
        counted.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", count)
    return counted


def check(storage, parts):
    sent = storage.put_buffers("run/x", parts)
    data = b"".join(parts)
    assert storage.get_bytes("run/x") == data
    assert (sent.bytes, sent.digest) == (len(data), xxhash.xxh3_128_hexdigest(data))


@pytest.mark.parametrize("size", [MANY, MANY - 1, MANY - 4096, 2**20, 5 * 2**20 + 17])
def test_aligned_memory_goes_past_the_page_cache_and_its_rest_after_it(storage, memory, direct_writes, size):
    check(storage, [memory[:size]])
    assert sum(direct_writes) in (size // 4096 * 4096, 0)  # nothing on a filesystem that cannot


def test_what_is_not_aligned_is_written_as_ever(storage, memory, direct_writes):
    check(storage, [memory[1:]])
    check(storage, [memory[:5], memory])
    check(storage, [memoryview(bytes(memory))])
    check(storage, [memory[: 2**20 - 1]])
    assert direct_writes == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_a_filesystem_that_cannot_gets_it_the_other_way(storage, memory, monkeypatch, code):
    def refuse(descriptor, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    check(storage, [memory])


def test_short_writes_are_gone_on_with(storage, memory, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: 2**20]))
    check(storage, [memory, memory[:100]])


def test_a_full_disk_is_told(storage, memory, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        storage.put_buffers("run/x", [memory])
    assert list(storage.list("run/")) == []
