"""The directory that one rank reports, and the directories that its training function may fill for a report."""

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.errors import CheckpointNotFoundError, MalformedRecordError
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_temporary
from prefect_torch.ckpt.storage.machine.scratch import make_scratch, remove_scratch
from prefect_torch.ckpt.storage.protocol import MOST_RECORD_BYTES
from prefect_torch.ckpt.storage.records import check_depth, parse

USER_METADATA_FILE = ".metadata.json"
_LARGE_BYTES = 2**20  # larger files are stored one by one
_GROUP_BYTES = 32 * 2**20
_REFUSED = re.compile(r"[\\\x00-\x1f\x7f]")
_linked: set[Path] = set()  # the directories of `files_with_other_names`
GROUPED = 1000  # the most files of a group, all of which a retry sends again
_NAMES_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # a missing target, a path through a file, links in a circle


def existing_directory(path: str) -> Path:
    """Return the directory at `path`.

    Raises:
        CheckpointNotFoundError: If it does not exist, or is a file.

    """
    directory = Path(path)
    if not directory.is_dir():
        is_file = f"{path} is a file: give its directory, since a checkpoint is all that a directory holds"
        raise CheckpointNotFoundError(is_file if directory.is_file() else f"there is no directory {path}")
    return directory


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the user's metadata in a plain directory; empty where none was set.

    Raises:
        ValueError: If the metadata file holds anything else.

    """
    file = directory / USER_METADATA_FILE
    if not file.exists():
        return {}
    if not file.is_file():  # reading a pipe would block
        raise ValueError(f"{file} is no file; remove it")
    if (size := file.stat().st_size) > MOST_RECORD_BYTES:
        raise ValueError(f"{file} has {size} bytes, and metadata {MOST_RECORD_BYTES} at most; write it with set_metadata()")
    try:
        metadata = parse(file.read_bytes(), str(file), "metadata")
        check_depth(metadata, "metadata")
    except (MalformedRecordError, ValueError) as exc:
        raise ValueError(f"{exc}; write it with set_metadata()") from exc
    return metadata


def scan_files(directory: Path) -> list[str]:
    """Return the "/"-joined path of every file below `directory`; links are followed to their targets.

    Raises:
        ValueError: If an entry is neither a file nor a directory, a link to nothing, or a link to a directory above it.

    """
    return [path for path in _walk(directory, "", ()) if path != USER_METADATA_FILE]  # metadata is stored in the manifest


def _walk(directory: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    status = directory.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise ValueError(f"{directory} links back to a directory above it; a checkpoint must be finite")
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        path = f"{prefix}{entry.name}"
        if entry.is_file(follow_symlinks=False):  # as most are; known from the directory, without a stat
            yield _storable(path)
            continue
        try:
            mode = entry.stat().st_mode
        except OSError as exc:
            if exc.errno not in _NAMES_NOTHING:
                raise
            raise ValueError(f"{entry.path} is a link to nothing; remove it from the checkpoint") from exc
        if stat.S_ISDIR(mode):
            yield from _walk(Path(entry.path), f"{path}/", (*above, identity))
        elif stat.S_ISREG(mode):
            yield _storable(path)
        else:
            raise ValueError(f"{entry.path} is neither a file nor a directory; remove it from the checkpoint")


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files that are stored together.

    Attributes:
        paths: Their paths in their directory.
        owned: Whether the storage may move them.

    """

    paths: tuple[str, ...]
    owned: bool


def group_files(directory: Path, paths: Iterable[str], *, owned: bool, most: int | None) -> list[FileGroup]:
    """Return the files at `paths` in groups: a large one alone, and small ones of up to 32 MiB together.

    Args:
        directory: Their directory.
        paths: Their paths in it.
        owned: Whether the files in it may be moved; those below a link to another directory may not.
        most: The maximum number of files in a group; None for no limit.

    """
    links = {folder for folder in _folders(paths) if (directory / folder).is_symlink()} if owned else set()
    groups: list[FileGroup] = []
    small: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for path in paths:
        is_owned = owned and not (links and any(folder in links for folder in _folders([path])))
        if (size := _size(f"{directory}/{path}")) >= _LARGE_BYTES:
            groups.append(FileGroup((path,), is_owned))
        else:
            small[is_owned][path] = size
    for is_owned, sized in small.items():
        groups.extend(FileGroup(paths, is_owned) for paths in _together(sized, most))
    return groups


