"""The directory that one rank reports: its files, in the groups in which they are stored, and the user's metadata."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.errors import CheckpointNotFoundError, MalformedRecordError
from prefect_torch.ckpt.storage.keys import is_kept_open, is_temporary
from prefect_torch.ckpt.storage.machine.scratch import is_scratch
from prefect_torch.ckpt.storage.protocol import MOST_RECORD_BYTES
from prefect_torch.ckpt.storage.records import check_depth, parse

USER_METADATA_FILE = ".metadata.json"
IDENTITY_PREFIX = ".prefect-torch-report-"  # of a file by which ranks identify a directory while they agree on its report
_LARGE_BYTES = 2**20  # larger files are stored one by one
_GROUP_BYTES = 32 * 2**20
_REFUSED = re.compile(r"[\\\x00-\x1f\x7f]")
_MOST_LEVELS = 100  # of directories; a local storage lists 128, those of the run and the checkpoint among them
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


def write_metadata(directory: Path, metadata: Mapping[str, Any]) -> None:
    """Replace the user's metadata in a plain directory.

    Raises:
        ValueError: If strict JSON cannot represent it.

    """
    encoded = json.dumps(metadata, allow_nan=False)
    (directory / USER_METADATA_FILE).write_text(encoded)


def remove_metadata(directory: Path) -> None:
    """Remove the user's metadata from a plain directory, so that they are not taken for those of other files in it."""
    (directory / USER_METADATA_FILE).unlink(missing_ok=True)


def scan_files(directory: Path) -> list[str]:
    """Return the "/"-joined path of every file below `directory`; links are followed to their targets.

    Left out is what was deleted, and is kept by the client of a file server for a process that has it open.

    Raises:
        ValueError: If an entry is neither a file nor a directory, a link to nothing or to a directory above it, or is nested
            more than 100 levels deep.

    """
    found = _walk(directory, "", ())
    return [path for path in found if not is_kept_open(path.rpartition("/")[2]) and not _is_own(path)]


def _is_own(path: str) -> bool:
    return path == USER_METADATA_FILE or path.startswith(IDENTITY_PREFIX)  # metadata is stored in the manifest


def _walk(directory: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    status = directory.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise ValueError(f"{directory} links back to a directory above it; a checkpoint must be finite")
    if len(above) > _MOST_LEVELS:
        raise ValueError(f"{directory} is nested more than {_MOST_LEVELS} levels deep, which no storage can list")
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
            if is_scratch(entry.name):  # of a process that was killed while it wrote into this directory
                continue
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
