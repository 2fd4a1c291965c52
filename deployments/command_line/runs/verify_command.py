"""`verify`: whether the stored files are those that were committed."""

from dataclasses import asdict, dataclass
from typing import Any

import click
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore, UnsupportedFormatError
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.deployments.command_line.arguments import (
    json_option,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import note, print_json, print_table

from .progress import in_thread, progress_bar
from .selection import find_checkpoint, open_training

_AT_ONCE = 4  # checkpoints; of each, eight files


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for a checkpoint; the fields are keys of `verify --json`."""

    id: str
    whole: bool
    damage: str | None


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="[ID]", required=False)
@click.option(
    "--level",
    type=click.Choice(["size", "digest"]),
    default="digest",
    show_default=True,
    help="Compare only sizes, by a listing, or also digests, by reading every byte.",
)
@metric_option
@order_option
@json_option
def verify(storage: str, run: str, checkpoint: str | None, level: Any, metric: str | None, order: Any, as_json: bool) -> None:
    """Verify checkpoints, and name the damage.

    Verifies one checkpoint of RUN, or all; exits with 1 if one is damaged. Nothing is changed: the next start of the training
    quarantines a damaged checkpoint and resumes from the previous one.

    \b
    --json: a list of
      id, level, whole (true or false),
      damage (the first in the checkpoint, or null)
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_training(storage, run)
    ids = _all_ids(store) if checkpoint is None else [find_checkpoint(store, checkpoint, metric, order).id]
    verdicts = in_thread(lambda: _verify_all(store, ids, level))
    if as_json:
        print_json([{"level": level, **asdict(verdict)} for verdict in verdicts])
    elif verdicts:
        print_table(
            ["id", level, "damage"],
            ([it.id, ("whole", "green") if it.whole else ("damaged", "bold red"), it.damage or ""] for it in verdicts),
        )
    damaged = [verdict for verdict in verdicts if not verdict.whole]
    if damaged:
        first = damaged[0]
        raise CheckpointCorruptError(
            f"{len(damaged)} of {len(verdicts)} checkpoints damaged, the first is {first.id}: {first.damage}; use another one"
        )


def _all_ids(store: CheckpointStore) -> list[str]:
    """Return the ids of all checkpoints, including those whose manifest exists but is not listed, such as a link."""
    listed = set(store.ids())
    with_data = {folder for folder in store.storage.folders(store.layout.checkpoints) if is_id(folder)}
    return sorted([*listed, *(it for it in with_data - listed if _has_manifest(store, it))])


def _has_manifest(store: CheckpointStore, checkpoint_id: str) -> bool:
    try:
        return store.exists(checkpoint_id)
    except PermissionError:
        return True


def _verify_all(store: CheckpointStore, ids: list[str], level: Any) -> list[Verified]:
    """Verify some checkpoints at the same time, each several files at once: small ones are mostly waiting."""
    with progress_bar("verifying", len(ids), unit="checkpoints") as bar:

        def verify_one(checkpoint_id: str) -> Verified | None:
            try:
                return _verify_one(store, checkpoint_id, level)
            except (CheckpointNotFoundError, UnsupportedFormatError) as exc:
                if len(ids) == 1:
                    raise
                note(f"left out: {exc}" if isinstance(exc, UnsupportedFormatError) else f"{checkpoint_id} was pruned meanwhile")
                return None
            finally:
                bar(1)

        return [verdict for verdict in for_each(ids, verify_one, _AT_ONCE) if verdict is not None]


def _verify_one(store: CheckpointStore, checkpoint_id: str, level: Any) -> Verified:
    try:
        store.verify(store.committed(checkpoint_id), level)
    except CheckpointCorruptError as exc:
        return Verified(checkpoint_id, whole=False, damage=str(exc))
    except PermissionError as exc:
        if exc.errno is not None or store.storage.local_path(store.run) is None:
            raise
        return Verified(checkpoint_id, whole=False, damage=str(exc))  # a link that leads out of the storage
    return Verified(checkpoint_id, whole=True, damage=None)
