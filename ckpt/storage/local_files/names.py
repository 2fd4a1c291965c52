"""Whether a filesystem keeps files apart whose names differ only in case or in the form of Unicode."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from unicodedata import normalize


def find_kept_as_one(folder: Path, paths: Iterable[str]) -> tuple[str, str] | None:
    """Return two of `paths` below `folder`, which all exist, that the filesystem takes for the name of one file, else None."""
    return next((pair for pair in _alike(paths) if not _are_two_files(folder, *pair)), None)


def _alike(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of paths that name one file on a filesystem that ignores case or forms of Unicode."""
    first: dict[str, str] = {}
    for path in paths:
        other = first.setdefault((path if path.isascii() else normalize("NFC", path)).casefold(), path)
        if other != path:
            yield other, path


def _are_two_files(folder: Path, first: str, second: str) -> bool:
    return not (folder / first).samefile(folder / second) and _are_both_listed(folder, first, second)


def _are_both_listed(folder: Path, first: str, second: str) -> bool:
    """Return whether the first directory in which the paths differ lists both names: FUSE may number names instead of files."""
    one, other = Path(first), Path(second)
    for name, alike_name in zip(one.parts, other.parts, strict=True):
        if name != alike_name:
            return {name, alike_name}.issubset(entry.name for entry in folder.iterdir())
        folder /= name
    raise AssertionError
