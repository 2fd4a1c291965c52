"""`pull`: a verified copy of a checkpoint, or of a part of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit
from prefect_torch.ckpt import CheckpointStore, Manifest
from prefect_torch.ckpt.files.folder import USER_METADATA_FILE, remove_metadata
from prefect_torch.ckpt.files.selection import choose_files
from prefect_torch.ckpt.files.target_directory import move_all, plan_moves
from prefect_torch.ckpt.storage.machine.scratch import scratch_folder, sweep_scratch
from prefect_torch.ckpt.text import show_bytes, show_count
from prefect_torch.deployments.command_line.arguments import (
    metric_option,
    order_option,
    refuse_checkpoint_as_place,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import INTERRUPTED, note, say

from .progress import in_thread, progress_bar
from .selection import find_checkpoint, open_training

_BLOCK_BYTES = 512  # the unit of st_blocks (man 2 stat)
_WHOLE = "model.safetensors"


@click.command
@storage_argument
@run_argument
@click.argument("names", metavar="[ID] DIRECTORY", nargs=-1)
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help='Only files that match, as "*.pt", or a directory; may be repeated.',
)
@click.option("--consolidate", is_flag=True, help=f"Only the model of a reported state, unsharded, as one file {_WHOLE}.")
@click.option("--key", metavar="NAME", help='The key of the state to consolidate; "model" if not given.')
@metric_option
@order_option
@click.option("--force", is_flag=True, help="Allow a directory that is not empty, and replace files of the same name.")
def pull(
    storage: str,
    run: str,
    names: tuple[str, ...],
    include: tuple[str, ...],
    consolidate: bool,
    key: str | None,
    metric: str | None,
    order: Any,
    force: bool,
) -> None:
    """Copy a checkpoint to a directory.

    Copies checkpoint ID, or the latest of RUN, to DIRECTORY, which is created if missing. Every byte is verified. The files
    appear together at the end: an interrupted or failed pull leaves none, unless it ends while they are moved there.

    With --consolidate, the shards of the model from all ranks become one safetensors file, with little memory. DIRECTORY may
    then be the file itself, with a name that ends in ".safetensors".
    """
    if len(names) not in (1, 2):
        raise click.UsageError("give DIRECTORY, or ID and DIRECTORY")
    if include and consolidate:
        raise click.UsageError("--consolidate selects its files itself: give it without --include")
    if key is not None and not consolidate:
        raise click.UsageError("--key is an option of --consolidate: give both")
    *chosen, directory = names
    if not chosen:
        refuse_checkpoint_as_place(directory, "DIRECTORY")
    if not directory:
        raise click.UsageError('DIRECTORY is empty: give "." for the working directory')
    target = Path(directory).expanduser()
    file = (target if target.suffix == ".safetensors" else target / _WHOLE) if consolidate else None
    _check_free(target, file, force=force)
    store = open_training(storage, run)
    manifest = find_checkpoint(store, chosen[0] if chosen else "latest", metric, order)
    if file is None:
        _pull_files(store, manifest, include or None, target)
    else:
        _pull_consolidated(store, manifest, key or "model", file)


def _check_free(target: Path, file: Path | None, *, force: bool) -> None:
    if force:
        return
    if file is not None and file.exists():
        raise FileExistsError(f"{file} exists: give another name, or --force to replace it")
    sweep_scratch(target)  # a container that was ended during a pull is started again with its volume
    if file is None and target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: give another directory, or --force to write into it")


def _pull_files(store: CheckpointStore, manifest: Manifest, include: tuple[str, ...] | None, target: Path) -> None:
    files = choose_files(manifest, include, None, store.path_of(manifest.id))
    total_bytes = sum(entry.bytes for entry in files)
    checkpoint = store.checkpoint(manifest)
    placed = _pull(target, total_bytes, lambda partial: checkpoint.to_directory(partial, include=include))
    if target / USER_METADATA_FILE not in placed:
        remove_metadata(target)
    say(f"{_named(manifest)}: {show_count(len(files), 'file')}, {show_bytes(total_bytes)}, in {target}")


def _pull_consolidated(store: CheckpointStore, manifest: Manifest, key: str, file: Path) -> None:
    checkpoint = store.checkpoint(manifest)
    _pull(file.parent, manifest.total_bytes, lambda partial: checkpoint.to_safetensors(partial / file.name, key=key))
    say(f"{_named(manifest)}: {key!r}, {show_bytes(file.stat().st_size)}, in {file}")


def _named(manifest: Manifest) -> str:
    return f"{manifest.id}, step {manifest.step}"


def _pull(target: Path, total_bytes: int, write: Callable[[Path], object]) -> list[Path]:
    """Call `write` with a temporary directory, move its files into `target` at the end, and return their places there."""
    target.mkdir(parents=True, exist_ok=True)
    left = "nothing was pulled"
    try:
        with scratch_folder(target) as partial:  # inside the target, so that a rename is enough
            _show_progress(partial, total_bytes, write)
            moves = plan_moves(partial, target)
            left = f"some of the files may be in {target}: pull again with --force"
            move_all(moves)
            return [place for _, place in moves]
    except KeyboardInterrupt:
        note(f"prefect-torch: interrupted; {left}")
        raise Exit(INTERRUPTED) from None


def _show_progress(partial: Path, total_bytes: int, write: Callable[[Path], object]) -> None:
    with progress_bar("pulling", total_bytes, unit="bytes") as bar:
        shown = 0

        def show(written: int) -> None:
            nonlocal shown
            bar(written - shown)
            shown = written

        in_thread(lambda: write(partial), lambda: show(_bytes_below(partial)))
        show(total_bytes)


def _bytes_below(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.stat(f"{parent}/{name}")  # noqa: PTH116 - many calls, ten times a second
            except FileNotFoundError:  # renamed meanwhile
                continue
            total += min(status.st_size, status.st_blocks * _BLOCK_BYTES)  # a consolidated file has its full size at first
    return total
