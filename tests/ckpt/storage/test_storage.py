"""Every backend against the contract, and what is peculiar to each."""

import contextlib
import errno
import gc
import io
import itertools
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import boto3
import fsspec
import obstore
import paramiko
import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError, ReadTimeoutError, TokenRetrievalError
from deep_folders import make_deep
from fsspec import AbstractFileSystem
from fsspec.implementations import local as fsspec_local
from fsspec.implementations import memory
from left_behind import open_files
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import LocalStore
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageError
from prefect_torch.ckpt.storage import digest
from prefect_torch.ckpt.storage.digest import write_all
from prefect_torch.ckpt.storage.fsspec_files import backend as fsspec_backend
from prefect_torch.ckpt.storage.fsspec_files.backend import FsspecStorage
from prefect_torch.ckpt.storage.local_files.root_folder import Way
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.object_store import backend as object_store
from prefect_torch.ckpt.storage.object_store import config as object_store_config
from prefect_torch.ckpt.storage.object_store import multipart_uploads
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.object_store.errors import translate
from prefect_torch.ckpt.storage.object_store.waits import Waits
from prefect_torch.ckpt.storage.probe import StorageUnfitError, probe_storage
from prefect_torch.ckpt.storage.retry import (
    ClockSkewError,
    CredentialsExpiredError,
    NoCredentialsError,
    RetryingStorage,
    RetryPolicy,
    classify,
)
from prunes import prune_as_leader
from ranks import Attempt, folder, read_files
from servers import ACCESS_KEY, SECRET_KEY, S3Server, ScriptedServer, free_port
from small_disk import mounted
from storage_contract import PartialWrites, StorageContract, WholeWritesContract

VERBS = {
    "put_file": lambda storage, key, folder: storage.put_file(key, folder / "in"),
    "put_files": lambda storage, key, folder: storage.put_files({key: folder / "in"}),
    "put_bytes": lambda storage, key, folder: storage.put_bytes(key, b"ours"),
    "put_buffers": lambda storage, key, folder: storage.put_buffers(key, [memoryview(b"ours")]),
    "get_file": lambda storage, key, folder: storage.get_file(key, folder / "out"),
    "get_bytes": lambda storage, key, folder: storage.get_bytes(key),
    "get_range": lambda storage, key, folder: storage.get_range(key, 0, memoryview(bytearray(1))),
    "list": lambda storage, key, folder: list(storage.list(f"{key.rpartition('/')[0]}/")),
    "size": lambda storage, key, folder: storage.size(key),
    "delete": lambda storage, key, folder: storage.delete([key]),
    "remove_interrupted": lambda storage, key, folder: storage.remove_interrupted(f"{key.rpartition('/')[0]}/", 0),
    "local_path": lambda storage, key, folder: storage.local_path(key),
}


def each_read_of(num_bytes):
    """Call a test with each way to read run/x, of which a range has `num_bytes` from the second byte on."""
    reads = {
        "get_file": lambda storage, path: storage.get_file("run/x", path),
        "get_bytes": lambda storage, _: storage.get_bytes("run/x"),
        "digest": lambda storage, _: storage.digest("run/x"),
        "get_range": lambda storage, _: storage.get_range("run/x", 1, memoryview(bytearray(num_bytes))),
    }
    return pytest.mark.parametrize("call", reads.values(), ids=reads)


def seen_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KEPT_OPEN = [".nfs0000000004b40e9f00093dd8", ".__afs1F3A", ".fuse_hidden0000000200000001"]


