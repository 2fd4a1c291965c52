"""The node's download cache: one download of each file of a checkpoint, however many processes and threads request it."""

import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import xxhash
from filelock import FileLock
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.machine.scratch import downloads_folder, is_of_earlier_boot, own_mark
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Transfer

_State: TypeAlias = tuple[Path, int, int, int, int]
_MAX_CONTENTS = 4096
_contents: dict[_State, Transfer] = {}  # the files that this process has digested, by the file's state at that time
_logger = logging.getLogger(__name__)


def entry_name(run: Run, manifest: Manifest) -> str:
    """Return an identifier of a checkpoint, whose manifest holds every digest: equal names are equal bytes, from any source."""
    return f"{run.path_of(manifest.id)} {manifest.encode().decode()}"


@contextmanager
def downloaded(name: str, files: Mapping[str, FileEntry], download: Callable[[str, Path], None]) -> Iterator[Path]:
    """Yield a directory that holds `files`, each as in its entry, shared with this user's other readers of `name` on this node.

    It may hold more files, which others requested. A reader that finds a file missing downloads it, while other readers of it
    wait for that file only; an error is raised to the downloader alone, and the next reader tries again. The last reader to
    leave deletes the directory. The kernel releases a killed reader's lock, and the next reader removes its files. A file that
    is found is read once to verify it, and downloaded again if it differs; a process verifies a file once, during its download
    or when it finds it, as long as the file is unchanged.

    Args:
        name: An identifier of the checkpoint that the files belong to; equal names share a directory.
        files: The files to hold, by path.
        download: Writes the file of a path, verified, to the path that it receives.

    Raises:
        PermissionError: If the cache is not this user's, or others may write to it, naming the directory.

    """
    with _reading(_cache_root(), name) as entry:
        for_each(files.values(), lambda file: _share(entry, file, download))
        yield entry / "files"


@contextmanager
def found(name: str, paths: Iterable[str]) -> Iterator[Path | None]:
    """Yield the directory that holds the files `paths` of `name` if a reader on this node has all of them, else None.

    The files exist until the block ends. The caller must verify their content.
    """
    try:
        root = _cache_root()
    except OSError:  # there is no usable cache
        yield None
        return
    files = root / xxhash.xxh3_128_hexdigest(name.encode()) / "files"
    if not all((files / check_key(path)).exists() for path in paths):
        yield None
        return
    with _reading(root, name) as entry:
        there = all((entry / "files" / path).exists() for path in paths)  # else the last reader has just left
        yield entry / "files" if there else None


@contextmanager
def reading_entry(name: str) -> Iterator[Path]:
    """Yield the directory of `name`, which readers of `name` on this node share until the last one leaves.

    Raises:
        OSError: If the cache is not this user's, or others may write to it; if there is no space for it, or there are no locks.

    """
    root = _cache_root()
    _require_locks(root)
    with _reading(root, name) as entry:
        yield entry


def _require_locks(root: Path) -> None:
    """Raise OSError if the filesystem has no locks: a FileLock would wait for one for ever."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(root: Path, name: str) -> Iterator[Path]:
    """Yield the directory of `name`, which is not deleted until the block ends.

    A reader holds a shared lock on the directory itself. Where systemd-tmpfiles cleans the temporary directory, it would delete
    a separate lock file after ten days, and the files being read; it skips a locked directory and everything below it
    (https://www.freedesktop.org/software/systemd/man/latest/tmpfiles.d.html#Age).
    """
    entry = root / xxhash.xxh3_128_hexdigest(name.encode())
    with FileLock(root / "cache.lock", thread_local=False):
        _sweep(root)
        for folder in ("downloads", "files"):
            (entry / folder).mkdir(parents=True, exist_ok=True)
        reader = os.open(entry, os.O_RDONLY)
        fcntl.flock(reader, fcntl.LOCK_SH)
    try:
        yield entry
    finally:
        with FileLock(root / "cache.lock", thread_local=False):
            fcntl.flock(reader, fcntl.LOCK_UN)  # closing it does not unlock it while a forked process has it, too
            os.close(reader)
            _sweep(root)


def _share(entry: Path, file: FileEntry, download: Callable[[str, Path], None]) -> None:
    """Return once `file` is among the entry's files; of all its readers, one at a time downloads it."""
    target = entry / "files" / check_key(file.path)
    partial = entry / "downloads" / xxhash.xxh3_128_hexdigest(file.path.encode())  # for all readers: replaces a killed one's
    if _holds(target, file):
        return
    with FileLock(f"{partial}.lock", thread_local=False):
        if _holds(target, file):
            return
        if target.exists():
            _logger.warning("%s is not what was committed: somebody changed it; downloading it again", target)
        try:
            download(file.path, partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
            _remember(_state_of(target), Transfer(file.bytes, file.digest))  # digested during the download
        finally:
            partial.unlink(missing_ok=True)  # a failed one must not fill the disk for the readers that continue


def _holds(path: Path, file: FileEntry) -> bool:
    try:
        state = _state_of(path)
    except FileNotFoundError:
        return False
    content = _contents.get(state)
    if content is None:
        content = digest_file(path)
        _remember(state, content)
    return (content.bytes, content.digest) == (file.bytes, file.digest)


def _state_of(path: Path) -> _State:
    """Return values that distinguish a file from the same one after a change: any write or rename of it alters one of them."""
    found = path.stat()
    return path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _remember(state: _State, content: Transfer) -> None:
    if len(_contents) >= _MAX_CONTENTS:
        _contents.clear()
    _contents[state] = content


def _cache_root() -> Path:
    """Return this machine's part of this user's cache, to which no other user may write, as OpenSSH requires of ~/.ssh.

    If others may write to it, an error is raised and no other directory is used: readers would share nothing, and the disk
    would hold each file as often as there are readers.

    Machines may share TMPDIR without knowing each other's locks (BeeGFS, Lustre with localflock, NFS with nolock): in one part,
    each would delete and overwrite files that the others read.
    """
    root = downloads_folder()
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()  # not the target of a link
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link" if stat.S_ISLNK(found.st_mode) else "is no directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"may be written to by others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        own = root / own_mark()
        own.mkdir(exist_ok=True)
        return own
    raise PermissionError(
        f"{root}, where checkpoints are downloaded to, {problem}, so that its files may be anybody's: remove it, or set TMPDIR "
        "to a directory of your own"
    )


def _sweep(root: Path) -> None:
    """Delete every entry that no living process reads; the caller holds the cache's lock."""
    for entry in list(root.iterdir()):
        with suppress(FileNotFoundError):  # something else cleans the temporary directory
            if entry.is_dir() and not _is_read(entry):
                _delete(entry)
    for other in list(root.parent.iterdir()):
        with suppress(FileNotFoundError):  # another process has just deleted it
            if other != root and is_of_earlier_boot(other):
                shutil.rmtree(other, ignore_errors=True)


def _delete(entry: Path) -> None:
    """Delete an entry; files that cannot be deleted, such as mapped ones on NFS, are left to the next sweep.

    The entry is renamed first, so that no reader of the same name takes the remaining files for a complete entry.
    """
    renamed = entry.with_name(f"deleted-{secrets.token_hex(8)}")
    with suppress(OSError):
        entry.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def _is_read(entry: Path) -> bool:
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
