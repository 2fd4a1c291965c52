"""One download of a checkpoint per node, however many processes and threads ask for it."""

import getpass
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout


@contextmanager
def downloaded(name: str, download: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder that holds what `download` wrote, shared with whoever else on this node asks for `name`.

    The first to ask downloads while the others wait; the last to leave deletes. A reader that was killed leaves a lock
    that nobody holds: the next one to come sweeps after it.

    Args:
        name: What is downloaded; equal names share.
        download: Writes into the folder that it is given.

    """
    root = _cache_root()
    entry = root / xxhash.xxh3_128_hexdigest(name.encode())
    reader = FileLock(entry / "readers" / f"{secrets.token_hex(8)}.lock", thread_local=False)
    with FileLock(root / "cache.lock", thread_local=False):
        _sweep(root)
        (entry / "readers").mkdir(parents=True, exist_ok=True)
        reader.acquire()
    try:
        with FileLock(entry / "download.lock", thread_local=False):
            files = entry / "files"
            if not files.exists():
                partial = entry / "partial"
                shutil.rmtree(partial, ignore_errors=True)  # of a downloader that was killed
                partial.mkdir()
                download(partial)
                partial.rename(files)
        yield files
    finally:
        with FileLock(root / "cache.lock", thread_local=False):
            reader.release()
            _sweep(root)


def _cache_root() -> Path:
    root = Path(tempfile.gettempdir()) / f"prefect-torch-{getpass.getuser()}"
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
