"""`delete`: a run, or one of its checkpoints, for good."""

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import click
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore, FileEntry, Manifest
from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.manifest import attempt_of, is_id, step_of
from prefect_torch.ckpt.runs.run import pinned_among
from prefect_torch.ckpt.runs.whole.deletion import check_holds_no_other, check_unpinned, delete_run
from prefect_torch.ckpt.runs.whole.trials import is_sweep, pin_token_of, trials_of
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.local_files.readers import is_read
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import show_bytes, show_count
from prefect_torch.deployments.command_line.arguments import metric_option, order_option, run_argument, storage_argument
from prefect_torch.deployments.command_line.confirmation import agrees_to_delete, yes_option
from prefect_torch.deployments.command_line.runs.selection import find_checkpoint, open_run, open_training
from prefect_torch.deployments.command_line.terminal import say

from .live_runs import check_not_live, ended_option


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="[ID]", required=False)
@yes_option
@metric_option
@order_option
@ended_option
def delete(storage: str, run: str, checkpoint: str | None, metric: str | None, order: Any, yes: bool, ended: bool) -> int:
    """Delete a run, or one of its checkpoints.

    Asks before. Refuses a run that is being trained, pinned checkpoints, and a run that a process of this machine reads. With a
    sweep its trials are deleted, if none of them is refused. Of a checkpoint whose manifest is damaged, ID is the whole id.
    Manifests are deleted before data, so an interrupted deletion leaves whole checkpoints and garbage; repeat the command.
    """
    if checkpoint is None and (metric or order):
        raise click.UsageError("--metric and --order are of a checkpoint, such as best: give its ID")
    store = open_run(storage, run) if checkpoint is None else open_training(storage, run)
    stores = [*(trials_of(store) if is_sweep(store) else ()), store]

    def check_none_live() -> None:
        for_each(stores, lambda each: check_not_live(each, "delete", has_ended=ended))

    def agrees(what: str) -> bool:
        if not agrees_to_delete(what, yes=yes):
            return False
        if not yes:  # a training may have begun while the question waited
            check_none_live()
        return True

    check_none_live()
    if checkpoint is not None:
        return _delete_checkpoint(store, _find_checkpoint(store, checkpoint, metric, order), agrees)
    return _delete_runs(stores, agrees)


def _find_checkpoint(store: CheckpointStore, text: str, metric: str | None, order: Any) -> Manifest:
    """Return the checkpoint that `text` names; if it is the whole id, also one whose manifest is damaged, as it is listed.

    Or one of which a deletion that was interrupted has left the data.
    """
    try:
        return find_checkpoint(store, text, metric, order)
    except CheckpointNotFoundError:
        if not is_id(text) or not _is_left(store, text):
            raise
    except MalformedRecordError:  # another program's object
        raise
    except CheckpointCorruptError:
        if not is_id(text):
            raise
    data = store.layout.data(text)
    files = tuple(FileEntry(key.removeprefix(data), size, "", 0) for key, size in sorted(store.sizes(data).items()))
    return Manifest(text, step_of(text), attempt_of(text), {}, files, 0, None, datetime.now(timezone.utc))


def _is_left(store: CheckpointStore, checkpoint_id: str) -> bool:
    """Return whether a checkpoint without a manifest has data, and is neither in quarantine nor being copied to here."""
    notes = (store.layout.quarantine(checkpoint_id), store.layout.incoming(checkpoint_id))
    is_noted = any(find_size(store.storage, note) is not None for note in notes)
    return not is_noted and bool(store.keys(store.layout.data(checkpoint_id)))


def _delete_checkpoint(store: CheckpointStore, manifest: Manifest, agrees: Callable[[str], bool]) -> int:
    check_unpinned(store, store.pinned() & {manifest.id})
    if not agrees(f"checkpoint {manifest.id}, step {manifest.step}, {show_bytes(manifest.total_bytes)}"):
        return 1
    check_unpinned(store, delete_checkpoints(store, [manifest]))
    say(f"deleted {manifest.id}")
    return 0


def _delete_runs(stores: Sequence[CheckpointStore], agrees: Callable[[str], bool]) -> int:
    """Delete a run, the last one, after those of its trials if it is a sweep; all are checked before the first is deleted."""
    *trials, store = stores
    # A trial that began from another's checkpoint, and failed, keeps that pinned: it may be started again.
    of_trials = tuple(f".{pin_token_of(trial.run)}.json" for trial in trials)

    def check(each: CheckpointStore) -> None:
        check_unpinned(each, pinned_among(key for key in each.keys(each.layout.pins) if not key.endswith(of_trials)))

    for_each(stores, check)
    infos = {info.key: info.bytes for info in store.storage.list(f"{store.run}/") if is_key(info.key)}
    check_holds_no_other(stores, infos)
    folders = tuple(each.layout.checkpoints for each in stores)
    if is_read(store.storage, [key for key in infos if key.startswith(folders)]):
        raise BlockingIOError(f"a process of this machine reads a checkpoint of run {store.run!r}: end it first")
    checkpoints = show_count(sum(for_each(stores, lambda each: len(list(each.ids())))), "checkpoint")
    what = f"sweep {store.run} with {show_count(len(trials), 'trial')} and" if trials else f"run {store.run} with"
    if not agrees(f"{what} {checkpoints}, {show_bytes(sum(infos.values()))}"):
        return 1
    pins = tuple(each.layout.pins for each in trials)
    store.storage.delete([key for key in infos if key.startswith(pins) and key.endswith(of_trials)])
    for_each(trials, delete_run)
    delete_run(store)
    say(f"deleted run {store.run}")
    return 0
