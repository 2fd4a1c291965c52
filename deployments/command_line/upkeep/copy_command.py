"""`copy`: a run, or one of its checkpoints, to another storage."""

from typing import Any

import click
from prefect_torch.ckpt import CheckpointStore, Manifest
from prefect_torch.ckpt.runs.whole.copying import check_same_run, copy_planned, plan_copy
from prefect_torch.ckpt.runs.whole.trials import is_sweep, trials_of
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.text import show_bytes, show_count, show_some
from prefect_torch.deployments.command_line.arguments import (
    metric_option,
    open_named_storage,
    order_option,
    refuse_checkpoint_as_place,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.runs.progress import in_thread, progress_bar
from prefect_torch.deployments.command_line.runs.selection import find_checkpoint, open_run, open_training
from prefect_torch.deployments.command_line.terminal import INTERRUPTED, note, say

from .live_runs import check_not_live, ended_option


@click.command
@storage_argument
@run_argument
@click.argument("names", metavar="[ID] TARGET", nargs=-1)
@metric_option
@order_option
@ended_option
def copy(storage: str, run: str, names: tuple[str, ...], metric: str | None, order: Any, ended: bool) -> int:
    """Copy a run, or one of its checkpoints, to another storage.

    TARGET is a storage, in which the run has the same name. Files and manifests are compared with their digests on their way,
    other records with their sizes. Each manifest is copied after its data: an interrupted copy leaves no incomplete checkpoint,
    and the same command continues it. A run that is being trained is refused, unless one checkpoint ID is copied. A sweep is
    copied with its trials. The source stays. Costs reading and writing everything once; through this machine's temporary
    directory, unless the source is a directory here. Exits with 1 if a manifest cannot be read, after all other checkpoints
    are copied.
    """
    if len(names) not in (1, 2):
        raise click.UsageError("give TARGET, or ID and TARGET")
    *chosen, place = names
    if not chosen:
        refuse_checkpoint_as_place(place, "TARGET")
    store = open_training(storage, run) if chosen else open_run(storage, run)
    is_whole_sweep = not chosen and is_sweep(store)
    trials = trials_of(store) if is_whole_sweep else []
    stores = [store, *trials]
    if not chosen:
        for_each(stores, lambda each: check_not_live(each, "copy", has_ended=ended))
    target = open_named_storage(place)
    for_each(stores, lambda each: check_same_run(each, target))
    left_out: list[str] = []
    if is_whole_sweep:
        count = show_count(len(trials), "trial")
        of_trials = in_thread(lambda: for_each(trials, lambda it: plan_copy(it, _readable(it, left_out), whole=True)))
        plans = [plan_copy(store, (), whole=True), *of_trials]
    else:
        manifests = [find_checkpoint(store, chosen[0], metric, order)] if chosen else _readable(store, left_out)
        count, plans = show_count(len(manifests), "checkpoint"), [plan_copy(store, manifests, whole=not chosen)]
    size = sum(plan.bytes for plan in plans)
    try:
        with progress_bar("copying", size, unit="bytes") as bar:
            copied = in_thread(lambda: sum(copy_planned(plan, store.storage, target, bar) for plan in plans))
    except KeyboardInterrupt:
        note("prefect-torch: interrupted; the same command continues")
        return INTERRUPTED
    there = show_bytes(size - copied)
    say(
        f"{count} of run {run} in {target.url}: {show_bytes(copied)} copied" + (f", {there} was there" if size > copied else "")
    )
    if left_out:
        note(f"prefect-torch: not copied, since this version cannot read their manifests: {show_some(sorted(left_out))}")
    return 1 if left_out else 0


def _readable(store: CheckpointStore, left_out: list[str]) -> list[Manifest]:
    """Return the manifests of a run that can be read; add the other checkpoints, each with its run, to `left_out`."""
    listed = list(store.ids())
    manifests = store.list()
    unread = sorted(set(listed) - {it.id for it in manifests})
    left_out.extend(f"{store.run} {it}" for it in unread if store.exists(it))  # else it was pruned meanwhile
    return manifests
