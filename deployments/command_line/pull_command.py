"""`pull`: a whole checkpoint, verified, in a directory of one's own."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import click
from prefect_torch.ckpt import Checkpoint
from prefect_torch.ckpt.wording import show_bytes

from .parameters import metric_option, order_option, run_argument, storage_argument
from .progress import progress_bar
from .selection import find_checkpoint, open_run
from .terminal import note, say, show_count

_LOOK_EVERY_S = 0.1
_INTERRUPTED = 130


@click.command
@storage_argument
@run_argument
@click.argument("names", metavar="[ID] DIRECTORY", nargs=-1)
@metric_option
@order_option
@click.option("--force", is_flag=True, help="Into a directory that holds something: replaces what has the same name.")
def pull(storage: str, run: str, names: tuple[str, ...], metric: str | None, order: Any, force: bool) -> None:
    """Copy a checkpoint to a directory.

    That of ID, or the latest of RUN, to DIRECTORY, which is made if missing. Every byte is verified on the way. The files
    appear together at the end: an interrupted or failed pull leaves none.
    """
    if len(names) not in (1, 2):
        raise click.UsageError("give DIRECTORY, or ID and DIRECTORY")
    *chosen, directory = names
    target = Path(directory).expanduser()
    if not force and target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: give another directory, or --force to write into it")
    store = open_run(storage, run)
    manifest = find_checkpoint(store, chosen[0] if chosen else "latest", metric, order)
    _pull(store.checkpoint(manifest), manifest.total_bytes, target)
    files = show_count(len(manifest.files), "file")
    say(f"{manifest.id}, step {manifest.step}: {files}, {show_bytes(manifest.total_bytes)}, in {target}")


def _pull(checkpoint: Checkpoint, total_bytes: int, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=".prefect-torch-pull-", dir=target))  # in there, so that a rename is enough
    try:
        _download(checkpoint, total_bytes, partial)
        _move_all(partial, target)
    except KeyboardInterrupt:
        shutil.rmtree(partial, ignore_errors=True)
        note("prefect-torch: interrupted; nothing was pulled")
        os._exit(_INTERRUPTED)  # threads that download know no way to be stopped, and an exit would wait for them
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(checkpoint: Checkpoint, total_bytes: int, partial: Path) -> None:
    with progress_bar("pulling", total_bytes, unit="bytes") as bar:
        pool = ThreadPoolExecutor(1, "prefect-torch-pull")  # not as a context, which would wait for it after Ctrl-C
        done = pool.submit(checkpoint.to_directory, partial)
        shown = 0
        while not wait([done], _LOOK_EVERY_S).done:
            there = _bytes_below(partial)
            bar(there - shown)
            shown = there
        done.result()
        bar(total_bytes - shown)
        pool.shutdown()


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(f"{parent}/{name}").st_size  # noqa: PTH116 - many small ones, ten times a second
            except FileNotFoundError:  # renamed since
                continue
    return total


def _move_all(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
