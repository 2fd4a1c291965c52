"""Files moved into a directory that may hold others, once it is known that each has a place there."""

import os
from collections.abc import Iterable
from pathlib import Path


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
