"""Deletion of data without a manifest, and of whatever else killed processes have left in a run."""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect_torch.ckpt.runs.attempts.attempt import read_outcome
from prefect_torch.ckpt.runs.evaluations import committed_id, evaluation_of
from prefect_torch.ckpt.runs.layout import attempt_number, stem, unreported_attempt
from prefect_torch.ckpt.runs.log_files import delete_evaluation_logs
from prefect_torch.ckpt.runs.manifest import attempt_of, is_id, step_of
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.local_files.readers import is_read
from prefect_torch.ckpt.storage.local_files.walk import remove_tree
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import show_some

from .failures import Failures
from .links import own_folder, without_targets
from .marks import STALE_S, marked, remove_stale_marks

GARBAGE_GRACE_S = 3600.0
_DAY_S = 24 * 3600.0
_LONGEST_COPY_S = 2 * _DAY_S  # of a file: a copy puts its marks again between files; clocks differ by hours
_logger = logging.getLogger(__name__)


def collect_garbage(run: Run, *, grace_s: float = GARBAGE_GRACE_S, keep_quarantined_days: float | None = None) -> list[str]:
    """Delete data without a manifest that no process can still write or read in place; return the ids of their checkpoints.

    An id is garbage when its attempt has committed a later step (an attempt uploads in order, so this one was abandoned or
    pruned), or when its attempt is over (a newer one began, or its outcome is stored) and the data is older than `grace_s`. It
    is none for two days after a copy to this storage has put the checkpoint's mark, which it does every hour. Metadata,
    evaluations and their logs are deleted with the data, or after it. What cannot be deleted is left to the next call, with one
    warning, and does not keep the rest.

    Args:
        run: The run.
        grace_s: The number of seconds that data of an attempt that is over stay, by the storage's clock; a day longer in a run
            to which nothing is written any more.
        keep_quarantined_days: The number of days that the data of a quarantined checkpoint stay, by the same clock, unless it
            is pinned; None keeps them permanently. The note stays in any case.

    Raises:
        StorageError, OSError: If the storage fails at a listing, or at three deletions in a row.

    """
    found = _list_all(run)
    # An object may have a date in the future, such as a file of a machine whose clock was wrong.
    at_least_s = min(found.now_s, time.time())
    data, quarantined, present = found.data, found.quarantined, found.present
    failures = Failures()
    garbage = _delete_data(run, data, (it for it in data if found.is_garbage(it, grace_s)), failures)
    if keep_quarantined_days is not None:
        expired_s = at_least_s - keep_quarantined_days * _DAY_S
        expired = [it for it, since_s in quarantined.items() if it in data and it not in present and since_s <= expired_s]
        garbage += _delete_quarantined(run, expired, data, failures)
    kept = present | (quarantined.keys() & (data.keys() - set(garbage)))
    _delete_left_evaluations(run, found.manifests, failures, kept=kept)
    with failures.note("logs of evaluations"):
        delete_evaluation_logs(run, lambda checkpoint_id: checkpoint_id not in kept and not run.exists(checkpoint_id))
    with failures.note("marks of copies"):
        run.storage.delete(found.stale)
    if found.began_s <= found.now_s - min(grace_s, STALE_S):  # else none of the run's objects is as old as what follows
        _delete_unreported(run, found.newest_over, found.now_s - grace_s, failures)
        with failures.note("empty directories"):
            _remove_emptied(run, data, found.now_s - grace_s)
        with failures.note("marks of deletions"):
            remove_stale_marks(run, at_least_s)
        # It compares with this machine's clock. Where that is ahead of the storage's, files being written would look old.
        with failures.note("temporary files"):
            run.storage.remove_interrupted(f"{run.name}/", grace_s + max(0.0, time.time() - found.now_s))
    _warn(run, failures)
    return garbage


