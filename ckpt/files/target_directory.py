"""A directory of the caller's that receives the files of a checkpoint, and may hold others."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from os.path import realpath
from pathlib import Path


@contextmanager
def made_directory(path: str | PathLike[str] | None) -> Iterator[Path]:
    """Yield the directory at `path`, or else a new one; after an error, remove a new one, if named only if it is empty."""
    target = Path(tempfile.mkdtemp(prefix="prefect-torch-") if path is None else path).expanduser()
    is_new = path is None or not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield target
    except BaseException:
        if path is None:
            shutil.rmtree(target, ignore_errors=True)
        elif is_new:
            with suppress(OSError):  # another process uses it by now
                target.rmdir()
        raise


def lies_in(checkpoint: str, path: str | PathLike[str]) -> bool:
    """Return whether `path` is the local directory of a checkpoint, or is below it."""
    # Not Path.resolve, which raises for a link to itself.
    return "://" not in checkpoint and Path(realpath(Path(path).expanduser())).is_relative_to(realpath(checkpoint))


def copy_folder(source: Path, target: Path, paths: Iterable[str] | None) -> None:
    """Copy a plain directory, or the files of it at `paths`, into another one."""
    if paths is None:
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    for path in paths:
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, place)


def plan_moves(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Return each file below `source` and its place in `target`.

    Raises:
        FileExistsError: If a directory is in the place of a file, or a file in that of a directory.

    """
    moves = [(path, target / path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
    for _, place in moves:
        if place.is_dir() and not place.is_symlink():
            raise FileExistsError(f"{place} is a directory, and the checkpoint has a file of that name: give another directory")
    for folder in sorted({parent for _, place in moves for parent in place.relative_to(target).parents}):
        inside = target / folder
        if os.path.lexists(inside) and not inside.is_dir():
            raise FileExistsError(f"{inside} is a file, and the checkpoint has a directory of that name: move it away")
    return moves


def move_all(moves: Iterable[tuple[Path, Path]]) -> None:
    """Move files to their places on the same filesystem, over existing files."""
    for path, place in moves:
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
