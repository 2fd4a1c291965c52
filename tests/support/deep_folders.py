"""Directories that are nested deeper than any report, as another program may leave them in a storage."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_deep(folder: Path, levels: int = 500) -> Path:
    """Create nested directories named "x" in `folder`, and return the deepest."""
    for _ in range(levels):
        folder /= "x"
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def deep(*folders: Path) -> Iterator[None]:
    """Make each of `folders` so deep that Python could not remove it, and remove what is left of them in the end."""
    try:
        for folder in folders:
            make_deep(folder, 1200)
        yield
    finally:
        subprocess.run(["rm", "-rf", *folders], check=True)  # pytest would fail, in a later session, too
