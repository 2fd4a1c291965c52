"""A copy of a run between storages: verified, each manifest after its data, continued where it was interrupted.

A checkpoint exists by its manifest, so a killed copy leaves whole checkpoints and data without a manifest. The claims of
attempts are copied before the manifests: a training that starts in between numbers its own attempts after them. No process may
change the run meanwhile, which the caller makes sure of.

Until the manifest is there, a garbage collection in the target would take the data for abandoned ones, immediately if a later
step of the same attempt is there. So an object beside the manifests, `Layout.incoming`, marks each checkpoint that is being
copied. It is put first, again once an hour, and removed last. A collection lists data before manifests, so it sees either this
mark or the manifest.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import claim_keys
from prefect_torch.ckpt.runs.deletion.marks import witnessed
from prefect_torch.ckpt.runs.layout import Layout, attempt_number
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.quarantine import quarantined_ids
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.local_files.names import find_kept_as_one
from prefect_torch.ckpt.storage.machine.clocks import Stopwatch
from prefect_torch.ckpt.storage.machine.scratch import scratch_folder
from prefect_torch.ckpt.storage.parallel import for_each, read_all
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Storage
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.sizes import find_other_size, find_size, require_size

_BATCH_BYTES = 16 * 2**30  # an interrupted copy leaves the checkpoints of one batch incomplete
_BATCH = 256
_RENEW_S = 3600.0  # a collection believes a mark for two days
_NOT_COPIED = "so nothing that needs it was copied: prefect-torch verify names all the damage"
# Of records in bytes, as listed, by their keys; None: it is not listed yet, and may be missing.
_Sizes: TypeAlias = Mapping[str, int | None]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The objects to copy, in this order.

    Attributes:
        layout: The keys of the run.
        records: The records of the run, those that others rely on first.
        aside: The data of each checkpoint in quarantine, by its id; they may be damaged, and are copied as they are.
        checkpoints: The manifests of the checkpoints, oldest first.
        attached: The evaluations and the changed metadata of each checkpoint, also in quarantine, by its id.
        logs: The logs of evaluations, which count as garbage before their checkpoints are there.

    """

    layout: Layout
    records: _Sizes
    aside: Mapping[str, Sequence[ObjectInfo]] = field(default_factory=dict)
    checkpoints: Sequence[Manifest] = ()
    attached: Mapping[str, _Sizes] = field(default_factory=dict)
    logs: _Sizes = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of the data."""
        aside = sum(info.bytes for infos in self.aside.values() for info in infos)
        return sum(it.total_bytes for it in self.checkpoints) + aside


def plan_copy(run: Run, manifests: Iterable[Manifest], *, whole: bool) -> CopyPlan:
    """Return the plan of a copy of `manifests` and, with `whole`, of everything else in the run except garbage.

    Of a sweep, these are its own records: its definition and its journal. Its trials are other runs.
    """
    layout = run.layout
    chosen = sorted(manifests, key=lambda it: it.id)
    aside = {it: list(run.storage.list(layout.data(it))) for it in quarantined_ids(run)} if whole else {}
    unlisted = [layout.run_info, *([layout.sweep, layout.last_pin] if whole else [])]
    records: dict[str, int | None] = dict.fromkeys(unlisted)
    for prefix in layout.copied if whole else layout.copied_with_checkpoints:
        records.update(_listed(run, prefix))
    ids = list(dict.fromkeys([*aside, *(it.id for it in chosen)]))
    evaluations = read_all(ids, lambda it: _listed(run, layout.evaluations(it)))
    attached = {it: {**listed, layout.metadata(it): None} for it, listed in zip(ids, evaluations, strict=True)}
    logs = _listed(run, layout.all_evaluation_logs) if whole else {}
    return CopyPlan(layout, records, aside, chosen, attached, logs)


def _listed(run: Run, prefix: str) -> _Sizes:
    return dict(sorted(run.sizes(prefix).items()))


def check_same_run(source: Run, target: Storage) -> None:
    """Raise if the target has another run of that name, or its copy was trained; what an interrupted copy has left is the same.

    Costs a put, a request and a deletion if the target has the run.

    Raises:
        ValueError: If the target is the storage of the run itself, however it is spelled.
        FileExistsError: If the target has another run, or the copy has attempts of its own: those of the source would fence
            them, and have the same numbers.

    """
    there = Run.open(target, source.name)
    known = there.records.get_json(there.layout.run_info)
    has_any = next(there.storage.list(f"{source.name}/"), None) is not None
    if has_any and (known is None or known != source.records.get_json(source.layout.run_info)):
        raise FileExistsError(f"{there.path} is another run: give another storage, or delete it first")
    if has_any:
        _check_two_places(source, there)
    _check_not_trained(source.layout, claim_keys(source), target)


def _check_two_places(source: Run, target: Run) -> None:
    """Raise if what is put into the target is in the source: one server has several names, and one directory several mounts."""
    with witnessed(target) as witness:
        is_one_place = find_size(source.storage, witness) is not None
    if is_one_place:
        raise ValueError(f"{target.storage.url} is the storage of the run itself: give another one")


def _check_not_trained(layout: Layout, claims: Collection[str], target: Storage) -> None:
    own = {info.key for info in target.list(layout.attempts) if attempt_number(info.key)}.difference(claims)
    if own:
        raise FileExistsError(
            f"{target.url}/{layout.run} is a copy that has been trained further, in attempt {attempt_number(min(own))}: give "
            "another storage, or delete it first"
        )


def copy_planned(plan: CopyPlan, source: Storage, target: Storage, advance: Callable[[int], None]) -> int:
    """Copy the data that the target lacks, and all records; return the number of bytes of data that were copied.

    Every byte of the data is digested on its way, and compared with the manifest's digest; data that the target has already are
    read and compared. Of those in quarantine, and of records, only the sizes are. A manifest is compared with its own digest;
    one that is damaged is as planned in the copy, with a warning. A checkpoint in quarantine that an earlier copy committed in
    the target, before it was damaged, stays as it is there.

    Args:
        plan: What to copy.
        source: The storage that has it.
        target: The storage to copy to.
        advance: Called with the size of each file that is done.

    Raises:
        CheckpointCorruptError: If the source's data differ from what was committed; the manifest is not copied then.
        CheckpointNotFoundError: If a checkpoint is gone, such as by a prune; a repeated copy leaves it out.
        StorageError: If data were deleted in the target meanwhile, or a record arrives with another size than it is listed
            with, until the retries end; a repeated copy continues.
        FileExistsError: If a training has begun in the target; nothing is copied then. If the target's filesystem takes the
            names of two files for one; their checkpoint is not copied then.

    """
    _check_not_trained(plan.layout, plan.records, target)  # again: a plan may take minutes
    return _RunCopy(plan, source, target, advance).run()


class _IncomingMarks:
    """The marks of the checkpoints that are being copied; used by all threads of the copy."""

    def __init__(self, keys: Sequence[str], target: Storage) -> None:
        self._keys = keys
        self._target = target
        self._lock = threading.Lock()
        self._since_put: Stopwatch | None = None

    def renew(self) -> None:
        """Put the marks, unless that was done less than an hour ago."""
        with self._lock:
            since_put = Stopwatch()
            if self._since_put is not None and self._since_put.elapsed_s < _RENEW_S:
                return
            for_each(self._keys, lambda key: self._target.put_bytes(key, b""))
            self._since_put = since_put

    def remove(self) -> None:
        """Remove the marks: the manifests are there."""
        self._target.delete(self._keys)


def _batches(checkpoints: Iterable[Manifest]) -> Iterator[list[Manifest]]:
    """Yield checkpoints in groups, the files of which are copied concurrently."""
    batch, batch_bytes = list[Manifest](), 0
    for it in checkpoints:
        batch.append(it)
        batch_bytes += it.total_bytes
        if len(batch) == _BATCH or batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


class _RunCopy:
    """One copy of what a plan has; see `copy_planned`."""

    def __init__(self, plan: CopyPlan, source: Storage, target: Storage, advance: Callable[[int], None]) -> None:
        self._plan = plan
        self._layout = plan.layout
        self._source = source
        self._target = target
        self._advance = advance

    def run(self) -> int:
        """Copy everything, and return the number of bytes of data that were copied."""
        plan, layout, target = self._plan, self._layout, self._target
        intact = {it for it in plan.aside if find_size(target, layout.manifest(it)) is not None}  # copied before the damage
        notes = {layout.quarantine(it) for it in intact}
        self._copy_records({key: size for key, size in plan.records.items() if key not in notes})
        copied = self._copy_aside(intact)
        aside_there = {info.key for info in target.list(layout.quarantined)}
        copied += sum(self._copy_batch(batch, aside_there) for batch in _batches(plan.checkpoints))
        self._copy_records(plan.logs)
        return copied

    def _copy_aside(self, intact: Collection[str]) -> int:
        """Copy the data of checkpoints in quarantine, except of those that are intact in the target, and what is attached."""
        aside = self._plan.aside
        self._advance(sum(info.bytes for it in intact for info in aside[it]))
        copied = sum(for_each([info for it in aside.keys() - intact for info in aside[it]], self._copy_as_is))
        for_each(self._plan.attached.keys() - {it.id for it in self._plan.checkpoints}, self._copy_attached)
        return copied

    def _copy_as_is(self, info: ObjectInfo) -> int:
        copied = 0
        if find_size(self._target, info.key) != info.bytes:
            with suppress(FileNotFoundError), self._as_file(info.key) as (path, _):  # if its time in quarantine is over
                copied = self._target.put_file(info.key, path).bytes
        self._advance(info.bytes)
        return copied

    def _copy_batch(self, batch: Sequence[Manifest], aside_there: set[str]) -> int:
        """Copy checkpoints, each manifest after all data of the batch; their marks stay if that fails."""
        layout = self._layout
        marks = _IncomingMarks([layout.incoming(it.id) for it in batch], self._target)
        marks.renew()
        files = [(it, entry) for it in batch for entry in it.files]
        copied = sum(for_each(files, lambda file: self._copy_file(*file, marks)))
        for it in batch:
            self._check_distinct(it)
        for_each([it.id for it in batch], self._copy_attached)
        for_each(batch, self._copy_manifest)
        for_each(batch, self._check_stays)
        restored = aside_there.intersection(layout.quarantine(it.id) for it in batch)  # since an earlier copy
        self._target.delete(restored)
        marks.remove()
        return copied

    def _copy_file(self, manifest: Manifest, entry: FileEntry, marks: _IncomingMarks) -> int:
        marks.renew()
        key = self._layout.data(manifest.id, entry.path)
        with self._naming_missing(key, manifest):
            copied = 0 if self._is_there(key, entry) else self._send(key, entry)
        self._advance(entry.bytes)
        return copied

    def _is_there(self, key: str, entry: FileEntry) -> bool:
        try:
            return self._target.size(key) == entry.bytes and self._target.digest(key).digest == entry.digest
        except FileNotFoundError:
            return False

    def _send(self, key: str, entry: FileEntry) -> int:
        source, target = self._source, self._target
        differs = CheckpointCorruptError(f"{source.url}/{key} differs from what was committed, {_NOT_COPIED}")
        with self._as_file(key, entry.bytes) as (path, size):
            if size != entry.bytes:  # it could fill the target
                raise differs
            sent = target.put_file(key, path)
        if (sent.bytes, sent.digest) != (entry.bytes, entry.digest):
            target.delete([key])
            raise differs
        return sent.bytes

    @contextmanager
    def _as_file(self, key: str, expected: int | None = None) -> Iterator[tuple[Path, int]]:
        """Yield an object of the source as a local file, with its size: the stored file if it is local, else a temporary copy.

        Of another size than `expected`, it is not copied. A pipe has no size, and would block.
        """
        path = self._source.local_path(key)
        if path is not None:
            yield path, self._source.size(key)
            return
        with scratch_folder() as folder:
            got = self._source.get_file(key, folder / "file", expected)
            yield folder / "file", got.bytes

    @contextmanager
    def _naming_missing(self, key: str, manifest: Manifest) -> Iterator[None]:
        """Name the object of the source that is missing, and what to do; a prune deletes the manifest first."""
        source = self._source
        try:
            yield
        except FileNotFoundError as exc:
            path = source.local_path(key)
            is_no_file = path is not None and path.exists()
            if is_no_file or find_size(source, key) is not None:  # then the target lacks something
                raise
            if find_size(source, self._layout.manifest(manifest.id)) is not None:
                raise CheckpointCorruptError(f"{source.url}/{key} is missing, {_NOT_COPIED}") from exc
            raise CheckpointNotFoundError(
                f"{source.url}/{key} is gone: its checkpoint was pruned or deleted while it was copied; the same command "
                "copies the checkpoints that are left"
            ) from exc

    def _check_distinct(self, manifest: Manifest) -> None:
        target = self._target
        folder = target.local_path(self._layout.data(manifest.id))
        if (problem := find_kept_as_one(folder, (entry.path for entry in manifest.files))) is not None:
            raise FileExistsError(f"the filesystem of {target.url} {problem} in checkpoint {manifest.id}: give another storage")

    def _copy_manifest(self, planned: Manifest) -> None:
        """Copy a manifest; if it is damaged, its content is that of the plan, from the index of manifests."""
        key = self._layout.manifest(planned.id)
        with self._naming_missing(key, planned):
            try:
                content = _read_manifest(key, self._source)
            except CheckpointCorruptError as exc:
                _logger.warning("%s; in the copy it is as the index of manifests has it", exc)
                content = planned.encode()
            self._target.put_bytes(key, content)

    def _check_stays(self, manifest: Manifest) -> None:
        """Remove a checkpoint that lacks data by now: a collection that began before its mark may have taken them."""
        layout, target = self._layout, self._target
        sizes = {layout.data(manifest.id, entry.path): entry.bytes for entry in manifest.files}
        if (differs := find_other_size(target, layout.data(manifest.id), sizes)) is not None:
            target.delete([layout.manifest(manifest.id)])
            raise StorageError(
                f"{target.url}/{differs[0]} was deleted while its checkpoint was copied: the same command continues"
            )

    def _copy_attached(self, checkpoint_id: str) -> None:
        self._copy_records(self._plan.attached[checkpoint_id])

    def _copy_records(self, sizes: _Sizes) -> None:
        items = list(sizes.items())
        for_each(items[:1], self._copy_record)  # by a run's own, an interrupted copy is known
        for_each(items[1:], self._copy_record)

    def _copy_record(self, item: tuple[str, int | None]) -> None:
        key, size = item
        with suppress(FileNotFoundError):  # there is no metadata, it is no sweep, or a pin was removed meanwhile
            self._target.put_bytes(key, _read_record(key, size, self._source))


def _read_manifest(key: str, source: Storage) -> bytes:
    def read(data: bytes) -> bytes:
        Manifest.decode(data, f"{source.url}/{key}")
        return data

    return read_whole(source, key, read)


def _read_record(key: str, listed: int | None, source: Storage) -> bytes:
    """Return the content of a record; a gateway's page, or a cut answer that seems complete, is not taken for it."""

    def read(storage: Storage) -> bytes:
        data = storage.get_bytes(key)
        if len(data) != listed:  # which may be right: the last part of a log grows
            require_size(storage, key, len(data))
        return data

    return with_retries(source, "reading", key, read)
