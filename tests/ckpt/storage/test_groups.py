"""Files stored together in a local folder: what is linked, what is synced and when, and what an error leaves."""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import xxhash
from prefect_torch.ckpt.errors import is_of_full_disk
from prefect_torch.ckpt.storage.local_files import copies, syncing
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import RetryingStorage

MANY = 70  # more than are synced one by one


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def written(folder, names, data=b"data"):
    names = list(names)
    for name in names:
        (folder / name).write_bytes(data)
    return {f"run/x/{name}": folder / name for name in names}


class Calls:
    """Records what is synced and linked, in order, by inode: a file keeps its own."""

    def __init__(self, monkeypatch):
        self.done = []
        fsync, link, whole = os.fsync, os.link, syncing._sync_filesystem

        def record_fsync(descriptor):
            self.done.append(("sync", os.fstat(descriptor).st_ino))
            fsync(descriptor)

        def record_link(old, new, **kwargs):
            self.done.append(("link", Path(old).stat().st_ino))
            link(old, new, **kwargs)

        def record_whole(descriptor):
            self.done.append(("sync all", None))
            whole(descriptor)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "link", record_link)
        monkeypatch.setattr(syncing, "_sync_filesystem", record_whole)

    def last(self, what, inode=None):
        return max(place for place, done in enumerate(self.done) if done == (what, inode))


@pytest.mark.parametrize("filesystem", [None, "nfs", "overlay", "fuse.sshfs"])
def test_every_file_is_synced_where_a_sync_of_the_filesystem_cannot_be_trusted(storage, source, monkeypatch, filesystem):
    monkeypatch.setattr(syncing, "filesystem_of", lambda _: filesystem)
    calls = Calls(monkeypatch)
    storage.put_files(written(source, map(str, range(MANY))))
    stored = sorted((Path(storage.url) / "run/x").iterdir())
    assert len(stored) == MANY
    assert all(("sync", path.stat().st_ino) in calls.done for path in stored)
    assert calls.done[-1] == ("sync", (Path(storage.url) / "run/x").stat().st_ino)  # the names, last
    assert ("sync all", None) not in calls.done


def test_few_files_are_synced_one_by_one_so_that_nobody_waits_for_other_programs(storage, source, monkeypatch):
    monkeypatch.setattr(syncing, "filesystem_of", lambda _: "ext4")
    calls = Calls(monkeypatch)
    storage.put_files(written(source, map(str, range(10))))
    assert ("sync all", None) not in calls.done


@pytest.mark.skipif(not syncing._has_syncfs(), reason="this system cannot sync a filesystem")
def test_many_files_are_made_durable_by_one_sync_that_was_opened_before_the_first_write(storage, source, monkeypatch):
    monkeypatch.setattr(syncing, "filesystem_of", lambda _: "ext4")
    calls = Calls(monkeypatch)
    seen = []
    covers = syncing.GroupSync.covers
    monkeypatch.setattr(
        syncing.GroupSync, "covers", lambda self, way: seen.append([*way.path("").iterdir()]) or covers(self, way)
    )
    storage.put_files(written(source, map(str, range(MANY))))
    assert seen == [[]]
    assert calls.done[-1] == ("sync all", None)
    assert [done for done in calls.done if done[0] == "sync all"] == [("sync all", None)]


def test_a_filesystem_whose_descriptor_is_0_is_synced_too(monkeypatch):
    """A program without stdin may have it."""
    synced, group = [], syncing.GroupSync(MANY)
    monkeypatch.setattr(syncing, "_sync_filesystem", synced.append)
    group._filesystems.update({1: 0, 2: None})
    group.wait()
    group.close()
    assert synced == [0]


