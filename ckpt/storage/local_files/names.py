"""Whether a filesystem keeps files apart whose names differ only in case or in the form of Unicode."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from unicodedata import normalize


def find_kept_as_one(folder: Path | None, paths: Iterable[str]) -> str | None:
    """Return what a filesystem does that takes two of `paths` for the name of one file; None if it keeps all apart.

    Args:
        folder: The directory that `paths` are relative to, where all exist; None for a bucket, which keeps all apart.
        paths: The paths of the files.

    Returns:
        The end of a sentence that begins with the filesystem: "takes ... and ... for the name of one file".

    """
    if folder is None:
        return None
    both = next((pair for pair in _alike(paths) if not _are_two_files(folder, *pair)), None)
    return None if both is None else f"takes {both[0]!r} and {both[1]!r} for the name of one file"


def find_other_spelling(place: Path) -> Path | None:
    """Return the path that `place` stands for, if it differs in case alone, which is ignored there (CIFS, exFAT, APFS)."""
    with suppress(OSError):  # nothing is there yet, or its parent may not be listed
        if place.exists():
            named = [it for it in place.parent.iterdir() if it.name.lower() == place.name.lower()]
            return None if place in named else next((it for it in named if it.samefile(place)), None)
    return None


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
