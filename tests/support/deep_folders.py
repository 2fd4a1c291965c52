"""Directories that are nested deeper than any report, as another program may leave them in a storage."""

from pathlib import Path


def make_deep(folder: Path, levels: int = 500) -> Path:
    """Create nested directories named "x" in `folder`, and return the deepest."""
    for _ in range(levels):
        folder /= "x"
        folder.mkdir(parents=True, exist_ok=True)
    return folder