class TestLocalStorage(StorageContract, WholeWritesContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "store")

    @pytest.fixture
    def partial_writes(self, monkeypatch):
        return PartialWrites(monkeypatch, io, "FileIO")

    @pytest.fixture
    def raw_keys(self, tmp_path):
        root = tmp_path / "store"
        return lambda: {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def test_an_interrupted_put_leaves_nothing(self, storage, tmp_path, monkeypatch):
        (tmp_path / "in").write_bytes(b"x")

        written = []

        def full(number):
            if stat.S_ISDIR(os.fstat(number).st_mode):  # before there is a file
                return
            written.extend(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            storage.put_file("run/x", tmp_path / "in")
        assert written == [b"x"]  # there was a temporary file to leave behind
        assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []

    def test_a_folder_that_vanishes_while_it_is_in_use_is_not_made_again(self, storage, tmp_path):
        """It may have been unmounted, and its mount point is on a disk that is not to be filled."""
        (tmp_path / "in").write_bytes(b"1")
        storage.put_bytes("run/x", b"1")
        (tmp_path / "store").rename(tmp_path / "moved")
        for verb in ("put_file", "put_bytes", "put_buffers"):
            with pytest.raises(FileNotFoundError, match=r"deleted, moved or unmounted: '.*/store'"):
                VERBS[verb](storage, "run/y", tmp_path)
        with pytest.raises(FileNotFoundError, match="deleted, moved or unmounted"):
            storage.put_files({"run/y": tmp_path / "in"})
        assert not (tmp_path / "store").exists()
        (tmp_path / "moved").rename(tmp_path / "store")
        storage.put_bytes("run/y", b"2")
        assert storage.get_bytes("run/y") == b"2"

    @pytest.mark.parametrize("verb", ["put_file", "put_files", "put_buffers"])
    def test_what_does_not_fit_is_refused_before_a_byte_is_written(self, storage, tmp_path, monkeypatch, verb):
        """A copy that is begun fills the disk for all others, who are then refused their small ones."""
        storage.put_bytes("run/there", b"1")
        with (tmp_path / "in").open("wb") as sparse:
            sparse.truncate(2**20)
        filesystem = SimpleNamespace(f_blocks=2**20, f_bavail=2**20 // 512 - 1, f_frsize=512)
        monkeypatch.setattr(os, "statvfs", lambda path: filesystem)
        puts = {
            "put_file": lambda: storage.put_file("run/x", tmp_path / "in"),
            "put_files": lambda: storage.put_files({"run/x": tmp_path / "in"}),
            "put_buffers": lambda: storage.put_buffers("run/x", [memoryview(bytes(2**19))] * 2),
        }
        with pytest.raises(OSError, match=r"No space left .*\(1048576 bytes needed, 1048064 free\)") as caught:
            puts[verb]()
        assert caught.value.errno == errno.ENOSPC
        assert [info.key for info in storage.list("")] == ["run/there"]
        filesystem.f_bavail += 1  # exactly enough
        puts[verb]()
        assert storage.size("run/x") == 2**20

    def test_the_filesystem_of_the_file_is_asked_and_one_that_does_not_tell_its_size_has_any_space(
        self, storage, tmp_path, monkeypatch
    ):
        """As a tmpfs with size=0; and a run below the storage may be a mount of its own."""
        (tmp_path / "in").write_bytes(b"1")
        asked = []

        def tell_nothing(folder):
            asked.append(Path(f"/proc/self/fd/{folder}").readlink())
            return SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)

        monkeypatch.setattr(os, "statvfs", tell_nothing)
        storage.put_file("run/a", tmp_path / "in")
        storage.put_files({"run/b": tmp_path / "in"})
        storage.put_buffers("run/c", [memoryview(b"1")])
        assert [info.bytes for info in storage.list("run/")] == [1, 1, 1]
        assert asked == [tmp_path / "store/run"] * 3

    def test_a_size_that_a_file_server_told_before_the_last_write_is_no_damage(self, storage, monkeypatch):
        """NFS knows a file that was listed while it was being written by its size then, for seconds, unless it is opened."""
        storage.put_bytes("run/x", b"whole")
        status = Way.status

        def old_status(way, name):
            found = status(way, name)
            return os.stat_result([*found[:6], 1, *found[7:10]])

        monkeypatch.setattr(Way, "status", old_status)
        assert storage.size("run/x") == 1
        assert storage.reopened().size("run/x") == 5
        with pytest.raises(FileNotFoundError):
            storage.reopened().size("run")

    @pytest.mark.parametrize("call", ["open", "mkdir"])
    @pytest.mark.parametrize(
        ("free", "words"), [(0, r"left on device \(all inodes are used.*df -i.*\)"), (1, "left on device:")]
    )
    def test_inodes_that_are_used_up_are_told(self, storage, monkeypatch, call, free, words):
        system = getattr(os, call)

        def full(path, *args, **kwargs):
            if call == "mkdir" or args[0] & os.O_CREAT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return system(path, *args, **kwargs)

        storage.put_bytes("run/x", b"1")
        monkeypatch.setattr(os, call, full)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=70, f_favail=free))
        with pytest.raises(OSError, match=words) as caught:
            storage.put_bytes("run/d/x" if call == "mkdir" else "run/x", b"1")
        assert caught.value.errno == errno.ENOSPC

    def test_of_files_that_do_not_fit_together_none_is_left(self, storage, tmp_path, monkeypatch):
        files = {f"run/{number}": tmp_path / str(number) for number in range(3)}
        for path in files.values():
            path.write_bytes(bytes(400))
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=9999, f_bavail=1000, f_frsize=1))
        storage.put_bytes("there", b"1")
        with pytest.raises(OSError, match=r"No space left .*\(1200 bytes needed, 1000 free\)"):
            storage.put_files(files)
        assert [info.key for info in storage.list("")] == ["there"]

    def test_a_listing_after_a_key_in_a_folder_goes_on_in_that_folder(self, storage):
        """The folder itself sorts before the key, and what remains of it after."""
        keys = ["run/a", "run/b/1", "run/b/2", "run/b/c/3", "run/b/c/4", "run/d"]
        for key in keys:
            storage.put_bytes(key, b"1")
        for number, after in enumerate(keys):
            assert [info.key for info in storage.list("run/", after=after)] == keys[number + 1 :]

    def test_writers_that_make_the_folder_at_the_same_moment_all_write(self, tmp_path, monkeypatch):
        threads, looked, is_dir = 8, threading.Barrier(8), Path.is_dir

        def together(path):  # nobody makes the folder before everybody has seen that there is none
            found = is_dir(path)
            if path == tmp_path / "new" / "store" and not found and not looked.broken:
                with contextlib.suppress(threading.BrokenBarrierError):
                    looked.wait(10)
                looked.abort()
            return found

        monkeypatch.setattr(Path, "is_dir", together)
        storage = LocalStorage(tmp_path / "new" / "store")
        keys = [f"run/{number}" for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda key: storage.put_bytes(key, b"x"), keys))
        assert sorted(info.key for info in storage.list("")) == keys

    def test_what_the_system_cuts_short_is_an_error_and_leaves_nothing(self, storage, tmp_path):
        program = """if True:
            import resource, sys
            from pathlib import Path
            from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
            storage, source = LocalStorage(Path(sys.argv[1])), Path(sys.argv[2])
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            puts = (
                lambda: storage.put_bytes("run/x", bytes(200)),
                lambda: storage.put_file("run/x", source),
                lambda: storage.put_buffers("run/x", [memoryview(bytes(200))]),
            )
            for put in puts:
                try:
                    put()
                except OSError as exc:
                    print(exc.strerror)
            storage.put_bytes("run/small", bytes(100))
        """
        (tmp_path / "in").write_bytes(bytes(200))
        command = [sys.executable, "-c", program, str(tmp_path / "store"), str(tmp_path / "in")]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert shown == "File too large\n" * 3
        assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == ["small"]

    def test_a_listing_shows_neither_temporary_files_nor_what_links_lead_to(self, storage, tmp_path):
        storage.put_bytes("run/x", b"1")
        (tmp_path / "store/run/.tmp-0123456789abcdef").write_bytes(b"half")
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/secret").write_bytes(b"1")
        (tmp_path / "store/run/link").symlink_to(tmp_path / "outside")
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    @pytest.fixture
    def outside(self, tmp_path):
        """A folder with a file, elsewhere, that nothing may change or read."""
        (tmp_path / "outside/below").mkdir(parents=True)
        (tmp_path / "outside/below/x").write_bytes(b"theirs")
        (tmp_path / "outside/below/.tmp-0123456789abcdef").write_bytes(b"theirs")
        before = seen_in(tmp_path / "outside")
        yield tmp_path / "outside"
        assert seen_in(tmp_path / "outside") == before

    def test_what_the_system_lists_twice_is_listed_once(self, storage, monkeypatch):
        """As tmpfs does if a file is replaced while a large directory is read."""
        for key in ("run/x", "run/y/z"):
            storage.put_bytes(key, b"1")
        scandir = os.scandir

        @contextlib.contextmanager
        def scan_twice(folder):
            with scandir(folder) as entries:
                listed = [*entries]
            with scandir(folder) as entries:
                yield [*listed, *entries]

        monkeypatch.setattr(os, "scandir", scan_twice)
        assert [info.key for info in storage.list("")] == ["run/x", "run/y/z"]

    @pytest.mark.parametrize("verb", VERBS, ids=VERBS)
    @pytest.mark.parametrize("place", ["run", "run/checkpoints/id/sub"])
    def test_no_verb_follows_a_link_out_of_the_store(self, storage, outside, tmp_path, verb, place):
        storage.put_bytes("first", b"1")
        link = tmp_path / "store" / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        (tmp_path / "in").write_bytes(b"ours")
        with pytest.raises(PermissionError, match=rf"store/{place} leads out of the storage .* to .*/outside: give that"):
            VERBS[verb](storage, f"{place}/below/x", tmp_path)
        assert link.is_symlink()
        assert storage.get_bytes("first") == b"1"

    def test_what_else_is_to_be_deleted_goes_although_a_link_leads_out(self, storage, raw_keys, outside, tmp_path):
        for key in ("run/id/a", "run/id/z"):
            storage.put_bytes(key, b"1")
        (tmp_path / "store/run/id/sub").symlink_to(outside / "below")
        with pytest.raises(PermissionError, match="run/id/sub leads out of the storage"):
            storage.delete(["run/id/a", "run/id/sub/x", "run/id/z"])
        assert raw_keys() == set()

    def test_a_link_in_the_place_of_an_object_is_replaced_or_removed_itself(self, storage, outside, tmp_path):
        storage.put_bytes("run/y", b"1")
        for name in ("x", "y"):
            (tmp_path / "store/run" / name).unlink(missing_ok=True)
            (tmp_path / "store/run" / name).symlink_to(outside / "below/x")
        for read in (storage.get_bytes, storage.size, storage.local_path):
            with pytest.raises(PermissionError, match=r"run/x leads out of the storage .*outside/below/x"):
                read("run/x")
        storage.put_bytes("run/x", b"ours")
        storage.delete(["run/y"])
        assert storage.get_bytes("run/x") == b"ours"
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    def test_a_link_that_stays_in_the_store_is_followed(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/x", b"1")
        (tmp_path / "store/alias").symlink_to("run/checkpoints")
        storage.put_bytes("alias/y", b"2")
        assert [info.key for info in storage.list("alias/")] == ["alias/x", "alias/y"]
        assert storage.get_bytes("run/checkpoints/y") == b"2"
        assert storage.size("alias/x") == 1
        storage.delete(["alias/x", "alias/y"])
        assert list(storage.list("")) == []

    @pytest.mark.parametrize("verb", ["put_file", "put_files", "put_bytes", "put_buffers", "delete", "remove_interrupted"])
    def test_no_put_and_no_deletion_follows_a_link_below_the_first_name(self, storage, raw_keys, tmp_path, verb):
        for key in ("other/id/x", "run/x"):
            storage.put_bytes(key, b"1")
        (tmp_path / "in").write_bytes(b"ours")
        (tmp_path / "store/other/id/.tmp-0123456789abcdef").write_bytes(b"half")
        (tmp_path / "store/run/sub").symlink_to("../other")
        before = raw_keys()
        with pytest.raises(PermissionError, match=r"store/run/sub is a link to .*/store/other, and nothing is written or"):
            VERBS[verb](storage, "run/sub/id/x", tmp_path)
        assert raw_keys() == before
        assert storage.get_bytes("other/id/x") == b"1"
        storage.delete(["run/sub"])
        assert not (tmp_path / "store/run/sub").is_symlink()

    def test_below_a_link_to_nothing_there_is_nothing_to_delete(self, storage, tmp_path):
        storage.put_bytes("run/x", b"1")
        (tmp_path / "store/run/sub").symlink_to("../other")
        storage.delete(["run/sub/x"])
        assert (tmp_path / "store/run/sub").is_symlink()

    def test_a_link_to_itself_leads_nowhere(self, storage, tmp_path):
        storage.put_bytes("x", b"1")
        (tmp_path / "store/loop").symlink_to("loop")
        for key in ("loop", "loop/x"):
            for read in (storage.get_bytes, storage.size, storage.digest):
                with pytest.raises(FileNotFoundError, match="loop"):
                    read(key)
        (tmp_path / "store/below").symlink_to("below/itself")
        with pytest.raises(FileNotFoundError, match="store/below"):
            storage.get_bytes("below")
        assert list(storage.list("loop/")) == list(storage.folders("loop/")) == []
        with pytest.raises(FileNotFoundError, match="store/loop"):
            storage.put_bytes("loop/x", b"1")
        storage.put_bytes("loop", b"1")
        assert storage.get_bytes("loop") == b"1"

    def test_a_folder_that_becomes_a_link_during_a_put_leads_nowhere(self, storage, outside, tmp_path, monkeypatch):
        replace, swapped = os.replace, []

        def swap(*args, **folders):
            (tmp_path / "store/run").rename(tmp_path / "moved")
            (tmp_path / "store/run").symlink_to(outside / "below")
            swapped.append(1)
            replace(*args, **folders)

        monkeypatch.setattr(os, "replace", swap)
        storage.put_bytes("run/x", b"ours")
        assert len(swapped) == 1
        assert (tmp_path / "moved/x").read_bytes() == b"ours"

    def test_what_would_lie_below_a_file_or_is_a_folder_is_missing_to_reads_and_deletes(self, storage, raw_keys, tmp_path):
        storage.put_bytes("f/x", b"1")
        for read in (storage.get_bytes, storage.size, lambda key: storage.get_file(key, tmp_path / "out")):
            with pytest.raises(FileNotFoundError, match="f/x/y is no file"):
                read("f/x/y")
        storage.delete(["f", "f/x/y"])
        assert raw_keys() == {"f/x"}

    def test_the_store_itself_may_be_a_link(self, tmp_path):
        LocalStorage(tmp_path / "elsewhere").put_bytes("run/x", b"1")
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        assert [info.key for info in LocalStorage(tmp_path / "link").list("run/")] == ["run/x"]

    def test_every_folder_that_a_put_makes_is_synced_into_its_parent(self, tmp_path, monkeypatch):
        synced, sync, replace = [], os.fsync, os.replace

        def record(descriptor):
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            sync(descriptor)

        def record_name(source, target, **folders):
            synced.append(target)
            replace(source, target, **folders)

        monkeypatch.setattr(os, "fsync", record)
        monkeypatch.setattr(os, "replace", record_name)
        LocalStorage(tmp_path / "new/deep/root").put_bytes("run/x", b"1")
        made = [tmp_path, tmp_path / "new", tmp_path / "new/deep", tmp_path / "new/deep/root"]
        assert synced[:4] == made
        assert synced[5:] == ["x", tmp_path / "new/deep/root/run"]
        synced.clear()
        LocalStorage(tmp_path / "new/deep/root").put_bytes("run/y", b"1")
        assert synced[1:] == ["y", tmp_path / "new/deep/root/run"]  # after the file: a report pays for no more

    @pytest.mark.parametrize("victim", ["a/b", "a"])
    def test_a_folder_that_a_delete_removes_while_a_put_makes_it_is_made_again(self, storage, tmp_path, monkeypatch, victim):
        make, removed = os.mkdir, []

        def mkdir(path, *args, **kwargs):
            make(path, *args, **kwargs)
            if path == Path(victim).name and not removed:
                removed.append(path)
                os.rmdir(path, **kwargs)

        monkeypatch.setattr(os, "mkdir", mkdir)
        storage.put_bytes("a/b/x", b"1")
        assert len(removed) == 1
        assert storage.get_bytes("a/b/x") == b"1"

    def test_a_folder_that_goes_while_mkdir_looks_at_it_is_made_again(self, storage, tmp_path, monkeypatch):
        make, gone = os.mkdir, []

        def mkdir(path, *args, **kwargs):
            if path == "a" and not gone:
                gone.append(path)
                raise FileExistsError(17, "File exists", path)
            make(path, *args, **kwargs)

        monkeypatch.setattr(os, "mkdir", mkdir)
        storage.put_bytes("a/x", b"1")
        assert len(gone) == 1
        assert storage.get_bytes("a/x") == b"1"

    def test_a_file_in_the_place_of_a_folder_is_named(self, storage):
        storage.put_bytes("a", b"1")
        with pytest.raises(OSError, match="store/a"):
            storage.put_bytes("a/x", b"1")
        assert storage.get_bytes("a") == b"1"

    def test_where_no_folder_can_be_made_a_put_says_so(self):
        with pytest.raises(FileNotFoundError, match="/proc/nowhere"):
            LocalStorage(Path("/proc/nowhere")).put_bytes("run/x", b"1")

    def test_a_put_whose_object_is_deleted_at_once_has_succeeded(self, storage, tmp_path, monkeypatch):
        replace, deleted = os.replace, []

        def replace_and_delete(source, target, **folders):
            replace(source, target, **folders)
            deleted.append(target)
            storage.delete(["a/x"])

        monkeypatch.setattr(os, "replace", replace_and_delete)
        storage.put_bytes("a/x", b"1")
        assert len(deleted) == 1
        assert not (tmp_path / "store/a").exists()

    def test_what_a_killed_writer_left_is_removed_once_it_is_old(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/whole/x", b"1")
        left = tmp_path / "store/run/checkpoints/half/.tmp-0123456789abcdef"
        left.parent.mkdir()
        left.write_bytes(b"half")
        storage.remove_interrupted("run/", older_than_s=3600)
        assert left.exists()
        storage.remove_interrupted("run/", older_than_s=0)
        assert [path.name for path in (tmp_path / "store/run/checkpoints").iterdir()] == ["whole"]
        assert storage.get_bytes("run/checkpoints/whole/x") == b"1"

    @pytest.mark.parametrize("name", KEPT_OPEN)
    def test_a_deleted_file_that_is_still_open_is_no_object(self, storage, tmp_path, name):
        """Its client keeps it for a reader on this machine: NFS, AFS, FUSE."""
        storage.put_bytes(f"run/{name}x", b"1")
        kept = tmp_path / "store/run" / name
        kept.write_bytes(b"deleted")
        assert [info.key for info in storage.list("run/")] == [f"run/{name}x"]
        storage.remove_interrupted("run/", older_than_s=0)
        storage.delete([f"run/{name}x"])
        assert kept.read_bytes() == b"deleted"

    def test_what_is_deeper_than_any_report_is_left_out_and_ends_no_listing(self, storage, tmp_path, caplog):
        storage.put_bytes("run/x/x/m", b"1")
        storage.put_bytes("run/y", b"1")
        deep = make_deep(tmp_path / "store/run")
        left = deep / ".tmp-0123456789abcdef"
        for file in (deep / "m", left):
            file.touch()
        assert [info.key for info in storage.list("run/")] == ["run/x/x/m", "run/y"]
        assert f"left out: {tmp_path}/store/run/x/x/x" in caplog.text
        assert "is nested more than 128 levels deep: move or delete it" in caplog.text
        storage.remove_interrupted("run/", older_than_s=0)
        assert left.exists()

    def test_deleting_the_last_file_removes_its_folders(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/id/sub/x", b"1")
        storage.put_bytes("run/manifests/id.json", b"1")
        storage.delete(["run/checkpoints/id/sub/x"])
        assert sorted(path.name for path in (tmp_path / "store/run").iterdir()) == ["manifests"]


class RefusedRequestError(OSError):
    """An error of an HTTP client that has the server's response, as Hugging Face's has."""

    def __init__(self, status):
        super().__init__("the server refused a request")
        self.response = SimpleNamespace(status_code=status)


class TestMemoryStorage(StorageContract, WholeWritesContract):
    num_many = 20
    writes = ("file", "buffers")

    @pytest.fixture
    def partial_writes(self, monkeypatch):
        return PartialWrites(monkeypatch, memory, "MemoryFile")

    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(f"memory://{tmp_path}", {})

    @pytest.fixture
    def raw_keys(self, tmp_path):
        files = fsspec.filesystem("memory").store
        return lambda: {path.removeprefix(f"{tmp_path}/") for path in files if path.startswith(f"{tmp_path}/")}

    @pytest.mark.parametrize(
        ("raised", "expected", "words"),
        [
            (FileNotFoundError("/x"), FileNotFoundError, "memory://.*/run/x does not exist"),
            (PermissionError("no"), PermissionError, "memory://.*/run/x is refused"),
            (OSError(28, "No space left on device"), OSError, "No space left"),
            (OSError(30, "Read-only file system", "/x.zip"), OSError, "Read-only file system: '/x.zip'"),
            (EOFError("connection lost"), StorageError, "memory://.*/run/x: EOFError: connection lost"),
            (ModuleNotFoundError("No module named 'pyarrow'"), ValueError, "No module named 'pyarrow'; install what"),
            (RefusedRequestError(401), PermissionError, "memory://.*/run/x is refused"),
            (RefusedRequestError(503), StorageError, "memory://.*/run/x: RefusedRequestError"),
        ],
    )
    def test_what_a_filesystem_raises_is_named_in_the_protocols_words(self, storage, monkeypatch, raised, expected, words):
        def fail(*_, **__):
            raise raised

        storage.put_bytes("run/x", b"1")
        monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", fail)
        with pytest.raises(expected, match=words):
            storage.get_bytes("run/x")

    @pytest.mark.parametrize(
        ("number", "words"),
        [(255, r"\[errno 255\] Unknown error 255"), (errno.EROFS, r"\(a NameNode in safe mode says so, as for minutes")],
    )
    def test_what_a_namenode_answers_while_it_restarts_may_pass(self, storage, monkeypatch, number, words):
        """libhdfs has no other number for a lost connection or a standby, nor for safe mode."""
        error = OSError(number, f"HDFS Write failed. Detail: [errno {number}] {os.strerror(number)}")
        monkeypatch.setattr(memory.MemoryFileSystem, "pipe_file", Mock(side_effect=error))
        with pytest.raises(StorageError, match=f"run/x: OSError: .*{words}"):
            storage.put_bytes("run/x", b"1")

    def test_as_many_files_are_deleted_at_once_as_there_are_connections(self, storage, raw_keys, monkeypatch):
        keys = [f"run/{number}" for number in range(8)]
        for key in keys:
            storage.put_bytes(key, b"1")
        together, remove = threading.Barrier(4, timeout=60), memory.MemoryFileSystem.rm_file

        def remove_together(fs, path):
            together.wait()
            remove(fs, path)

        storage._rmdir_spares_files = True  # found out with files of its own
        monkeypatch.setattr(memory.MemoryFileSystem, "rm_file", remove_together)
        storage.delete(keys)
        assert raw_keys() == set()

    @each_read_of(5)
    def test_a_file_that_ends_before_its_size_is_not_read_as_a_shorter_one(self, storage, monkeypatch, tmp_path, call):
        """webdav4 takes a lost connection for the end of the file."""
        storage.put_bytes("run/x", b"123456")
        monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", AbstractFileSystem.cat_file)  # webdav4 has none, either
        real = memory.MemoryFile.readinto
        monkeypatch.setattr(memory.MemoryFile, "read", lambda self, *_: io.BytesIO.read(self, 3))
        monkeypatch.setattr(memory.MemoryFile, "readinto", lambda self, into: self.tell() < 3 and real(self, into[:3]))
        with pytest.raises(StorageError, match=r"/run/x: 3 of [56] bytes came"):
            call(storage, tmp_path / "got")

    def test_the_size_of_a_compressed_response_is_not_that_of_the_file(self, storage, monkeypatch, tmp_path):
        storage.put_bytes("run/x", b"123456")
        real, listed = memory.MemoryFileSystem.info, {"name": "x", "size": 6, "type": "file"}

        def info(self, path, **kwargs):
            return listed if path.endswith("/x") else real(self, path, **kwargs)

        monkeypatch.setattr(memory.MemoryFileSystem, "info", info)
        monkeypatch.setattr(memory.MemoryFile, "size", 25)
        assert storage.get_file("run/x", tmp_path / "got") == storage.digest("run/x")
        assert (tmp_path / "got").read_bytes() == b"123456"

    def test_an_unknown_scheme_is_refused_with_what_can_be_used(self):
        with pytest.raises(ValueError, match=r"nosuch.*Give a local path, s3://"):
            FsspecStorage("nosuch://place", {})

    def test_what_its_filesystem_needs_may_be_in_fsspecs_own_configuration(self, monkeypatch):
        class Strict(memory.MemoryFileSystem):
            def __init__(self, host):
                super().__init__()

        fsspec.register_implementation("strict", Strict, clobber=True)
        with pytest.raises(ValueError, match=r"missing a required argument: 'host'"):
            FsspecStorage("strict:///folder", {})
        monkeypatch.setitem(fsspec.config.conf, "memory", {"host": "here"})
        storage = FsspecStorage("strict:///folder", {})
        storage.put_bytes("run/x", b"1")
        assert storage.get_bytes("run/x") == b"1"

    def test_a_listing_that_breaks_off_is_an_error_and_not_a_shorter_one(self, storage, monkeypatch):
        """fsspec's own walk leaves out a folder that it cannot list."""
        for key in ("run/a/x", "run/b/x"):
            storage.put_bytes(key, b"1")
        if "find" in vars(memory.MemoryFileSystem):  # not in fsspec before 2025
            monkeypatch.delattr(memory.MemoryFileSystem, "find")
        real, fired = memory.MemoryFileSystem.ls, []

        def ls(self, path, detail=True, **kwargs):
            if path.endswith("/b") and not fired:
                fired.append(path)
                raise OSError("Socket is closed")
            return real(self, path, detail, **kwargs)

        monkeypatch.setattr(memory.MemoryFileSystem, "ls", ls)
        with pytest.raises(StorageError, match="Socket is closed"):
            list(storage.list("run/"))
        assert len(fired) == 1
        assert [info.key for info in storage.list("run/")] == ["run/a/x", "run/b/x"]


class RecursiveRmdir(fsspec_local.LocalFileSystem):
    """A filesystem whose rmdir deletes what is in the directory, as that of HDFS does."""

    protocol = "recursive"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("recursive://"))

    def rmdir(self, path):
        shutil.rmtree(path)


class CheckedRmdir(RecursiveRmdir):
    """As webdav4's: rmdir looks for files first, and then deletes whatever is there by now."""

    def rmdir(self, path):
        if self.ls(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        super().rmdir(path)


class RefusingRmdir(RecursiveRmdir):
    def rmdir(self, path):
        Path(path).rmdir()


@pytest.mark.parametrize(("kind", "left"), [(RecursiveRmdir, True), (CheckedRmdir, True), (RefusingRmdir, False)])
def test_an_empty_folder_is_removed_only_where_rmdir_would_refuse_a_full_one(tmp_path, kind, left):
    fsspec.register_implementation("recursive", kind, clobber=True)
    storage = FsspecStorage(f"recursive://{tmp_path}", {})
    for _ in range(2):
        storage.put_bytes("run/pins/a.json", b"{}")
        storage.delete(["run/pins/a.json"])
        assert list(tmp_path.rglob("*")) == ([tmp_path / "run", tmp_path / "run/pins"] if left else [])
    storage.delete(["run/other/b.json"])
    assert not (tmp_path / "run/other").exists()


def test_what_another_process_stores_in_a_folder_that_was_just_empty_stays(tmp_path, monkeypatch):
    """Such as a pin, while a prune removes its own witness."""
    fsspec.register_implementation("recursive", RecursiveRmdir, clobber=True)
    storage, stored = FsspecStorage(f"recursive://{tmp_path}", {}), []

    def ls(self, path, *args, **kwargs):
        found = super(RecursiveRmdir, self).ls(path, *args, **kwargs)
        if path.endswith("/pins") and not found and not stored:
            stored.append(FsspecStorage(f"recursive://{tmp_path}", {}).put_bytes("run/pins/b.json", b"{}"))
        return found

    monkeypatch.setattr(RecursiveRmdir, "ls", ls)
    storage.put_bytes("run/pins/a.json", b"{}")
    storage.delete(["run/pins/a.json"])
    assert len(stored) == 1
    assert [info.key for info in storage.list("run/")] == ["run/pins/b.json"]


class Hdfs(RecursiveRmdir):
    """As fsspec's, over pyarrow and libhdfs: a failing look-up finds nothing, and what is missing cannot be deleted."""

    protocol = "hdfs"
    is_away = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("as-hdfs://"))

    def info(self, path, **kwargs):
        if Hdfs.is_away:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().info(path, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        if Hdfs.is_away:
            raise OSError(255, "Opening HDFS file failed. Detail: [errno 255] Unknown error 255")
        return super()._open(path, mode, **kwargs)

    def rm_file(self, path):
        if Hdfs.is_away:
            raise OSError(255, "HDFS delete failed. Detail: [errno 255] Unknown error 255")
        if not Path(path).exists():
            raise OSError(errno.EIO, "HDFS delete failed. Detail: [errno 5] Input/output error")
        super().rm_file(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if start == 0:
            raise OSError("only valid on seekable files")
        return super().cat_file(path, start, end, **kwargs)


@pytest.fixture
def hdfs(tmp_path, monkeypatch):
    monkeypatch.setattr(Hdfs, "is_away", False)
    fsspec.register_implementation("as-hdfs", Hdfs, clobber=True)
    return FsspecStorage(f"as-hdfs://{tmp_path}/store", {})


def test_hdfs_reads_a_range_from_the_beginning_and_deletes_what_is_missing(hdfs, tmp_path):
    hdfs.put_bytes("run/x", b"123")
    into = memoryview(bytearray(5))
    assert (hdfs.get_range("run/x", 0, into), bytes(into[:3])) == (3, b"123")
    hdfs.delete(["run/missing", "run/x", "other/missing"])
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_a_namenode_that_is_away_is_not_taken_for_a_missing_file(hdfs, monkeypatch, tmp_path):
    hdfs.put_bytes("run/x", b"123")
    reads = [
        hdfs.get_bytes,
        hdfs.size,
        hdfs.digest,
        lambda key: hdfs.get_range(key, 1, memoryview(bytearray(1))),
        lambda key: hdfs.get_file(key, tmp_path / "got", 3),
    ]
    for call in reads:
        with pytest.raises(FileNotFoundError):
            call("run/missing")
    monkeypatch.setattr(Hdfs, "is_away", True)
    for call in (*reads, lambda key: hdfs.delete([key])):
        with pytest.raises(StorageError, match="errno 255"):
            call("run/x")


def test_a_put_whose_size_cannot_be_looked_up_on_hdfs_may_be_tried_again(hdfs, monkeypatch):
    hdfs.put_bytes("run/x", b"123")
    real = fsspec_backend.require_whole

    def goes_away(*args):
        Hdfs.is_away = True
        real(*args)

    monkeypatch.setattr(fsspec_backend, "require_whole", goes_away)
    with pytest.raises(StorageError, match="errno 255"):
        hdfs.put_bytes("run/y", b"1")


class TestSftpStorage(StorageContract, WholeWritesContract):
    """On a real OpenSSH server."""

    num_many = 120  # a hundred are named at a time

    @pytest.mark.parametrize("name", KEPT_OPEN)
    def test_a_deleted_file_that_is_open_on_the_server_is_no_object(self, storage, tmp_path, name):
        """The server's own directory may be a mount."""
        storage.put_bytes("run/x", b"1")
        (tmp_path / "store/run" / name).write_bytes(b"deleted")
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    @pytest.fixture
    def unconnected(self, sshd, tmp_path):
        return FsspecStorage(f"sftp://127.0.0.1{tmp_path}/store", sshd.options())

    @pytest.fixture(scope="class")
    @classmethod
    def connections(cls, sshd):
        return FsspecStorage("sftp://127.0.0.1/tmp", sshd.options())._connections

    @pytest.fixture
    def storage(self, unconnected, connections):
        unconnected._connections = connections  # to connect takes a fifth of a second
        return unconnected

    @pytest.fixture
    def raw_keys(self, tmp_path):
        root = tmp_path / "store"
        return lambda: {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    @pytest.fixture
    def partial_writes(self, monkeypatch, storage):
        storage.put_bytes("first", b"1")  # what it finds out first is not to be disturbed
        storage.delete(["first"])
        return PartialWrites(monkeypatch, paramiko.sftp_client, "SFTPFile")

    def test_a_put_that_breaks_off_leaves_what_was_there(self, storage, raw_keys, tmp_path, monkeypatch):
        storage.put_bytes("run/x", b"whole")
        write, fired = paramiko.SFTPFile.write, []

        def break_off(file, data):
            write(file, data[:1])
            fired.append(1)
            raise EOFError

        with monkeypatch.context() as patch:
            patch.setattr(paramiko.SFTPFile, "write", break_off)
            with pytest.raises(StorageError, match="run/x: EOFError"):
                storage.put_bytes("run/x", b"other")
        assert len(fired) == 1
        assert storage.get_bytes("run/x") == b"whole"
        assert raw_keys() == {"run/x"}

    @pytest.mark.parametrize("size", [1, 2**15, 3 * 2**20 + 1])
    def test_a_file_is_closed_when_the_server_has_answered_to_all_of_it(self, storage, monkeypatch, size):
        storage.put_bytes("run/first", b"1")
        close, unanswered = paramiko.SFTPFile._close, []

        def count(file, async_=False):
            if not file._closed:
                unanswered.append(len(file._reqs))
            close(file, async_)

        monkeypatch.setattr(paramiko.SFTPFile, "_close", count)
        storage.put_buffers("run/x", [memoryview(bytes(size)), memoryview(b"")])
        assert unanswered == [0]

    @each_read_of(90_000)
    def test_a_file_whose_connection_ends_is_not_read_as_a_shorter_one(self, storage, monkeypatch, tmp_path, call):
        """Once all requests on the way are answered, paramiko takes the end of the connection for that of the file."""
        storage.put_bytes("run/x", bytes(100_000))
        read, num_reads = paramiko.SFTPFile._read, itertools.count()

        def break_off(file, size):
            if next(num_reads) > 0:
                raise EOFError
            return read(file, size)

        monkeypatch.setattr(paramiko.SFTPFile, "_read", break_off)
        with pytest.raises(StorageError, match=r"/run/x: \d+ of \d+ bytes came"):
            call(storage, tmp_path / "got")

    def test_readers_see_the_old_object_or_the_new_one(self, storage):
        old, new = b"o" * 100_000, b"n" * 90_000
        storage.put_bytes("run/x", old)
        seen, stopped = set(), threading.Event()

        def read():
            while not stopped.is_set():
                seen.add(storage.get_bytes("run/x"))

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            for data in [new, old] * 10:
                storage.put_bytes("run/x", data)
            stopped.set()
            reading.result()
        assert seen <= {old, new}

    def test_what_an_interrupted_put_left_is_hidden_and_removed_once_it_is_old(self, storage, raw_keys, tmp_path):
        storage.put_bytes("run/id/x", b"1")
        left = tmp_path / "store/run/id/.tmp-0123456789abcdef"
        left.write_bytes(b"half")
        assert [info.key for info in storage.list("run/")] == ["run/id/x"]
        storage.remove_interrupted("run/", older_than_s=3600)
        assert left.exists()
        os.utime(left, (1e9, 1e9))
        storage.remove_interrupted("run/", older_than_s=3600)
        assert raw_keys() == {"run/id/x"}

    def test_deleting_the_last_file_removes_its_folders(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/id/sub/x", b"1")
        storage.put_bytes("run/manifests/id.json", b"1")
        storage.delete(["run/checkpoints/id/sub/x"])
        assert sorted(path.name for path in (tmp_path / "store/run").iterdir()) == ["manifests"]

    def test_a_listing_shows_no_links(self, storage, tmp_path):
        storage.put_bytes("run/x", b"1")
        (tmp_path / "outside").mkdir()
        (tmp_path / "store/run/link").symlink_to(tmp_path / "outside")
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    def test_a_lost_connection_may_work_later_and_the_next_call_opens_another(self, unconnected):
        storage = unconnected
        storage.put_bytes("run/x", b"1")
        (lost,) = storage._connections._idle
        lost.client.close()
        with pytest.raises(StorageError) as caught:
            storage.get_bytes("run/x")
        assert classify(caught.value) == "transient"
        assert storage.get_bytes("run/x") == b"1"

    def test_connections_are_closed_with_the_storage(self, sshd, tmp_path):
        storage = FsspecStorage(f"sftp://127.0.0.1{tmp_path}", sshd.options())
        storage.put_bytes("run/x", b"1")
        (connection,) = storage._connections._idle
        transport = connection.client.get_transport()
        assert transport.is_alive()
        del storage, connection
        gc.collect()
        transport.join(30)
        assert not transport.is_alive()

    def test_requests_are_sent_at_once(self, storage):
        storage.put_bytes("run/x", b"1")
        (connection, *_) = storage._connections._idle
        assert connection.client.get_transport().sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_no_server_may_be_there_later(self, sshd, tmp_path):
        options = {**sshd.options(), "port": free_port()}
        storage = FsspecStorage(f"sftp://127.0.0.1{tmp_path}", options)  # asks nothing
        with pytest.raises(StorageError, match="Unable to connect"):
            storage.get_bytes("run/x")

    def test_a_login_that_is_refused_is_told_at_once(self, sshd, tmp_path):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
        storage = FsspecStorage(f"sftp://127.0.0.1{tmp_path}", {**sshd.options(), "key_filename": str(tmp_path / "other")})
        with pytest.raises(PermissionError, match=r"check the credentials .*Authentication"):
            storage.get_bytes("run/x")

    def test_a_server_that_ends_during_a_login_has_not_refused_it(self, sshd):
        class Ending(paramiko.ServerInterface):
            def get_allowed_auths(self, username):
                return "publickey"

            def check_auth_publickey(self, username, key):
                connection.close()
                return paramiko.AUTH_FAILED

        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            options = {**sshd.options(), "port": server.getsockname()[1]}
            reading = pool.submit(FsspecStorage("sftp://127.0.0.1/tmp", options).get_bytes, "run/x")
            connection = paramiko.Transport(server.accept()[0])
            connection.add_server_key(paramiko.Ed25519Key.from_private_key_file(str(sshd.key)))
            connection.start_server(threading.Event(), Ending())  # an event: else it may raise the end that this is about
            with pytest.raises(StorageError, match="transport shut down or saw EOF"):
                reading.result()

    def test_the_error_on_a_full_disk_says_that_it_may_be_full(self, sshd, tmp_path):
        with mounted(tmp_path / "disk") as disk:
            storage = FsspecStorage(f"sftp://127.0.0.1{disk}", sshd.options())
            with pytest.raises(StorageError, match=r"run/x: OSError: Failure \(SFTP servers .* full or read-only disk\)"):
                storage.put_buffers("run/x", [memoryview(bytes(2**21))])

    def test_a_login_without_a_key_is_told_at_once(self, sshd, tmp_path):
        options = {"port": sshd.options()["port"], "look_for_keys": False, "allow_agent": False}
        with pytest.raises(PermissionError, match=r"check the credentials .*No authentication methods available"):
            FsspecStorage(f"sftp://127.0.0.1{tmp_path}", options).get_bytes("run/x")

    def test_a_key_whose_passphrase_is_not_given_is_told_at_once(self, sshd, tmp_path):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "locked"], check=True)
        storage = FsspecStorage(f"sftp://127.0.0.1{tmp_path}", {**sshd.options(), "key_filename": str(tmp_path / "locked")})
        with pytest.raises(PermissionError, match=r"check the credentials .*PasswordRequired"):
            storage.get_bytes("run/x")

    def test_a_server_whose_key_is_not_trusted_is_told_at_once(self, sshd, monkeypatch, tmp_path):
        monkeypatch.setattr(paramiko, "AutoAddPolicy", paramiko.RejectPolicy)  # as host_key_policy="reject" of newer versions
        storage = FsspecStorage(f"sftp://127.0.0.1{tmp_path}", sshd.options())
        with pytest.raises(PermissionError, match=r"check the credentials .*not found in known_hosts"):
            storage.get_bytes("run/x")

    def test_a_checkpoint_is_committed_found_and_pruned(self, storage, raw_keys, tmp_path):
        store = CheckpointStore.open(storage, "run")
        session = Attempt(store).session()
        for score in (1, 2):
            session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
        prune_as_leader(store, RetentionPolicy(1))
        (kept,) = store.list()
        store.verify(kept)
        assert read_files(store.checkpoint(kept)) == {"model": b"2"}
        assert {key.split("/")[2] for key in raw_keys() if key.startswith("run/checkpoints")} == {kept.id}


class S3Contract(StorageContract):
    """What every server must do."""

    @pytest.fixture
    def bucket(self, server: S3Server):
        return server.new_bucket()

    @pytest.fixture
    def storage(self, server: S3Server, bucket):
        return ObstoreStorage(f"s3://{bucket}/some/prefix", server.options())

    @pytest.fixture
    def raw_keys(self, server: S3Server, bucket):
        def keys():
            pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
            return {item["Key"].removeprefix("some/prefix/") for page in pages for item in page.get("Contents", [])}

        return keys

    def test_objects_lie_below_the_prefix(self, server, bucket, storage):
        storage.put_bytes("run/latest.json", b"{}")
        listed = server.client().list_objects_v2(Bucket=bucket)["Contents"]
        assert [item["Key"] for item in listed] == ["some/prefix/run/latest.json"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda storage: storage.put_bytes("run/x", b"1"),
            lambda storage: storage.put_file("run/x", Path(__file__)),
            lambda storage: storage.get_bytes("run/x"),
            lambda storage: list(storage.list("run/")),
        ],
        ids=["put_bytes", "put_file", "get_bytes", "list"],
    )
    def test_a_missing_bucket_is_named(self, server, call):
        storage = ObstoreStorage("s3://no-such-bucket-here/prefix", server.options())
        with pytest.raises(FileNotFoundError, match=r"bucket of s3://no-such-bucket-here/.* does not exist: create it"):
            call(storage)

    def test_the_environment_configures_a_plain_url(self, server, bucket, monkeypatch):
        for name, value in server.options().items():
            monkeypatch.setenv(name.upper(), value)
        ObstoreStorage(f"s3://{bucket}", {}).put_bytes("run/x", b"1")
        assert server.client().get_object(Bucket=bucket, Key="run/x")["Body"].read() == b"1"

    def test_a_profile_configures_a_plain_url(self, server, bucket, monkeypatch, tmp_path):
        (tmp_path / "config").write_text(
            f"[profile lab]\nregion = eu-west-3\nendpoint_url = {server.endpoint}\n"
            f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
        )
        with monkeypatch.context() as machine:
            machine.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            machine.setenv("AWS_PROFILE", "lab")
            ObstoreStorage(f"s3://{bucket}", {}).put_bytes("run/x", b"1")
        assert server.client().get_object(Bucket=bucket, Key="run/x")["Body"].read() == b"1"

    @pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
    def test_every_variable_that_names_an_endpoint_counts(self, server, bucket, monkeypatch, variable):
        options = server.options()
        monkeypatch.setenv(variable, options.pop("aws_endpoint_url"))
        ObstoreStorage(f"s3://{bucket}", options).put_bytes("run/x", b"1")

    @pytest.mark.parametrize("name", ["aws_allow_http", "allow_http", "AWS_ALLOW_HTTP", "aws_timeout", "connect_timeout"])
    def test_settings_of_the_http_client_may_be_options(self, server, bucket, name):
        value = "true" if "http" in name.lower() else "30s"
        ObstoreStorage(f"s3://{bucket}", {**server.options(), name: value}).put_bytes("run/x", b"1")

    def test_options_may_be_written_in_capitals(self, server, bucket):
        capitals = {name.upper(): value for name, value in server.options().items()}
        ObstoreStorage(f"s3://{bucket}", capitals).put_bytes("run/x", b"1")

    def test_options_may_leave_out_aws_in_their_names(self, server, bucket):
        short = {name.removeprefix("aws_"): value for name, value in server.options().items()}
        ObstoreStorage(f"s3://{bucket}", short).put_bytes("run/x", b"1")


class UploadsContract(S3Contract):
    """What servers must do that list unfinished uploads."""

    def test_a_put_that_breaks_off_leaves_no_parts_behind(self, server, bucket, storage, tmp_path, monkeypatch):
        (tmp_path / "in").write_bytes(bytes(20 * 2**20))

        class Unreadable(object_store.RunningDigest):
            def passed(self, parts):
                yield from list(super().passed(parts))[:2]
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(object_store, "RunningDigest", Unreadable)
        with pytest.raises(OSError, match="Input/output error"):
            storage.put_file("run/x", tmp_path / "in")
        assert "Uploads" not in server.client().list_multipart_uploads(Bucket=bucket)
        assert list(storage.list("")) == []

    def test_uploads_that_nobody_will_finish_are_aborted_once_they_are_old(self, server, bucket, storage):
        client = server.client()
        keys = ["some/prefix/run/checkpoints/a", "some/prefix/run/checkpoints/b", "some/prefix/run-2/x", "elsewhere/run/x"]
        for key in keys:
            upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
            client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"part")

        def left():
            return sorted(upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []))

        storage.remove_interrupted("run/", older_than_s=3600)  # by their parts: moto says 2010 of every upload
        assert left() == sorted(keys)
        storage.remove_interrupted("run/", older_than_s=-5)
        assert left() == ["elsewhere/run/x", "some/prefix/run-2/x"]


class TestS3OnMoto(UploadsContract):
    @pytest.fixture
    def server(self, moto):
        return moto


class TestS3OnRclone(UploadsContract):
    @pytest.fixture
    def server(self, rclone):
        return rclone

    def test_a_range_is_read_without_what_is_before_it(self, storage, monkeypatch):
        monkeypatch.delattr(ObstoreStorage, "_skim")
        storage.put_bytes("run/x", bytes(range(256)) * 1000)
        into = bytearray(300)
        for start, count in ((0, 300), (5, 300), (255_900, 100)):
            assert storage.get_range("run/x", start, memoryview(into)) == count
            assert into[:count] == (bytes(range(256)) * 1000)[start : start + 300]

    def test_where_a_range_cannot_be_asked_for_what_is_before_it_is_read(self, storage, monkeypatch):
        monkeypatch.setattr(object_store, "read_range_with_status_200", lambda *_: None)
        storage.put_bytes("run/x", bytes(range(256)))
        into = bytearray(10)
        assert storage.get_range("run/x", 100, memoryview(into)) == 10
        assert bytes(into) == bytes(range(100, 110))

    def test_a_connection_that_breaks_off_in_a_whole_object_may_work_later(self, storage, monkeypatch):
        storage.put_bytes("run/x", bytes(range(256)))
        broken = SimpleNamespace(stream=lambda min_chunk_size: breaking_off())

        def breaking_off():
            yield bytes(range(100))
            raise GenericError("error decoding response body")

        monkeypatch.setattr(object_store, "read_range_with_status_200", lambda *_: None)
        monkeypatch.setattr(obstore, "get", lambda *_: broken)
        with pytest.raises(StorageError, match=r"run/x: error decoding response body"):
            storage.get_range("run/x", 50, memoryview(bytearray(100)))

    def test_wrong_credentials_are_refused_without_showing_them(self, server, bucket):
        options = {**server.options(), "aws_secret_access_key": "not-the-secret"}
        storage = ObstoreStorage(f"s3://{bucket}", options)
        with pytest.raises(PermissionError, match="check the credentials") as caught:
            storage.put_bytes("run/x", b"1")
        assert "not-the-secret" not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)

    def test_a_bucket_without_uploads_is_none_whose_uploads_cannot_be_aborted(self, storage, caplog):
        with caplog.at_level("DEBUG", logger="prefect_torch.ckpt"):
            storage.remove_interrupted("run/", older_than_s=0)
        assert caplog.text == ""


