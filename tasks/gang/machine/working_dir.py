"""The user's working directory as an archive, which is copied to every machine."""

import hashlib
import io
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash
from prefect.utilities.filesystem import filter_files
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.ckpt.text import encodable, show_bytes, show_some
from prefect_torch.tasks.rank.user_code.working_dir import StoredDirectory
from prefect_torch.tasks.run_logs import get_run_logger

_MOST_BYTES = 100 << 20
_NUM_SHOWN = 3
_LEFT_S = 3600.0
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest of a zip file: equal files make equal archives
_IGNORE_FILE = ".prefectignore"
_LEFT_OUT = {
    ".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "venv", ".tox", ".nox",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkingDirectory:
    """A packed directory.

    Attributes:
        stored: The description by which ranks find the archive.
        archive: The archive.

    """

    stored: StoredDirectory
    archive: bytes = field(repr=False)

    def store(self, run: Run) -> None:
        """Store the archive beside the run, unless another has it, and delete the former ones of this training or evaluation.

        One that is there may be torn by a kill, or damaged, so it is replaced. Evaluations of one name may run concurrently, so
        former archives of an evaluation stay for an hour, in which its ranks have long unpacked them.

        Raises:
            StorageError, OSError: If the storage fails.

        """
        if self.stored.run is not None:
            return
        key = self.stored.key_for(run)
        try:
            run.storage.put_bytes(key, self.archive)
        except PermissionError:  # where nothing may be replaced; ranks go by its digest
            if find_size(run.storage, key) is None:
                raise
        there = {it.key: it.modified_s for it in run.storage.list(run.layout.codes(self.stored.evaluation)) if is_key(it.key)}
        # The ranks of a training's older attempts are fenced.
        before_s = math.inf if self.stored.evaluation is None else there.get(key, 0.0) - _LEFT_S
        if former := {it for it, modified_s in there.items() if it != key and modified_s < before_s}:
            with suppress(PermissionError):  # where nothing may be deleted; ranks go by the digest of theirs
                run.storage.delete(former)

    def stored_by(self, run: Run) -> "WorkingDirectory":
        """Store the archive beside a sweep, and return it as the ranks of its trials find it; raises as `store`."""
        self.store(run)
        return replace(self, stored=replace(self.stored, run=run.name))


def pack_directory(directory: str | Path, storage: str, evaluation: str | None = None) -> WorkingDirectory:
    """Return `directory` packed, without version control, virtual environments, caches and what `.prefectignore` names.

    Args:
        directory: Its path.
        storage: The storage's location, which is left out if it is within the directory.
        evaluation: The name of the evaluation whose ranks run in it; None for those of a training.

    Raises:
        ValueError: If there is no such directory, its files have more than 100 MiB, it is the storage itself, or it has a name
            that is not UTF-8 or a link that leads above it.

    """
    root, storage = Path(directory).expanduser().resolve(), canonical(storage)
    if not root.is_dir():
        raise ValueError(f"working_dir={directory!r}: there is no directory {root}")
    if str(root) == storage:
        raise ValueError(
            f"working_dir={directory!r} is the storage, whose checkpoints are not code: store them in a directory below"
        )
    sizes = {path: path.stat().st_size for path in _files(root, storage)}
    if sum(sizes.values()) > _MOST_BYTES:
        raise ValueError(_explain_size(root, sizes))
    archive = _pack(root, sorted(sizes))
    sha256 = hashlib.sha256(archive).hexdigest()
    stored = StoredDirectory(str(root), len(archive), xxhash.xxh3_128_hexdigest(archive), sha256, evaluation)
    return WorkingDirectory(stored, archive)


def _files(root: Path, storage: str) -> Iterator[Path]:
    included = _included(root)
    links: list[str] = []
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = [name for name in names if name not in _LEFT_OUT and not _is_left_out(here / name, storage)]
        links += [str((here / name).relative_to(root)) for name in names if (here / name).is_symlink()]
        for path in (here / name for name in files):
            relative = str(path.relative_to(root))
            if path.is_file() and (included is None or relative in included):
                yield path

    if links:
        get_run_logger().warning(
            "the copy of working_dir %s has no linked directories: %s is left out; make it a directory, or install its modules",
            root,
            show_some(links),
        )


def _included(root: Path) -> set[str] | None:
    """Return the paths that the ignore file leaves, or None without one.

    Raises:
        ValueError: If a link leads to a directory above it.

    """
    ignore = root / _IGNORE_FILE
    if not ignore.is_file():
        return None
    try:
        return filter_files(str(root), ignore.read_text("utf-8").splitlines(), include_dirs=False)
    except Exception as exc:
        if type(exc).__name__ != "RecursionError":  # not Python's own: the library that Prefect uses has one for links
            raise
        raise ValueError(
            f"working_dir {root} has a link to a directory above it, so {_IGNORE_FILE} cannot be applied; remove it: {exc}"
        ) from exc


def _is_left_out(folder: Path, storage: str) -> bool:
    return (folder / "pyvenv.cfg").exists() or str(folder) == storage


def _pack(root: Path, files: list[Path]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in files:
            name = path.relative_to(root).as_posix()
            if encodable(name) != name:
                raise ValueError(f"working_dir {root} has a file whose name is not UTF-8, rename it: {encodable(name)}")
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = stat.S_IMODE(path.stat().st_mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return packed.getvalue()


def _explain_size(root: Path, sizes: dict[Path, int]) -> str:
    entries: dict[str, int] = {}
    for path, size in sizes.items():
        first, *rest = path.relative_to(root).parts
        name = f"{first}/" if rest else first
        entries[name] = entries.get(name, 0) + size
    largest = sorted(entries.items(), key=lambda entry: -entry[1])[:_NUM_SHOWN]
    shown = ", ".join(f"{name} ({show_bytes(size)})" for name, size in largest)
    return (
        f"working_dir {root} has {show_bytes(sum(sizes.values()))} of files, more than {show_bytes(_MOST_BYTES)}: name what is "
        f"not code in {root / _IGNORE_FILE}; the largest are {shown}"
    )