def delete_left_data(run: Run) -> frozenset[str]:
    """Delete all data without a manifest of a run that nobody trains any more; return the ids of those that are read in place.

    Such are also new data, and those of an attempt without an outcome, which `collect_garbage` leaves: they may be committed.

    Raises:
        StorageError, OSError: If some could not be deleted; a repeated call deletes these.

    """
    found, failures = _list_all(run), Failures()
    left = frozenset(filter(found.has_no_manifest, found.data))
    deleted = _delete_data(run, found.data, left, failures)
    _delete_left_evaluations(run, found.manifests, failures, kept=found.present | found.quarantined.keys())
    if failures.noted:
        raise failures.noted[0][1]
    return left.difference(deleted)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the listings of a run show.

    Attributes:
        data: The keys of the data of each checkpoint, committed or not.
        modified_s: When the newest of these data were stored.
        manifests: The keys of the manifests, and of what lies beside them.
        committed: The ids of the committed checkpoints.
        present: These, and the ids of those that are being copied to here.
        stale: The marks of copies that were killed.
        quarantined: When each quarantined checkpoint was quarantined.
        newest_over: The newest attempt that commits nothing more: a newer one has begun, or its outcome is stored.
        began_s: When the oldest claim of an attempt was stored, which is before all else; after a day a claim is stored again.
        now_s: The storage's own clock, taken from its newest object: this machine's may be hours off. Once the newest attempt
            has an outcome, at most a day before this machine's: if nothing is written any more, the storage's stands still.

    """

    data: Mapping[str, Collection[str]]
    modified_s: Mapping[str, float]
    manifests: Collection[str]
    committed: Collection[str]
    present: set[str]
    stale: Collection[str]
    quarantined: Mapping[str, float]
    newest_over: int
    began_s: float
    now_s: float

    def is_garbage(self, checkpoint_id: str, grace_s: float) -> bool:
        """Return whether the data of a checkpoint are garbage; see `collect_garbage`."""
        if not self.has_no_manifest(checkpoint_id):
            return False
        attempt, step = attempt_of(checkpoint_id), step_of(checkpoint_id)
        # Not by the id: a step is reported again after a failed commit, whose manifest is there if only the answer was lost.
        if any(attempt_of(other) == attempt and step_of(other) > step for other in self.committed):
            return True
        return attempt <= self.newest_over and self.modified_s[checkpoint_id] < self.now_s - grace_s

    def has_no_manifest(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is neither committed nor being copied to here, nor quarantined."""
        return is_id(checkpoint_id) and checkpoint_id not in self.present and checkpoint_id not in self.quarantined


def _list_all(run: Run) -> _Found:
    """List what a collection decides by, in the order in which nothing that is committed meanwhile looks like garbage."""
    data, modified_s = _stored_data(run)
    # Listed before and after the manifests: a restore puts the manifest, then removes the note; a quarantine does the opposite.
    quarantined = _quarantined(run)
    # Listed after the data: a checkpoint committed in between is then seen as committed, not as garbage.
    manifests = {info.key: info.modified_s for info in run.storage.list(run.layout.manifests) if is_key(info.key)}
    incoming = [key for key in manifests if key == run.layout.incoming(stem(key))]
    # An incoming checkpoint makes no garbage of others, as a committed one does of earlier steps.
    committed = {it for key in manifests.keys() - set(incoming) if (it := committed_id(run.layout, key)) is not None}
    attempts = list(run.storage.list(run.layout.attempts))
    quarantined |= _quarantined(run)
    # By this machine's clock: in a run to which nothing else is written, the storage's stands still.
    stale = {key for key in incoming if manifests[key] < time.time() - _LONGEST_COPY_S}
    newest = max((attempt_number(info.key) for info in attempts), default=0)
    is_over = newest > 0 and read_outcome(run, newest) is not None  # which is stored once no rank is left
    written_s = [*modified_s.values(), *quarantined.values(), *(info.modified_s for info in attempts)]
    now_s = max([*written_s, time.time() - _DAY_S] if is_over else written_s, default=0.0)
    return _Found(
        data=data,
        modified_s=modified_s,
        manifests=manifests,
        committed=committed,
        present=committed | {stem(key) for key in incoming if key not in stale},
        stale=stale,
        quarantined=quarantined,
        newest_over=newest if is_over else newest - 1,
        began_s=min((info.modified_s for info in attempts), default=0.0),
        now_s=now_s,
    )


def _delete_data(run: Run, data: Mapping[str, Collection[str]], garbage: Iterable[str], failures: Failures) -> list[str]:
    """Delete the data of checkpoints that were never committed, or were pruned by half, and return their ids."""
    deleted = []
    for checkpoint_id in sorted(garbage):
        with failures.note(checkpoint_id):
            if _is_kept(run, checkpoint_id) or is_read(run.storage, data[checkpoint_id]):
                continue
            run.storage.delete([run.layout.metadata(checkpoint_id), *without_targets(run, data[checkpoint_id])])
            if run.exists(checkpoint_id):  # a slow commit saw the data still there, before this deletion ended
                run.storage.delete([run.layout.manifest(checkpoint_id)])
            deleted.append(checkpoint_id)
            _logger.info("removed the data of checkpoint %s of run %r, which was never committed", checkpoint_id, run.name)
    return deleted


def _is_kept(run: Run, checkpoint_id: str) -> bool:
    """Check by key: a listing may have missed a manifest or a note, and a deletion is final."""
    return run.exists(checkpoint_id) or find_size(run.storage, run.layout.quarantine(checkpoint_id)) is not None