class TestS3OnSeaweedFS(UploadsContract):
    @pytest.fixture
    def server(self, seaweedfs):
        return seaweedfs


class TestS3OnS3rver(S3Contract):
    @pytest.fixture
    def server(self, s3rver):
        return s3rver

    def test_unfinished_uploads_that_it_does_not_list_are_left_to_it(self, storage):
        storage.put_bytes("run/x", b"1")
        storage.remove_interrupted("run/", older_than_s=0)
        assert storage.get_bytes("run/x") == b"1"

    def test_objects_that_it_loses_between_two_pages_are_no_short_listing(self, server, bucket, storage):
        ids = [f"{number:04d}" for number in range(501)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda it: [storage.put_bytes(f"m/{it}{rest}", b"") for rest in (".json", "/eval.json")], ids))
        with pytest.raises(OSError, match=r"server of s3://bucket.* loses objects .* lists m/0000\.json behind m/0000/eval"):
            list(storage.list("m/"))


def test_that_uploads_cannot_be_aborted_is_told_once(caplog):
    with ScriptedServer.answering(403, "<Error><Code>AccessDenied</Code></Error>") as server:
        storage = ObstoreStorage(f"s3://bucket/{server.endpoint.rpartition(':')[2]}", server.options())
        with caplog.at_level("INFO", logger="prefect_torch.ckpt"):
            for _ in range(2):
                storage.remove_interrupted("run/", older_than_s=0)
    assert caplog.text.count("cannot be aborted, and are left to the bucket's lifecycle rule: ") == len(caplog.records) == 1


