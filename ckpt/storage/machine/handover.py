"""Files that a training function hands over, moved instead of copied, and the directories that it may fill with them."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from prefect_torch.ckpt.storage.local_files.root_folder import despite_deletes
from prefect_torch.ckpt.storage.local_files.walk import remove_tree
from prefect_torch.ckpt.storage.protocol import Storage

from .scratch import hold_scratch, is_scratch, make_scratch, remove_scratch


def adopt_files(directory: Path, paths: Iterable[str], taken: Path | None = None) -> Path:
    """Move the files at `paths` into `taken`, or else a scratch directory, and return it; a copy only across filesystems.

    The caller may delete or reuse `directory` immediately. Costs one rename per file on the same filesystem. A file that is
    reached through a link is copied, since a target outside of `directory` was not handed over; so is a file with a second
    name (a hard link), by which it may be written to. After an error the files are where they were, as far as they can be
    moved back.
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
            if _is_reached_directly(source) and source.stat().st_nlink == 1:
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
        self._lent: dict[Path, Callable[[Path], None]] = {}  # what removes each

    @property
    def run_folder(self) -> Path | None:
        """The run's directory, if it is one on this machine, or on a file server's: these directories are below it."""
        place = self._storage.local_path(self._key_of("any"))
        return None if place is None else place.parent.parent

    @cached_property
    def can_link(self) -> bool:
        """Whether a file in one of them can get a second name in another directory, so that a report need not copy it."""
        with self.lend() as folder:
            (folder / "file").touch()
            (folder / "other").mkdir()
            try:
                os.link(folder / "file", folder / "other/file")
            except OSError:  # FUSE's EIO among them
                return False
        return True

    @contextmanager
    def lend(self, temporary: Path | None = None) -> Iterator[Path]:
        """Yield a new, empty directory, made by `make`, and delete it with all files that were not reported."""
        directory = self.make(temporary)
        try:
            yield directory
        finally:
            self.remove(directory)

    def make(self, temporary: Path | None = None) -> Path:
        """Create and return a new, empty directory, which `remove` deletes: in `temporary`; None means below the run."""
        place = None if temporary else self._storage.local_path(self._key_of(secrets.token_hex(8)))
        if place is None:
            directory = make_scratch(temporary)
            self._lent[directory] = remove_scratch
            return directory
        directory = place.absolute()

        def create() -> None:
            directory.parent.mkdir(exist_ok=True)  # never the run's own directory: without it, the storage was unmounted
            directory.mkdir()

        despite_deletes(create)  # garbage collection removes an empty parent
        self._lent[directory] = _delete
        return directory

    def join(self, directory: Path, *, is_first: bool) -> None:
        """Count a directory that another rank has made as one of these; a temporary one is made on this machine, too.

        Args:
            directory: The directory.
            is_first: Whether this is the first rank of its machine, which holds and removes a temporary one there.

        """
        self._lent[directory] = _leave
        if is_scratch(directory.name):
            directory.mkdir(mode=0o700, exist_ok=True)
            if is_first:
                hold_scratch(directory)
                self._lent[directory] = remove_scratch

    def remove(self, directory: Path) -> None:
        """Delete a directory that `make` returned; one of another rank is left to that rank."""
        self._lent.pop(directory)(directory)

    def parent_of(self, directory: Path) -> Path | None:
        """Return what `make` needs to be given for a directory beside the one of these that `directory` is, or lies in."""
        (root,) = self._around(directory)
        return root.parent if is_scratch(root.name) else None

    def holds(self, directory: Path) -> bool:
        """Return whether `directory` is one of these directories, or lies in one."""
        return bool(self._around(directory))

    def _around(self, directory: Path) -> list[Path]:
        lent = tuple(self._lent)  # a commit in the background may remove one meanwhile
        return [it for it in lent if directory.resolve().is_relative_to(it.resolve())]


def _delete(directory: Path) -> None:
    remove_tree(directory, ignore_errors=True)


def _leave(directory: Path) -> None:
    """Do nothing: another rank removes it."""
