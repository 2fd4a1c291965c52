"""Files that a training function hands over, moved instead of copied, and the directories that it may fill with them."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_torch.ckpt.storage.local_files.root_folder import despite_deletes
from prefect_torch.ckpt.storage.local_files.walk import remove_tree
from prefect_torch.ckpt.storage.protocol import Storage

from .scratch import make_scratch, remove_scratch


def adopt_files(directory: Path, paths: Iterable[str], taken: Path | None = None, *, with_links: bool = False) -> Path:
    """Move the files at `paths` into `taken`, or else a scratch directory, and return it; a copy only across filesystems.

    The caller may delete or reuse `directory` immediately. Costs one rename per file on the same filesystem. A file that is
    reached through a link is copied, since a target outside of `directory` was not handed over; so is a file with a second
    name (a hard link), by which it may be written to, unless `with_links`: then nobody writes to it by that. After an error the
    files are where they were, as far as they can be moved back.
    """
    root = directory.resolve()
    made = make_scratch(_writable_parent(root)) if taken is None else None
    target = taken or made
    assert target is not None
    moved: list[str] = []
    try:
        # Copies first: the target of a link may be one of the files that move.
        for path in sorted(paths, key=lambda path: _is_reached_directly(root / path)):
            source, place = root / path, target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if _is_reached_directly(source) and (with_links or source.stat().st_nlink == 1):
                shutil.move(source, place)
                moved.append(path)
            else:
                shutil.copyfile(source, place)
    except BaseException:
        for path in moved:
            with suppress(OSError):  # the first error counts
                shutil.move(target / path, root / path)
        if made is not None:
            remove_scratch(made)
        raise
    return target


def _is_reached_directly(path: Path) -> bool:
    return path.resolve() == path


def _writable_parent(directory: Path) -> Path | None:
    return directory.parent if os.access(directory.parent, os.W_OK) else None


class LentDirectories:
    """The directories that one rank of an attempt provides for reports: in the storage if it is local, else temporary ones.

    Args:
        storage: The storage.
        key_of: Returns the key of a directory in it, by a token. Garbage collection removes the directories of a killed rank.

    """

    def __init__(self, storage: Storage, key_of: Callable[[str], str]) -> None:
        self._storage = storage
        self._key_of = key_of
        self._lent: dict[Path, bool] = {}  # whether each is temporary

    @contextmanager
    def lend(self) -> Iterator[Path]:
        """Yield a new, empty directory, and delete it with all files that were not reported."""
        directory = self.make()
        try:
            yield directory
        finally:
            self.remove(directory)

    def make(self) -> Path:
        """Create and return a new, empty directory, which `remove` deletes."""
        place = self._storage.local_path(self._key_of(secrets.token_hex(8)))
        if place is None:
            directory = make_scratch()
        else:
            directory = place.absolute()

            def create() -> None:
                directory.parent.mkdir(exist_ok=True)  # never the run's own directory: without it, the storage was unmounted
                directory.mkdir()

            despite_deletes(create)  # garbage collection removes an empty parent
        self._lent[directory] = place is None
        return directory

    def remove(self, directory: Path) -> None:
        """Delete a directory that `make` returned."""
        if self._lent.pop(directory):
            remove_scratch(directory)
        else:
            remove_tree(directory, ignore_errors=True)

    def holds(self, directory: Path) -> bool:
        """Return whether `directory` is one of these directories, or lies in one."""
        lent = tuple(self._lent)  # a commit in the background may remove one meanwhile
        return any(directory.resolve().is_relative_to(it.resolve()) for it in lent)