@pytest.mark.parametrize(("options", "variable"), [({"aws_request_payer": "true"}, "false"), ({}, "true")])
def test_uploads_to_a_bucket_whose_requester_pays_are_found(monkeypatch, options, variable):
    asked = []
    paginator = SimpleNamespace(paginate=lambda **given: asked.append(given) or [])
    client = SimpleNamespace(exceptions=SimpleNamespace(NoSuchUpload=KeyError), get_paginator=lambda _: paginator)
    monkeypatch.setattr(multipart_uploads, "_client", lambda *_: client)
    monkeypatch.setenv("AWS_REQUEST_PAYER", variable)
    ObstoreStorage("s3://bucket", {**options, "aws_skip_signature": "true"}).remove_interrupted("run/", 0.0)
    assert asked == [{"Bucket": "bucket", "Prefix": "run/", "RequestPayer": "requester"}]


def test_an_upload_whose_parts_no_answer_lists_may_be_under_way_and_is_not_aborted(monkeypatch, caplog):
    long_ago = datetime(2020, 1, 1, tzinfo=timezone.utc)
    listed = {"ResponseMetadata": {"HTTPHeaders": {}}, "Bucket": "bucket"}
    listed["Uploads"] = [{"Initiated": long_ago, "Key": "run/x", "UploadId": "1"}]
    aborted = []

    def paginate(**_):
        yield from ()
        raise ReadTimeoutError(endpoint_url="http://server")

    paginators = {"list_multipart_uploads": lambda **_: [listed], "list_parts": paginate}
    client = SimpleNamespace(
        exceptions=SimpleNamespace(NoSuchUpload=KeyError),
        get_paginator=lambda name: SimpleNamespace(paginate=paginators[name]),
        abort_multipart_upload=lambda **given: aborted.append(given),
    )
    monkeypatch.setattr(multipart_uploads, "_client", lambda *_: client)
    with caplog.at_level("DEBUG", logger="prefect_torch.ckpt"):
        ObstoreStorage("s3://bucket", {"aws_skip_signature": "true"}).remove_interrupted("run/", 3600.0)
    assert aborted == []
    assert "Read timeout" in caplog.text