@pytest.mark.skipif(not syncing._has_syncfs(), reason="this system cannot sync a filesystem")
def test_a_sync_that_fails_stores_nothing(storage, source, monkeypatch):
    monkeypatch.setattr(syncing, "filesystem_of", lambda _: "ext4")

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(syncing, "_sync_filesystem", fail)
    with pytest.raises(OSError, match="Input/output"):
        storage.put_files(written(source, map(str, range(MANY))))
    assert [path for path in Path(storage.url).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("count", [1, 3, MANY])
def test_an_owned_file_is_synced_then_linked_then_its_name_is_synced(storage, source, monkeypatch, count):
    files = written(source, map(str, range(count)))
    inodes = {path.stat().st_ino for path in files.values()}
    calls = Calls(monkeypatch)
    storage.put_files(files, owned=True)
    assert {path.stat().st_ino for path in (Path(storage.url) / "run/x").iterdir()} == inodes
    assert len(list(source.iterdir())) == count  # a report that fails after this can be made again
    folder = (Path(storage.url) / "run/x").stat().st_ino
    for inode in inodes:
        at = calls.last("link", inode)
        before, after = calls.done[:at], calls.done[at:]
        assert ("sync", inode) in before or ("sync all", None) in before
        assert ("sync", folder) in after or ("sync all", None) in after


def test_a_linked_file_is_as_new_as_one_that_was_written(storage, source):
    files = written(source, ["a"])
    os.utime(source / "a", (1, 1))
    storage.put_files(files, owned=True)
    (info,) = storage.list("run/")
    assert info.modified_s == pytest.approx(time.time(), abs=60)


def test_a_file_with_another_name_and_one_behind_a_link_are_copied(storage, source, tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    os.link(tmp_path / "mine", source / "second")
    (source / "link").symlink_to(tmp_path / "mine")
    storage.put_files({"run/x/second": source / "second", "run/x/link": source / "link"}, owned=True)
    (tmp_path / "mine").write_bytes(b"changed later")
    assert (storage.get_bytes("run/x/second"), storage.get_bytes("run/x/link")) == (b"mine", b"mine")


def test_an_owned_file_gets_the_group_of_a_directory_that_passes_its_own_on(storage, source, tmp_path):
    team = tmp_path / "store"
    team.mkdir()
    try:
        os.chown(team, -1, 4242)
    except PermissionError:
        pytest.skip("only root may give a directory another group")
    team.chmod(0o2770)
    files = written(source, "ab")
    os.chown(files["run/x/b"], -1, 4242)
    inodes = {key: path.stat().st_ino for key, path in files.items()}
    storage.put_files(files, owned=True)
    stored = {key: (team / key).stat() for key in files}
    assert {key: status.st_gid for key, status in stored.items()} == {"run/x/a": 4242, "run/x/b": 4242}
    assert {key: status.st_ino == inodes[key] for key, status in stored.items()} == {"run/x/a": False, "run/x/b": True}


def test_an_owned_file_gets_the_access_list_of_a_directory_that_passes_its_own_on(storage, source, tmp_path):
    team = tmp_path / "store"
    (team / "own").mkdir(parents=True)
    entries = [(1, 7, 2**32 - 1), (4, 5, 2**32 - 1), (8, 7, 4242), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1)]
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)  # acl(5), as the kernel has it
    try:
        for folder in (team, team / "own"):
            os.setxattr(folder, "system.posix_acl_default", access)
    except OSError:
        pytest.skip("the temporary directory has no access lists")
    files = written(source, "a") | {"run/x/b": team / "own/b"}
    (team / "own/b").write_bytes(b"data")
    inodes = {key: path.stat().st_ino for key, path in files.items()}
    storage.put_files(files, owned=True)
    assert all("system.posix_acl_access" in os.listxattr(team / key) for key in files)
    is_linked = {key: (team / key).stat().st_ino == inode for key, inode in inodes.items()}
    assert is_linked == {"run/x/a": False, "run/x/b": True}


