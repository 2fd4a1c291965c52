"""Selection of a checkpoint's files."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from prefect_torch.ckpt.errors import RankLocalStateError
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.text import show_some

from .folder import scan_files

Include: TypeAlias = str | Sequence[str] | None


def choose_files(manifest: Manifest, include: Include, own_of: tuple[int, int] | None, where: str) -> tuple[FileEntry, ...]:
    """Return the files that match `include` and those that one rank stored; all of them if neither is given.

    Args:
        manifest: The checkpoint.
        include: See `matching`; None for no pattern.
        own_of: The rank whose own files are selected, and the number of ranks now; None for no rank.
        where: The location, for errors.

    Raises:
        ValueError: If a pattern matches nothing.
        RankLocalStateError: If another number of ranks stored the checkpoint, so that no file is this rank's own.

    """
    if include is None and own_of is None:
        return manifest.files
    if own_of is not None and own_of[1] != manifest.world_size:
        raise RankLocalStateError(
            f"{manifest.world_size} ranks stored {where}, and now there are {own_of[1]}, so no file is one rank's own: choose "
            "files by include=, or take all of them"
        )
    matched = set() if include is None else matching([entry.path for entry in manifest.files], include, where)
    own = None if own_of is None else own_of[0]
    return tuple(entry for entry in manifest.files if entry.path in matched or entry.rank == own)


def choose_in_folder(folder: Path, include: Include, *, own_files: bool) -> list[str] | None:
    """Return the paths of the files in a plain directory that match `include`; None stands for all its files.

    Raises:
        ValueError: If a pattern matches nothing, or one rank's own files are selected.

    """
    if own_files:
        raise ValueError(f"{folder} is a plain directory, of which no file is one rank's own")
    return None if include is None else sorted(matching(scan_files(folder), include, str(folder)))


def matching(paths: Sequence[str], include: str | Sequence[str], where: str) -> set[str]:
    """Return those of `paths` that match one of the patterns, or lie in a directory that does.

    Args:
        paths: "/"-joined paths of files.
        include: Patterns of `fnmatch`, case-sensitive; "*" matches "/", too. A pattern that is a path matches that path.
        where: The location, for the error.

    Raises:
        ValueError: If one of the patterns matches nothing, naming existing files.

    """
    found: set[str] = set()
    for pattern in [include] if isinstance(include, str) else include:
        matched = {path for path in paths if any(_matches(it, pattern.rstrip("/")) for it in _with_folders(path))}
        if not matched:
            raise ValueError(f"no file of {where} matches {pattern!r}; it has {show_some(sorted(paths)) or 'no file at all'}")
        found |= matched
    return found


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)  # "epoch[1].pt" is a name, too


def _with_folders(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]