def test_uploads_are_aborted_with_the_credentials_that_a_file_holds_by_now(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for key in ("first", "second"):
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n")
        store = ObstoreStorage("s3://bucket", {"aws_region": "us-east-1"})._store
        signed = multipart_uploads._client(store, True, None, Waits(1, 1)).generate_presigned_url("list_buckets")
        assert f"AWSAccessKeyId={key}&" in signed


@pytest.fixture
def once(monkeypatch):
    monkeypatch.setattr(object_store_config, "_REQUEST_RETRIES", {"max_retries": 0})


@pytest.mark.parametrize(
    ("status", "code", "expected", "kind", "words"),
    [
        (400, "ExpiredToken", PermissionError, "credentials", "have expired"),
        (403, "AccessDenied", PermissionError, "final", "check the credentials and their policy .*AccessDenied: what happened"),
        (401, "Unauthorized", PermissionError, "final", "check the credentials"),
        (503, "SlowDown", StorageError, "transient", "503.*SlowDown"),
        (500, "InternalError", StorageError, "transient", "500.*InternalError"),
        (429, "TooManyRequests", StorageError, "transient", "TooManyRequests"),
        (409, "OperationAborted", StorageError, "transient", "OperationAborted"),
        (400, "AuthorizationHeaderMalformed", OSError, "final", "AuthorizationHeaderMalformed: what happened"),
        (501, "NotImplemented", OSError, "final", "NotImplemented"),
        (400, "RequestTimeout", StorageError, "transient", "RequestTimeout"),
        (400, "BadDigest", StorageError, "transient", "BadDigest"),
        (403, "RequestThrottled", StorageError, "transient", "RequestThrottled"),
        (403, "QuotaExceeded", OSError, "final", r"\[Errno 28\] No space left .*QuotaExceeded"),
        (400, "XMinioAdminBucketQuotaExceeded", OSError, "final", r"\[Errno 28\] No space left"),
        (507, "InsufficientStorage", OSError, "final", r"\[Errno 28\] No space left"),
        (404, "NoSuchBucket", FileNotFoundError, "final", "the bucket of s3://bucket/run/x does not exist"),
        (404, "NoSuchKey", FileNotFoundError, "final", "s3://bucket/run/x does not exist"),
    ],
)
def test_an_answer_of_s3_is_named_by_what_helps_and_shows_no_secret(once, status, code, expected, kind, words):
    body = f"<Error><Code>{code}</Code><Message>what happened</Message><CanonicalRequest>SESSION</CanonicalRequest></Error>"
    with ScriptedServer.answering(status, body) as server:
        storage = ObstoreStorage("s3://bucket", {**server.options(), "aws_session_token": "SESSION"})
        with pytest.raises(expected, match=words) as caught:
            storage.get_bytes("run/x")
    is_denied = code == "AccessDenied"  # as a missing object is, where a policy allows a prefix alone
    assert server.requests == ["GET /bucket/run/x", *(["GET /bucket?delimiter=%2F&list-type=2&prefix=run%2F"] * is_denied)]
    assert classify(caught.value) == kind
    shown = "".join(traceback.format_exception(caught.value))
    assert [secret for secret in ("SESSION", ACCESS_KEY, SECRET_KEY) if secret in shown] == []


SERVER_TIME = "<ServerTime>2024-05-01T14:00:05Z</ServerTime>"


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (f"<RequestTime>20240501T120000Z</RequestTime>{SERVER_TIME}", r"by 2 h \(it is behind\)"),
        (f"<RequestTime>20240501T142005Z</RequestTime>{SERVER_TIME}", r"by 20 min \(it is ahead\)"),
        ("", "by more than is allowed"),
        (f"<RequestTime>noon</RequestTime>{SERVER_TIME}", "by more than is allowed"),
    ],
)
def test_a_clock_that_differs_is_named_and_not_the_credentials(once, times, words):
    body = f"<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message>{times}</Error>"
    with ScriptedServer.answering(403, body) as server:
        storage = ObstoreStorage("s3://bucket", server.options())
        with pytest.raises(
            PermissionError, match=rf"this machine's clock differs from that of s3://bucket/run/x {words}"
        ) as caught:
            storage.get_bytes("run/x")
        assert "credentials" not in str(caught.value)
        assert classify(caught.value) == "final"
        with pytest.raises(StorageUnfitError, match="NTP") as unfit:
            probe_storage(ScriptedReads(storage))
        assert "credentials" not in str(unfit.value)