@pytest.mark.parametrize(("umask", "modes"), [(0o022, {0o644}), (0o027, {0o640, 0o644}), (0o077, {0o600, 0o644})])
def test_an_owned_file_that_its_library_made_private_is_readable_for_whom_the_directory_is(storage, source, umask, modes):
    """As safetensors makes each, and `tempfile`."""
    files = written(source, "ab")
    for path, mode in zip(files.values(), (0o600, 0o644), strict=True):
        path.chmod(mode)
    inodes = {path.stat().st_ino for path in files.values()}
    before = os.umask(umask)
    try:
        storage.put_files(files, owned=True)
    finally:
        os.umask(before)
    stored = [(Path(storage.url) / key).stat() for key in files]
    assert {status.st_ino for status in stored} == inodes
    assert {stat.S_IMODE(status.st_mode) for status in stored} == modes


def test_a_file_that_is_written_while_it_is_read_is_copied_and_its_digest_is_right(storage, source, monkeypatch):
    files = written(source, ["a"])
    from prefect_torch.ckpt.storage.local_files import groups  # noqa: PLC0415 - patched

    digest = groups.digest_file

    def write_meanwhile(path):
        moved = digest(path)
        path.write_bytes(b"other data")
        return moved

    monkeypatch.setattr(groups, "digest_file", write_meanwhile)
    (stored,) = storage.put_files(files, owned=True).values()
    assert stored.digest == xxhash.xxh3_128_hexdigest(storage.get_bytes("run/x/a")) == xxhash.xxh3_128_hexdigest(b"other data")


def test_after_an_error_nothing_is_stored_and_the_files_are_where_they_were(storage, source, monkeypatch):
    files = written(source, ["a", "b"])
    link, failing = os.link, iter([False, True])

    def fail_once(*args, **kwargs):
        if next(failing, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        storage.put_files(files, owned=True)
    assert sorted(path.name for path in source.iterdir()) == ["a", "b"]
    assert list(storage.list("")) == []
    stored = storage.put_files(files, owned=True)
    assert {it.digest for it in stored.values()} == {xxhash.xxh3_128_hexdigest(b"data")}
    assert [storage.get_bytes(key) for key in files] == [b"data", b"data"]
    assert (source / "a").stat().st_ino == (Path(storage.url) / "run/x/a").stat().st_ino


@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("filesystem", [None, "ext4"])
def test_an_owned_file_whose_sync_has_failed_is_refused_until_it_is_written_anew(
    storage, source, monkeypatch, reason, filesystem
):
    """Linux tells of a failed write once: the next sync succeeds, and the data are lost with the page cache."""
    if filesystem is not None and not syncing._has_syncfs():
        pytest.skip("this system cannot sync a filesystem")
    monkeypatch.setattr(syncing, "filesystem_of", lambda _: filesystem)
    files = written(source, map(str, range(MANY)))
    fsync, lost = os.fsync, {(source / "7").stat().st_ino}
    told = {None: [], "ext4": ["sync all"]}[filesystem]

    def fail_once(descriptor):
        if (inode := os.fstat(descriptor).st_ino) in lost:
            lost.remove(inode)
            raise OSError(reason, os.strerror(reason))
        fsync(descriptor)

    def fail_whole_once(descriptor):
        if told:
            told.pop()
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(syncing, "_sync_filesystem", fail_whole_once)
    retrying = RetryingStorage(lambda: storage, RetryPolicy(60, 0.001, 0.001))
    expected = "the system could not write .*/7 to the disk" if reason == errno.EIO else "No space left"
    with pytest.raises(OSError, match=expected):
        retrying.put_files(files, owned=True)
    assert (lost, told, list(storage.list(""))) == (set(), [], [])
    with pytest.raises(OSError, match="/7 to the disk, and may have lost its data: write the file anew") as refused:
        retrying.put_files(files, owned=True)
    assert is_of_full_disk(refused.value) == (reason == errno.ENOSPC)
    (source / "7").write_bytes(b"again")
    retrying.put_files(files, owned=True)
    assert storage.get_bytes("run/x/7") == b"again"
    assert (source / "7").stat().st_nlink == 2


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK])
@pytest.mark.parametrize("count", [1, MANY])
def test_an_owned_file_that_cannot_be_linked_is_copied_and_durable(storage, source, monkeypatch, reason, count):
    files = written(source, map(str, range(count)))

    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    calls = Calls(monkeypatch)
    monkeypatch.setattr(os, "link", refuse)
    stored = storage.put_files(files, owned=True)
    assert {it.digest for it in stored.values()} == {xxhash.xxh3_128_hexdigest(b"data")}
    for key in files:
        inode = Path(storage.url, key).stat().st_ino
        assert ("sync", inode) in calls.done or calls.done[-1] == ("sync all", None)


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOSYS])
def test_an_owned_file_whose_time_cannot_be_set_is_copied(storage, source, monkeypatch, reason):
    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "utime", refuse)
    files = written(source, ["a", "b"])
    stored = storage.put_files(files, owned=True)
    assert {it.digest for it in stored.values()} == {xxhash.xxh3_128_hexdigest(b"data")}
    assert [Path(storage.url, key).stat().st_nlink for key in files] == [1, 1]


