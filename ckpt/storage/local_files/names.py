"""Whether a filesystem keeps files apart whose names differ only in case or in the form of Unicode."""

from pathlib import Path


def are_two_files(folder: Path, first: str, second: str) -> bool:
    """Return whether a filesystem has a file of its own under each of two paths in `folder`, which both exist."""
    return not (folder / first).samefile(folder / second) and _are_both_listed(folder, first, second)


def _are_both_listed(folder: Path, first: str, second: str) -> bool:
    """Return whether the first directory in which the paths differ lists both names: FUSE may number names instead of files."""
    one, other = Path(first), Path(second)
    for name, alike_name in zip(one.parts, other.parts, strict=True):
        if name != alike_name:
            return {name, alike_name}.issubset(entry.name for entry in folder.iterdir())
        folder /= name
    raise AssertionError