class ScriptedReads:
    """A storage whose first step already asks the server that answers to GET alone."""

    def __init__(self, storage):
        self.url = storage.url
        self.put_bytes = lambda key, data: storage.get_bytes(key)
        self.delete = lambda keys: None


@pytest.mark.parametrize(
    ("options", "host"),
    [
        ({}, "https://name--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com/"),
        ({"s3_express": "false"}, "https://s3.us-east-1.amazonaws.com/name--use1-az4--x-s3"),
        ({"aws_endpoint_url": "http://localhost:1"}, "http://localhost:1/name--use1-az4--x-s3"),
    ],
)
def test_a_directory_bucket_of_s3_has_a_host_of_its_own(once, options, host):
    nowhere = {"aws_region": "us-east-1", "proxy_url": f"http://127.0.0.1:{free_port()}"}
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "x"}
    storage = ObstoreStorage("s3://name--use1-az4--x-s3/runs", {**nowhere, **keys, **options})
    with pytest.raises(StorageError, match=f"GET {re.escape(host)}"):
        storage.get_bytes("run/x")


TOKEN_REQUEST = (
    "Generic GCS error: Error performing token request: Error performing GET "
    "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token in 3s, after 3 retries - "
)


@pytest.mark.parametrize(
    ("answer", "has_answered", "expected"),
    [
        ("HTTP error: error sending request", False, NoCredentialsError),  # a machine without a role
        ("HTTP error: error sending request", True, StorageError),
        ("Server returned non-2xx status code: 429 Too Many Requests", False, StorageError),
        ("Server returned non-2xx status code: 503 Service Unavailable", False, StorageError),
        ("Server returned non-2xx status code: 404 Not Found", False, NoCredentialsError),
    ],
)
def test_a_role_whose_credentials_fail_to_come_once_is_asked_again(answer, has_answered, expected):
    error = translate(GenericError(TOKEN_REQUEST + answer), "gs://bucket/x", has_answered=has_answered)
    assert type(error) is expected
    assert classify(error) == ("transient" if expected is StorageError else "final")


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.put_buffers("x", [memoryview(bytes(9 * 2**20))]),
        lambda storage: storage.size("there"),
        lambda storage: storage.get_bytes("there"),
    ],
    ids=["put_buffers", "size", "get_bytes"],
)
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_request_of_any_kind_has_shown_that_there_are_credentials(moto, monkeypatch, call, is_reopened):
    """A rank whose tensors are large stores them in parts, and asks for nothing else."""
    url = f"s3://{moto.new_bucket()}"
    ObstoreStorage(url, moto.options()).put_bytes("there", b"1")
    storage = ObstoreStorage(url, moto.options())
    call(storage)

    def fail(*_, **__):
        raise GenericError(f"{TOKEN_REQUEST}HTTP error: error sending request")

    monkeypatch.setattr(obstore, "put", fail)
    with pytest.raises(StorageError, match="cannot be fetched at the moment"):
        (storage.reopened() if is_reopened else storage).put_bytes("y", b"1")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("This request is not authorized to perform this operation using this permission. (code: 403)", PermissionError),
        ("This operation is not permitted as the blob is immutable due to a policy. (code: 409)", PermissionError),
        ("There is currently a lease on the blob and no lease ID was specified in the request. (code: 412)", OSError),
        ("The server is busy. (code: 503)", StorageError),
        ("There is currently a conflict. (code: 409)", StorageError),
    ],
)
def test_a_refusal_of_azure_to_delete_one_of_many_objects_is_told_at_once(reason, expected):
    text = f"Generic MicrosoftAzure error: Bulk delete request failed for key run/(code: 500)/x: {reason}"
    error = translate(GenericError(text), "az://c/run/x", has_answered=True)
    assert type(error) is expected
    assert classify(error) == ("transient" if expected is StorageError else "final")
    assert reason in str(error)