def test_a_mount_of_rclone_answers_an_input_output_error_to_each_link_and_gets_copies(storage, source, monkeypatch):
    from prefect_torch.ckpt.storage.local_files import groups  # noqa: PLC0415 - patched

    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(groups, "filesystem_of", lambda _: "fuse.rclone")
    stored = storage.put_files(written(source, ["a", "b"]), owned=True)
    assert {it.digest for it in stored.values()} == {xxhash.xxh3_128_hexdigest(b"data")}
    assert storage.get_bytes("run/x/a") == storage.get_bytes("run/x/b") == b"data"


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_filesystem_that_is_full_in_mid_write_is_told_with_the_file(storage, source, monkeypatch, call, reason):
    """What fails there is a call with a descriptor, whose error names nothing; a file server may fail only the last one."""
    files = written(source, ["a"])
    storage.put_bytes("run/x/there", b"")
    fsync = os.fsync

    def fail(descriptor, *_):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return fsync(descriptor)
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=re.escape(os.strerror(reason))) as caught:
        storage.put_files(files)
    assert caught.value.filename == str(Path(storage.url, "run/x/a"))


def test_an_object_for_which_a_filesystem_has_no_space_in_mid_write_is_named(storage, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.put_bytes("run/x/there", b"")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        storage.put_bytes("run/x/a", b"data")
    assert caught.value.filename == str(Path(storage.url, "run/x/a"))


def test_two_mounts_of_one_filesystem_need_a_copy(tmp_path):
    """As two volumes of a container on one disk: they are one device, and no file can be renamed or linked between them."""
    for name in ("source", "store"):
        (tmp_path / name).mkdir()
        mounted = subprocess.run(["mount", "--bind", tmp_path / name, tmp_path / name], check=False, capture_output=True)
        if mounted.returncode != 0:
            pytest.skip("mounting is not permitted here")
    try:
        files = written(tmp_path / "source", ["a"])
        assert (tmp_path / "source").stat().st_dev == (tmp_path / "store").stat().st_dev
        storage = LocalStorage(tmp_path / "store")
        storage.put_files(files, owned=True)
        assert storage.get_bytes("run/x/a") == b"data"
    finally:
        for name in ("source", "store"):
            subprocess.run(["umount", tmp_path / name], check=True)


@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**20, 2**20 + 1])
def test_a_small_file_is_stored_whole_at_every_size_that_is_copied_another_way(storage, source, size):
    (source / "a").write_bytes(os.urandom(size))
    (stored,) = storage.put_files({"run/x/a": source / "a"}).values()
    data = (source / "a").read_bytes()
    assert storage.get_bytes("run/x/a") == data
    assert (stored.bytes, stored.digest) == (size, xxhash.xxh3_128_hexdigest(data))


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="this system has no /proc")
def test_a_file_that_is_larger_than_its_status_says_is_stored_whole(storage):
    """As those of /proc are: their size is 0."""
    storage.put_files({"run/x/version": Path("/proc/version")})
    assert storage.get_bytes("run/x/version") == Path("/proc/version").read_bytes() != b""


