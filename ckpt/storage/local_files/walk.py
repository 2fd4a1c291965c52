"""The files below a directory, in the order of their keys, and the deletion of a directory, whatever its depth."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prefect_torch.ckpt.storage.keys import is_unlisted, temporary_name
from prefect_torch.ckpt.storage.protocol import ObjectInfo
from prefect_torch.ckpt.text import clip

MOST_LEVELS = 128  # a rank reports 100 at most; each has an open directory, of which a process may have a thousand
_SHOWN = 200
_logger = logging.getLogger(__name__)


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
    """Delete a directory as `shutil.rmtree` does, whose frame and descriptor for each level may be too many."""
    with suppress(FileNotFoundError):  # which rmtree raises, too
        while _lift(folder):
            pass
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _lift(folder: Path) -> bool:
    """Move what is nested too deep up into `folder`, and return whether anything was; rmtree names what cannot be moved."""
    lifted = False
    for place, below, _, descriptor in os.fwalk(folder):
        if len(Path(place).parts) - len(folder.parts) < MOST_LEVELS:
            continue
        for name in below:
            with suppress(OSError):
                os.rename(name, folder / temporary_name(), src_dir_fd=descriptor)
                lifted = True
        below.clear()
    return lifted


class _Level(NamedTuple):
    folder: int
    prefix: str
    left: Iterator[tuple[str, os.DirEntry[str]]]  # what was not looked at yet


def walk(root: Path, folder: int, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
    """Yield the files below an open directory, and close it; no link is followed, and what is too deep left out with a warning.

    Args:
        root: The storage's directory, for the warning.
        folder: The directory.
        prefix: The beginning of the keys of what is in it.
        after: The key after which to begin; None for the first.

    """
    levels = [_Level(folder, prefix, _entries(folder))]
    try:
        while levels:
            level = levels[-1]
            name, entry = next(level.left, ("", None))
            key = f"{level.prefix}{name}"
            if entry is None:
                os.close(levels.pop().folder)
            elif not name.endswith("/"):
                yield from _file(key, entry, after)
            elif len(levels) == MOST_LEVELS:
                path = f"{root}/{clip(key, _SHOWN)}"
                _logger.warning("left out: %s is nested more than %d levels deep: move or delete it", path, MOST_LEVELS)
            elif after is None or key > after or after.startswith(key):
                levels += _below(level, entry.name, key)
    finally:
        for level in levels:
            os.close(level.folder)


def _entries(folder: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder) as entries:
        # A directory sorts as its name with the "/" that its keys continue with: "a-b" comes before "a/b". A file that is
        # replaced meanwhile may come twice (tmpfs, FUSE).
        named = {f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name: entry for entry in entries}
    yield from sorted(named.items())


def _below(level: _Level, name: str, prefix: str) -> Iterator[_Level]:
    """Yield the directory `name`, opened; nothing if it is gone."""
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=level.folder)
    except FileNotFoundError:  # deleted after the scan
        return
    except OSError as exc:
        exc.filename = prefix  # the call knew the last name only
        raise
    yield _Level(folder, prefix, _entries(folder))


def _file(key: str, entry: os.DirEntry[str], after: str | None) -> Iterator[ObjectInfo]:
    """Yield the file at `key`; nothing if it is none, is still written, was deleted, or does not come after `after`."""
    if (after is None or key > after) and not is_unlisted(entry.name) and entry.is_file(follow_symlinks=False):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # deleted after the scan
            return
        yield ObjectInfo(key, status.st_size, status.st_mtime)