def test_a_blob_that_azure_has_archived_is_told_at_once():
    text = (
        "Generic MicrosoftAzure error: Error performing GET http://acc/c/x in 4ms - Server returned non-2xx status code: "
        "409 Conflict: <Error><Code>BlobArchived</Code>"
        "<Message>This operation is not permitted on an archived blob.</Message></Error>"
    )
    error = translate(GenericError(text), "az://c/run/x", has_answered=True)
    assert classify(error) == "final"
    assert "az://c/run/x" in str(error)
    assert "BlobArchived: This operation is not permitted on an archived blob." in str(error)


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_request_without_a_login_that_azure_forbids_is_told_at_once(has_answered):
    text = (
        "Object at location x already exists: Error performing GET http://a/c/x in 4ms - Server returned non-2xx status code: "
        "409 Conflict: <Error><Code>PublicAccessNotPermitted</Code>"
        "<Message>Public access is not permitted on this storage account.</Message></Error>"
    )
    error = translate(AlreadyExistsError(text), "az://c/run/x", has_answered=has_answered)
    assert type(error) is PermissionError
    assert classify(error) == "final"
    assert "check the credentials and their policy" in str(error)


AZURE_REFUSAL = (
    "The operation lacked the necessary privileges to complete for path x: Error performing GET http://acc/c/x in 4ms - Server "
    "returned non-2xx status code: 403 Forbidden: <Error><Code>AuthenticationFailed</Code><Message>Server failed to "
    "authenticate the request.\nRequestId:1</Message><AuthenticationErrorDetail>{}</AuthenticationErrorDetail></Error>"
)
GOOGLE_REFUSAL = (
    "The operation lacked valid authentication credentials for path x: Error performing GET http://b/x in 4ms - Server "
    "returned non-2xx status code: 401 Unauthorized: <Error><Code>AuthenticationRequired</Code><Message>Authentication "
    "required.</Message></Error>"
)
GOOGLE_LOGIN_REFUSAL = (
    "Generic GCS error: Error performing token request: Error performing POST https://accounts.google.com/o/oauth2/token - "
    'Server returned non-2xx status code: 400 Bad Request: {"error": "invalid_grant", "error_description": "Bad Request"}'
)
AZURE_LOGIN_REFUSAL = (
    "Generic MicrosoftAzure error: Error performing token request: Error performing POST https://login.microsoftonline.com/t/oauth2/"
    'v2.0/token in 4ms - Server returned non-2xx status code: 401 Unauthorized: {"error":"invalid_client","error_description":'
    '"AADSTS7000222: The provided client secret keys for app are expired."}'
)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("az://c/x", AZURE_REFUSAL.format("Request date header too old: 'Fri, 31 Jan 2020 12:28:37 GMT'")),
        (
            "gs://b/x",
            GOOGLE_LOGIN_REFUSAL.replace(
                'Bad Request"}',
                "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
                'Check your iat and exp values in the JWT claim."}',
            ),
        ),
        (
            "s3://b/x",
            (
                "Generic S3 error: External AWS credential provider: ClientError: An error occurred (SignatureDoesNotMatch) "
                "when calling the AssumeRole operation: Signature expired: 20200131T120000Z is now earlier than 20200204T0500Z"
            ),
        ),
    ],
    ids=["azure", "google", "aws"],
)
@pytest.mark.parametrize("has_answered", [False, True])
def test_a_clock_that_differs_is_named_where_the_code_is_that_of_wrong_credentials(url, text, has_answered):
    error = translate(PermissionDeniedError(text), url, has_answered=has_answered)
    assert type(error) is ClockSkewError
    assert classify(error) == "final"  # as long as the storage has never answered
    assert str(error).startswith(f"this machine's clock differs from that of {url} by more than is allowed")


