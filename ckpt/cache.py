"""One download of each file of a checkpoint per node, however many processes and threads ask for it."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from .keys import check_key
from .transfer import each_file


@contextmanager
def downloaded(name: str, paths: Iterable[str], download: Callable[[str, Path], None]) -> Iterator[Path]:
    """Yield a folder that holds the files `paths`, shared with whoever else on this node asks for `name`.

    It may hold more of them, that others asked for. Whoever finds a file missing downloads it while those who want it, too,
    wait for that file only; an error is the downloader's own, and the next one tries again. The last to leave deletes. A reader
    that was killed leaves a lock that nobody holds: the next one to come sweeps after it.

    Args:
        name: What the files belong to; equal names share.
        paths: The files.
        download: Writes one of them to the path that it is given.

    """
    root = _cache_root()
    entry = root / xxhash.xxh3_128_hexdigest(name.encode())
    reader = FileLock(entry / "readers" / f"{secrets.token_hex(8)}.lock", thread_local=False)
    with FileLock(root / "cache.lock", thread_local=False):
        _sweep(root)
        for folder in ("readers", "downloads", "files"):
            (entry / folder).mkdir(parents=True, exist_ok=True)
        reader.acquire()
    try:
        each_file(paths, lambda path: _share(entry, path, download))
        yield entry / "files"
    finally:
        with FileLock(root / "cache.lock", thread_local=False):
            reader.release()
            _sweep(root)


def _share(entry: Path, path: str, download: Callable[[str, Path], None]) -> None:
    """Return once the file `path` is among the entry's files; of all who want it, one at a time downloads it."""
    target = entry / "files" / check_key(path)
    partial = entry / "downloads" / xxhash.xxh3_128_hexdigest(path.encode())  # the same for all: it replaces a killed one's
    if target.exists():
        return
    with FileLock(f"{partial}.lock", thread_local=False):
        if target.exists():
            return
        try:
            download(path, partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)  # a failed one must not fill the disk for those who go on


def _cache_root() -> Path:
    root = Path(tempfile.gettempdir()) / f"prefect-torch-{os.getuid()}"  # a container's user may have no name
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def _sweep(root: Path) -> None:
    """Delete every entry that no living process reads; the caller holds the cache's lock."""
    for entry in root.iterdir():
        if entry.is_dir() and not any(_is_held(lock) for lock in (entry / "readers").glob("*.lock")):
            shutil.rmtree(entry)


def _is_held(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0, thread_local=False):
            pass
    except Timeout:
        return True
    lock.unlink(missing_ok=True)
    return False
