"""A copy of a run between storages: verified, manifests last, continued where it was interrupted.

A checkpoint exists by its manifest, so a killed copy leaves whole checkpoints and data without a manifest. The claims of
attempts are copied before the manifests: a training that starts in between numbers its own attempts after them. No process may
change the run meanwhile, which the caller makes sure of.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect_torch.ckpt.errors import CheckpointCorruptError
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.quarantine import quarantined_ids
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.machine.scratch import scratch_folder
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Storage
from prefect_torch.ckpt.storage.sizes import find_size


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The objects to copy, in this order.

    Attributes:
        files: The data of the checkpoints, with the entry of each in its manifest.
        aside: The data of the checkpoints in quarantine, which may be damaged, and are copied as they are.
        records: The keys of all other objects, those that others rely on first.
        manifests: The keys of the manifests, oldest first.

    """

    files: Sequence[tuple[str, FileEntry]]
    aside: Sequence[ObjectInfo]
    records: Sequence[str]
    manifests: Sequence[str]

    @property
    def bytes(self) -> int:
        """The size of the data."""
        return sum(entry.bytes for _, entry in self.files) + sum(info.bytes for info in self.aside)


def plan_copy(run: Run, manifests: Iterable[Manifest], *, whole: bool) -> CopyPlan:
    """Return the plan of a copy of `manifests` and, with `whole`, of everything else in the run except garbage.

    Of a sweep, these are its own records: its definition and its journal. Its trials are other runs.
    """
    layout = run.layout
    chosen = sorted(manifests, key=lambda it: it.id)
    files = [(layout.data(it.id, entry.path), entry) for it in chosen for entry in it.files]
    aside = [info for it in quarantined_ids(run) for info in run.storage.list(layout.data(it))] if whole else []
    of_sweep = [layout.sweep, layout.last_pin] if whole else []
    records = [key for prefix in (layout.copied if whole else layout.copied_with_checkpoints) for key in run.keys(prefix)]
    attached = [key for it in chosen for key in run.keys(layout.evaluations(it.id))]
    metadata = [layout.metadata(it.id) for it in chosen]
    records = [layout.run_info, *of_sweep, *records, *attached, *metadata]
    return CopyPlan(files, aside, records, [layout.manifest(it.id) for it in chosen])


def check_same_run(source: Run, target: Storage) -> None:
    """Raise if the target has another run of that name; one that an interrupted copy has left is the same.

    Raises:
        FileExistsError: If the target has another run.

    """
    there = Run.open(target, source.name)
    known = there.get_json(there.layout.run_info)
    has_any = next(there.storage.list(f"{source.name}/"), None) is not None
    if has_any and (known is None or known != source.get_json(source.layout.run_info)):
        raise FileExistsError(f"{there.path} is another run: give another storage, or delete it first")


def copy_planned(plan: CopyPlan, source: Storage, target: Storage, advance: Callable[[int], None]) -> int:
    """Copy the data that the target lacks, and all records; return the number of bytes of data that were copied.

    Every byte of the data is digested on its way, and compared with the manifest's digest; data that the target has already are
    read and compared. Of those in quarantine, only the sizes are.

    Args:
        plan: What to copy.
        source: The storage that has it.
        target: The storage to copy to.
        advance: Called with the size of each file that is done.

    Raises:
        CheckpointCorruptError: If the source's data differ from what was committed; the manifest is not copied then.
        FileNotFoundError: If a file is gone, such as by a prune.

    """
    info, *records = plan.records
    _copy_small(info, source, target)

    def copy_one(item: tuple[str, FileEntry]) -> int:
        key, entry = item
        copied = 0 if _is_there(key, entry, target) else _copy_file(key, entry, source, target)
        advance(entry.bytes)
        return copied

    def copy_as_is(info: ObjectInfo) -> int:
        copied = 0 if find_size(target, info.key) == info.bytes else _copy_as_is(info.key, source, target)
        advance(info.bytes)
        return copied

    copied = sum(for_each(plan.files, copy_one)) + sum(for_each(plan.aside, copy_as_is))
    for key in (*records, *plan.manifests):
        _copy_small(key, source, target)
    return copied


def _is_there(key: str, entry: FileEntry, target: Storage) -> bool:
    try:
        return target.size(key) == entry.bytes and target.digest(key).digest == entry.digest
    except FileNotFoundError:
        return False


def _copy_as_is(key: str, source: Storage, target: Storage) -> int:
    try:
        with _as_file(key, source) as path:
            return target.put_file(key, path).bytes
    except FileNotFoundError:  # its time in quarantine is over
        return 0


def _copy_file(key: str, entry: FileEntry, source: Storage, target: Storage) -> int:
    differs = CheckpointCorruptError(
        f"{source.url}/{key} differs from what was committed, so nothing that needs it was copied: prefect-torch verify names "
        "all the damage"
    )
    with _as_file(key, source) as path:
        # A pipe has no size here, and would block; a file that has grown could fill the target.
        if source.local_path(key) is not None and source.size(key) != entry.bytes:
            raise differs
        sent = target.put_file(key, path)
    if (sent.bytes, sent.digest) != (entry.bytes, entry.digest):
        target.delete([key])
        raise differs
    return sent.bytes


@contextmanager
def _as_file(key: str, source: Storage) -> Iterator[Path]:
    """Yield the object as a local file: the stored file itself if it is local, else a temporary copy."""
    path = source.local_path(key)
    if path is not None:
        yield path
        return
    with scratch_folder() as folder:
        source.get_file(key, folder / "file")
        yield folder / "file"


def _copy_small(key: str, source: Storage, target: Storage) -> None:
    try:
        target.put_bytes(key, source.get_bytes(key))
    except FileNotFoundError:  # there is no metadata, it is no sweep, or a pin was removed meanwhile
        return