@pytest.mark.parametrize(
    ("text", "words", "is_expired"),
    [
        (
            AZURE_REFUSAL.format("The MAC signature found in the HTTP request 'SIGNED' is not the same. Server used: 'GET'"),
            "The MAC signature found in the HTTP request",
            False,
        ),
        (
            AZURE_REFUSAL.format("Signature not valid in the specified time frame: Start [Thu] - Expiry [Fri]"),
            "Signature not valid in the specified time frame",
            True,
        ),
        (GOOGLE_REFUSAL, "AuthenticationRequired", False),
        (GOOGLE_LOGIN_REFUSAL, "invalid_grant", False),
        (AZURE_LOGIN_REFUSAL, "invalid_client", False),
    ],
    ids=["azure's key", "azure's sas", "google's key", "google's login", "azure's login"],
)
def test_a_key_that_was_replaced_is_read_again_and_a_wrong_one_once(tmp_path, text, words, is_expired):
    """One that the server has never accepted is told after that, unless it says that it has expired."""
    opened = []

    class Refusing(LocalStorage):
        accepts = True

        def get_bytes(self, key):
            if self.accepts:
                return b"1"
            error = translate(PermissionDeniedError(text), f"az://c/{key}", has_answered=False)
            assert words in str(error)
            assert "SIGNED" not in str(error)
            raise error

    def reopen():
        opened.append(Refusing(tmp_path))
        opened[-1].accepts = len(opened) > 2
        return opened[-1]

    wrong = RetryingStorage(reopen, RetryPolicy(60, 0, 0), renews=True)
    with contextlib.nullcontext() if is_expired else pytest.raises(CredentialsExpiredError, match=words):
        wrong.get_bytes("x")
    assert len(opened) == 2 + is_expired
    opened.clear()
    replaced = RetryingStorage(reopen, RetryPolicy(60, 0, 0), Refusing(tmp_path), renews=True)
    assert replaced.get_bytes("x") == b"1"
    replaced._storage.accepts = False
    assert replaced.get_bytes("x") == b"1"
    assert len(opened) == 3


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gcs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("abfss://container/x", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_who_has_no_credentials_is_told_those_of_the_cloud(url, login):
    error = translate(GenericError(f"{TOKEN_REQUEST}HTTP error: error sending request"), url, has_answered=False)
    assert f"no credentials were found for {url}: give a" in str(error)
    assert re.findall("[A-Z]+_[A-Z_]*(?:KEY_ID|CREDENTIALS|ACCOUNT_KEY)", str(error)) == [login]


def test_a_url_of_azure_asks_for_the_account(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match="the URL does not name the account: give AZURE_STORAGE_ACCOUNT_NAME"):
        ObstoreStorage("az://container/x", {})


@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("gs://bucket/x", {"skip_signature": "true"}),
        ("abfss://container@account.dfs.core.windows.net/x", {"skip_signature": "true"}),
        ("abfss://container@account.dfs.core.windows.net/x", {"token": "x"}),
        ("abfss://container@account.dfs.core.windows.net/x", {"endpoint": "http://127.0.0.1:1"}),
    ],
)
def test_an_option_of_google_or_azure_is_not_taken_for_that_of_s3(url, option):
    config = ObstoreStorage(url, option)._store.config
    assert [value for name, value in config.items() if name.endswith(next(iter(option)))] == [*option.values()]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (CredentialRetrievalError(provider="iam-role", error_msg="timed out"), StorageError),
        (ClientError({"Error": {"Code": "Throttling", "Message": "Rate exceeded"}}, "AssumeRole"), StorageError),
        (ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole"), PermissionError),
        (ClientError({"Error": {"Code": "InvalidClientTokenId", "Message": "no"}}, "AssumeRole"), CredentialsExpiredError),
        (TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"), CredentialsExpiredError),
    ],
)
def test_a_login_that_cannot_be_had_for_a_moment_is_no_wrong_one(monkeypatch, raised, expected):
    fired = []

    class Provider:
        config: ClassVar = {}

        def __call__(self):
            fired.append(raised)
            raise raised

    monkeypatch.setattr(object_store_config, "_from_boto3", lambda _: Provider())
    storage = ObstoreStorage("s3://bucket", {"aws_endpoint_url": "http://127.0.0.1:9"})
    for call in (lambda: storage.get_bytes("x"), lambda: list(storage.list(""))):
        with pytest.raises(expected) as caught:
            call()
        assert type(caught.value) is expected
    assert len(fired) >= 2


def test_nothing_shows_the_credentials_it_was_given():
    storage = ObstoreStorage("s3://bucket/x", S3Server("http://127.0.0.1:1").options())
    assert SECRET_KEY not in f"{storage!r} {storage.url} {storage._store!r}"


def test_a_service_that_minds_missing_objects_still_deletes_the_others(tmp_path):
    storage = ObstoreStorage("s3://bucket", S3Server("http://127.0.0.1:1").options())
    storage._store = storage._deleting = LocalStore(tmp_path)  # refuses to delete what is missing, as GCS does
    keys = [f"d/{number:03d}" for number in range(200)]
    for key in keys[1::2]:
        obstore.put(storage._store, key, b"1")
    storage.delete(keys)
    assert list(storage.list("")) == []


def test_a_service_that_minds_missing_objects_is_asked_for_many_at_once(tmp_path, monkeypatch):
    """A prune always names the metadata that may have been set later, and seldom were."""
    storage = ObstoreStorage("s3://bucket", S3Server("http://127.0.0.1:1").options())
    storage._store = storage._deleting = LocalStore(tmp_path)
    together, delete = threading.Barrier(8, timeout=60), obstore.delete

    def delete_together(store, paths):
        if isinstance(paths, str):
            together.wait()
        delete(store, paths)

    monkeypatch.setattr(obstore, "delete", delete_together)
    storage.delete(f"d/{number:03d}" for number in range(24))


def test_a_server_that_is_gone_is_a_storage_error_after_the_deadline():
    options = S3Server(f"http://127.0.0.1:{free_port()}").options()
    storage = RetryingStorage(lambda: ObstoreStorage("s3://bucket", options), RetryPolicy(0.2, 0.01, 0.02))
    with pytest.raises(StorageError, match=r"storing s3://bucket/run/x failed \d+ times.*request: Connection refused$"):
        storage.put_bytes("run/x", b"1")


def test_a_lookup_that_fails_leaves_no_descriptor(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.put_bytes("run/manifests/a.json", b"{}")
    for _ in range(5):
        with pytest.raises(OSError, match="too long for a file's name"):
            storage.size(f"run/manifests/{'x' * 300}")
    assert not [it for it in open_files() if it.is_relative_to(tmp_path)]


@pytest.mark.parametrize(("refused", "named"), [(".", "store/run/manifests'"), ("id", "'run/manifests/id/'")])
def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch, refused, named):
    storage, opened = LocalStorage(tmp_path / "store"), os.open
    storage.put_bytes("run/manifests/id/x", b"1")

    def refuse(path, flags, *args, **folder):
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, *args, **folder)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=named):
        list(storage.list("run/manifests/"))


def test_a_folder_in_the_place_of_an_object_is_named_by_a_put(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    storage.put_bytes("run/x/y", b"1")
    with pytest.raises(IsADirectoryError, match=r"store/run/\.tmp-.* -> .*store/run/x'"):
        storage.put_bytes("run/x", b"1")


def test_a_copy_of_an_object_that_grows_meanwhile_ends(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.put_bytes("x", b"1" * 2**20)
    grown = []

    def write_and_grow(target, data):
        with (tmp_path / "x").open("ab") as file:
            file.write(data)
        grown.append(write_all(target, data))
        assert len(grown) < 9

    monkeypatch.setattr(digest, "write_all", write_and_grow)
    assert storage.get_file("x", tmp_path / "out").bytes == (tmp_path / "out").stat().st_size == 2**20
    assert len(grown) == 1


def make_pipe(path):
    os.mkfifo(path)
    yield os.open(path, os.O_RDWR)  # somebody holds it open and writes nothing


def make_socket(path):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(path))
    yield None


def make_link_to_device(path):
    path.symlink_to("device")
    try:
        os.mknod(path.parent / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")
    yield None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [make_pipe, make_socket, make_link_to_device])
def test_what_is_no_regular_file_is_no_object_and_blocks_nobody(tmp_path, make):
    storage = LocalStorage(tmp_path)
    get_range = partial(storage.get_range, start=0, into=memoryview(bytearray(1)))
    for writer in make(tmp_path / "x"):
        for read in (storage.get_bytes, storage.size, storage.digest, get_range):
            with pytest.raises(FileNotFoundError, match=r"/(x|device)"):
                read("x")
        with pytest.raises(FileNotFoundError, match=r"/(x|device)"):
            storage.get_file("x", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        storage.put_bytes("x", b"1")
        assert storage.get_bytes("x") == b"1"
        if writer is not None:
            os.close(writer)