class Writes:
    """Has positioned writes answer as `answer(descriptor, data, offset)` does, which may call the real one."""

    def __init__(self, monkeypatch, answer):
        real = self.real = os.pwrite
        self.fired = 0

        def pwrite(descriptor, data, offset):
            return answer(self, real, descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)


def refuse_direct(writes, real, descriptor, data, offset):
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        writes.fired += 1
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return real(descriptor, data, offset)


def write_a_part(writes, real, descriptor, data, offset):
    writes.fired += 1
    return real(descriptor, data[: max(1, len(data) // 2 + 5)], offset)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("answer", [None, refuse_direct, write_a_part])
@pytest.mark.parametrize("size", [8 * 2**20, 12 * 2**20 + 5000, 17 * 2**20 - 1])
def test_a_large_copy_is_whole_whatever_the_filesystem_takes(storage, source, monkeypatch, answer, size):
    data = os.urandom(1000) * (size // 1000 + 1)
    (source / "big").write_bytes(data[:size])
    writes = None if answer is None else Writes(monkeypatch, answer)
    moved = storage.put_file("run/big", source / "big")
    assert writes is None or writes.fired > 0
    assert (moved.bytes, moved.digest) == (size, xxhash.xxh3_128_hexdigest(data[:size]))
    assert storage.get_bytes("run/big") == data[:size]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_no_buffer_of_a_large_copy_is_filled_again_before_it_is_written(storage, source, monkeypatch):
    data, is_another_written = os.urandom(24 * 2**20 + 5), threading.Event()
    (source / "big").write_bytes(data)

    def write_the_first_late(writes, real, descriptor, data, offset):
        writes.fired += 1
        if offset == 0:
            is_another_written.wait(0.5)  # there is time to read and write one more than there are buffers
        elif offset >= 16 * 2**20:
            is_another_written.set()
        return real(descriptor, data, offset)

    writes = Writes(monkeypatch, write_the_first_late)
    storage.put_file("run/big", source / "big")
    assert writes.fired > 5
    assert storage.get_bytes("run/big") == data


@pytest.mark.parametrize("verb", ["file", "files", "buffers"])
def test_large_data_are_written_in_order_and_through_the_page_cache_to_fuse(storage, source, monkeypatch, verb):
    """Buckets that are mounted take nothing else; past the page cache, one write becomes many requests at a time."""
    data = mmap.mmap(-1, 24 * 2**20 + 5)
    data[:] = os.urandom(len(data))
    (source / "big").write_bytes(data)
    monkeypatch.setattr(copies, "may_be_fuse", lambda _: True)
    write = os.write

    def written(descriptor, piece):
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)
        return write(descriptor, piece)

    def out_of_order(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    Writes(monkeypatch, out_of_order)
    monkeypatch.setattr(os, "write", written)
    if verb == "file":
        storage.put_file("run/big", source / "big")
    elif verb == "files":
        storage.put_files({"run/big": source / "big"})
    else:
        storage.put_buffers("run/big", [memoryview(data)])
    assert storage.get_bytes("run/big") == data[:]


def test_an_error_of_a_large_copy_is_raised_and_leaves_nothing(storage, source, monkeypatch):
    (source / "big").write_bytes(bytes(20 * 2**20))

    def fill_up(writes, real, descriptor, data, offset):
        writes.fired += 1
        if offset >= 8 * 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    Writes(monkeypatch, fill_up)
    with pytest.raises(OSError, match="No space"):
        storage.put_file("run/big", source / "big")
    assert [path for path in Path(storage.url).rglob("*") if path.is_file()] == []