def _together(sized: Mapping[str, int], most: int | None) -> Iterator[tuple[str, ...]]:
    group: list[str] = []
    num_bytes = 0
    for path, size in sized.items():
        group.append(path)
        num_bytes += size
        if num_bytes >= _GROUP_BYTES or len(group) == most:
            yield tuple(group)
            group, num_bytes = [], 0
    if group:
        yield tuple(group)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a directory may hold very many
    except FileNotFoundError:  # the storage raises it
        return 0


def _folders(paths: Iterable[str]) -> set[str]:
    """Return every directory on the way to `paths`."""
    return {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}


def _storable(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"the file name {path!r} is not valid text and cannot be stored") from exc
    if _REFUSED.search(path):
        raise ValueError(f"the file name {path!r} holds a backslash or a control character and cannot be stored")
    if ".tmp-" in path and any(is_temporary(name) for name in path.split("/")):
        raise ValueError(f"the file name {path!r} is one that storages use for unfinished files; rename it")
    return path


def check_holds_no_run(directory: Path, run: Path | None) -> None:
    """Raise ValueError if the run lies in `directory`: it would be stored in itself, or moved.

    Args:
        directory: The reported directory.
        run: The run's own directory, None if it has none on this machine.

    Raises:
        ValueError: If it does.

    """
    if run is not None and run.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"the directory {directory} holds the run itself, {run}: report one that holds the checkpoint alone")


def downloads_folder() -> Path:
    """Return the path of the directory of this user's downloads, which may not exist."""
    return Path(tempfile.gettempdir()) / f"prefect-torch-{os.geteuid()}"  # a container's user may have no name


def lies_in_downloads(path: Path) -> bool:
    """Return whether a local directory is one that the readers of a checkpoint on this node share."""
    return path.resolve().is_relative_to(downloads_folder().resolve())


def adopt_files(directory: Path, paths: Iterable[str], taken: Path | None = None) -> Path:
    """Move the files at `paths` into `taken`, or else a scratch directory, and return it; a copy only across filesystems.

    The caller may delete or reuse `directory` immediately. Costs one rename per file on the same filesystem. A file that is
    reached through a link is copied, since a target outside of `directory` was not handed over; so is a file with a second
    name (a hard link), by which it may be written to. After an error the files are where they were, as far as they can be moved
    back.
    """
    root, may_have_names = directory.resolve(), directory.resolve() in _linked
    made = make_scratch(_writable_parent(root)) if taken is None else None
    target = taken or made
    assert target is not None
    moved: list[str] = []
    try:
        # Copies first: the target of a link may be one of the files that move.
        for path in sorted(paths, key=lambda path: _is_reached_directly(root / path)):
            source, place = root / path, target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if _is_reached_directly(source) and (may_have_names or source.stat().st_nlink == 1):
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


@contextmanager
def files_with_other_names(directory: Path) -> Iterator[None]:
    """Let `adopt_files` move files of `directory` that have second names (hard links): nobody writes to them by those."""
    _linked.add(directory.resolve())
    try:
        yield
    finally:
        _linked.discard(directory.resolve())


def _is_reached_directly(path: Path) -> bool:
    return path.resolve() == path


def _writable_parent(directory: Path) -> Path | None:
    return directory.parent if os.access(directory.parent, os.W_OK) else None


class LentDirectories:
    """The directories that one rank of an attempt provides for reports: in the storage if it is local, else temporary ones.

    In the storage, they lie beside the run's checkpoints; garbage collection removes those of a killed rank.

    Args:
        run: The run.
        attempt: The attempt's number.

    """

    def __init__(self, run: Run, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
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
        place = self._run.storage.local_path(self._run.layout.unreported(self._attempt, secrets.token_hex(8)))
        if place is None:
            directory = make_scratch()
        else:
            directory = place.absolute()
            directory.parent.mkdir(exist_ok=True)  # never the run's own directory: without it, the storage was unmounted
            directory.mkdir()
        self._lent[directory] = place is None
        return directory

    def remove(self, directory: Path) -> None:
        """Delete a directory that `make` returned."""
        if self._lent.pop(directory):
            remove_scratch(directory)
        else:
            shutil.rmtree(directory, ignore_errors=True)

    def holds(self, directory: Path) -> bool:
        """Return whether `directory` is one of these directories, or lies in one."""
        lent = tuple(self._lent)  # a commit in the background may remove one meanwhile
        return any(directory.resolve().is_relative_to(it.resolve()) for it in lent)
