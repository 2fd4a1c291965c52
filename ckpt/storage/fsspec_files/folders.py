"""Directories, which filesystems of fsspec make, list and remove in different ways: judged by behaviour, never by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from prefect_torch.ckpt.storage.keys import temporary_name

from .connections import FileSystem

MANY_OTHERS = 10  # more processes do not create or remove the directories of one put


def make_folder(fs: FileSystem, folder: str) -> None:
    """Create `folder` and its parents; other processes may create them concurrently."""
    for _ in range(MANY_OTHERS):
        try:
            fs.makedirs(folder, exist_ok=True)
        except PermissionError:
            raise
        except Exception:  # noqa: BLE001 - fsspec checks, then creates; each library has its own error for a race
            if fs.isdir(folder):
                return
        else:
            return
    fs.makedirs(folder, exist_ok=True)


def find_files(fs: FileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """Return the files below `folder` by their paths, without links; all of them, or an error.

    Costs a request for each directory, unless the filesystem has its own recursive listing.
    """
    fs.invalidate_cache()
    if not _walks(fs):
        found: dict[str, dict[str, Any]] = fs.find(folder, detail=True)
        return {path: info for path, info in found.items() if info.get("type", "file") == "file"}
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    while folders:
        listed = folders.pop()
        with suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            for info in fs.ls(listed, detail=True):
                if info["type"] == "directory" and info["name"] != listed:
                    folders.append(info["name"])
                elif info["type"] == "file":
                    files[info["name"]] = info
    return files


def _walks(fs: FileSystem) -> bool:
    """Return whether fsspec's own walk would list `fs`: it silently leaves out a directory whose listing fails."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find  # noqa: SLF001 - the method that an asynchronous one overrides instead
    return type(fs).find is AbstractFileSystem.find


def remove_empty(fs: FileSystem, folder: str, root: str, may_remove: Callable[[FileSystem, str], bool]) -> None:
    """Remove `folder` if it is empty and may be removed, then its parent; never `root`."""
    while folder.startswith(f"{root}/"):
        with suppress(OSError, NotImplementedError):  # another process stores something here again, or no directories exist
            if not fs.ls(folder, detail=False) and may_remove(fs, folder):
                fs.rmdir(folder)
                folder = folder.rpartition("/")[0]
                continue
        return


def rmdir_spares_files(fs: FileSystem, folder: str) -> bool:
    """Return whether `rmdir` refuses a directory into which another process has just put a file; costs six requests.

    HDFS and WebDAV (https://www.rfc-editor.org/rfc/rfc4918#section-9.6.1) delete a directory with all that is in it. webdav4's
    `rmdir` lists the directory first, too early to see that file: so `ls` shows nothing here.
    """
    inner = f"{folder}/{temporary_name()}"
    path = f"{inner}/{temporary_name()}"
    make_folder(fs, inner)
    fs.pipe_file(path, b"")
    # Each library has an exception of its own; a lost connection fails the next line.
    with _showing_nothing(fs), suppress(Exception):
        fs.rmdir(inner)
    fs.invalidate_cache()
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return False
    fs.rmdir(inner)
    return True


@contextmanager
def _showing_nothing(fs: FileSystem) -> Iterator[None]:
    own = vars(fs).get("ls")
    fs.ls = lambda *_, **__: []
    try:
        yield
    finally:
        if own is None:
            del fs.ls
        else:  # an asynchronous filesystem's
            fs.ls = own