def _warn(run: Run, failures: Failures) -> None:
    """Log one warning of all failures, with the first error."""
    if failures.noted:
        _logger.warning(
            "garbage of run %r could not be deleted (%s), and is left to the next prune; the first error: %s",
            run.name,
            show_some([what for what, _ in failures.noted]),
            failures.noted[0][1],
        )


def _stored_data(run: Run) -> tuple[dict[str, set[str]], dict[str, float]]:
    """Return the keys of the data of each checkpoint, committed or not, and when the newest of them was stored."""
    data: dict[str, set[str]] = defaultdict(set)
    modified_s: dict[str, float] = defaultdict(float)
    for info in run.storage.list(run.layout.checkpoints):
        if not is_key(info.key):  # another program's
            continue
        checkpoint_id = info.key.removeprefix(run.layout.checkpoints).partition("/")[0]
        data[checkpoint_id].add(info.key)
        modified_s[checkpoint_id] = max(modified_s[checkpoint_id], info.modified_s)
    return data, modified_s


def _delete_unreported(run: Run, newest_over: int, before_s: float, failures: Failures) -> None:
    """Delete the directories of ranks of attempts that are over, without a write since `before_s`: these ranks were killed."""
    folder = own_folder(run, run.layout.all_unreported)
    if folder is None:
        return
    newest_s: dict[str, float] = defaultdict(float)
    for info in run.storage.list(run.layout.all_unreported):
        if unreported_attempt(run.layout, info.key) <= newest_over:
            name = info.key.removeprefix(run.layout.all_unreported).partition("/")[0]
            newest_s[name] = max(newest_s[name], info.modified_s)
    for name in {*run.storage.folders(run.layout.all_unreported)} - newest_s.keys():  # empty, as between two reports
        if unreported_attempt(run.layout, f"{run.layout.all_unreported}{name}") <= newest_over:
            with suppress(FileNotFoundError):
                newest_s[name] = (folder / name).stat().st_mtime
    for name, modified_s in newest_s.items():
        if modified_s < before_s:  # not by keys: a function may give its files names that are no keys
            # The suppressed error: another process collects garbage, too.
            with failures.note(f"unreported/{name}"), suppress(FileNotFoundError):
                (remove_tree if (folder / name).is_dir() else os.unlink)(folder / name)
    with suppress(OSError):  # it still holds directories of live ranks
        folder.rmdir()


def _remove_emptied(run: Run, data: Collection[str], before_s: float) -> None:
    """Remove directories of checkpoints that a deletion emptied, but was killed before it could remove them."""
    folder = own_folder(run, run.layout.checkpoints)
    if folder is None:
        return
    for checkpoint_id in set(filter(is_id, run.storage.folders(run.layout.checkpoints))) - set(data):
        with suppress(OSError):  # something is in it, or another process has removed it
            folders = _with_all_below(folder / checkpoint_id)
            if all(place.stat().st_mtime < before_s for place in folders):
                for place in reversed(folders):
                    place.rmdir()


def _with_all_below(folder: Path) -> list[Path]:
    """Return a directory and those below it, at any depth, each before those in it."""
    found = [folder]
    for place in found:
        with os.scandir(place) as entries:
            found += [place / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _quarantined(run: Run) -> dict[str, float]:
    """Return when each quarantined checkpoint was quarantined, by the storage's clock."""
    return {stem(info.key): info.modified_s for info in run.storage.list(run.layout.quarantined)}


def _delete_quarantined(run: Run, expired: Iterable[str], data: Mapping[str, Collection[str]], failures: Failures) -> list[str]:
    """Delete the data of expired checkpoints that are neither pinned nor restored, and return their ids."""
    deleted = []
    for checkpoint_id in sorted(expired):
        with failures.note(checkpoint_id):
            with marked(run, [checkpoint_id]) as mark:
                mark.renew()
                if checkpoint_id in mark.pinned() or run.exists(checkpoint_id):
                    continue
                with mark.holding():
                    run.storage.delete([run.layout.metadata(checkpoint_id), *without_targets(run, data[checkpoint_id])])
            deleted.append(checkpoint_id)
            _logger.info("removed the data of checkpoint %s of run %r: its time in quarantine is over", checkpoint_id, run.name)
    return deleted


def _delete_left_evaluations(run: Run, keys: Iterable[str], failures: Failures, *, kept: Collection[str]) -> None:
    """Delete those evaluations among `keys` whose checkpoint is gone, for example pruned while they were written."""
    left: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        if (evaluation := evaluation_of(run.layout, key)) is not None and evaluation[0] not in kept:
            left[evaluation[0]].append(key)
    for checkpoint_id, attached in left.items():
        with failures.note(f"evaluations of {checkpoint_id}"):
            if not run.exists(checkpoint_id):  # it may have been committed during the listing
                run.storage.delete(attached)
