"""What a report of a directory costs on a local disk, beside what one would write by hand.

    python tests/benchmarks/directories.py [--mebibytes 512] [--files 10000] [--repeats 7] [--folder DISK]

One rank. All ways take turns, each after a sync of the filesystem; the first turn is not counted. A ratio is the median, over
the turns, of a way's time by that of the way it is compared with in the same turn. Many small files stay until the end: for
some seconds ext4 passes over the inodes of deleted files, one by one, so that whoever creates files next pays for a deletion.
The result is written to tests/benchmarks/results/directories.txt.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import torch  # noqa: E402 - here and below: found by the line above
from prefect_torch.ckpt import Checkpoint, CheckpointStore, RetentionPolicy  # noqa: E402
from prunes import prune_as_leader  # noqa: E402
from ranks import Attempt  # noqa: E402
from result_file import spread, write_results  # noqa: E402

BY_HAND = "torch.save + copy + fsync"
COPIED = "cp -r + sync"
LEGEND = "min, median and max in ms; ratio: the median of the ratios in the same turn"


class Reports:
    """Reports into a storage below `folder`, of which the newest checkpoint is kept."""

    def __init__(self, folder):
        self.folder = folder
        self.store = CheckpointStore.open(str(folder / "store"), "run")
        self.session = Attempt(self.store).session()

    def report(self, directory, upload="sync"):
        self.session.report({"loss": 1.0}, Checkpoint.from_directory(directory), upload=upload)

    def settle(self, prune=True):
        self.session.wait_for_commits()
        if prune:
            prune_as_leader(self.store, RetentionPolicy(1))


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def large(reports, mebibytes):
    """Return the ways to save one state as one file, by name; each is called with an empty directory."""
    state = {str(number): torch.randn(mebibytes * 2**15) for number in range(8)}

    def by_hand(folder):
        torch.save(state, folder / "model.pt")
        stored = folder / "stored"
        shutil.copyfile(folder / "model.pt", stored)
        sync(stored)
        sync(folder)

    def synced(folder):
        torch.save(state, folder / "model.pt")
        sync(folder / "model.pt")
        sync(folder)

    def reported(folder, upload):
        torch.save(state, folder / "model.pt")
        reports.report(folder, upload)

    def lent(upload):
        with reports.session.lent.lend() as folder:
            reported(folder, upload)

    return {
        BY_HAND: by_hand,
        "torch.save": lambda folder: torch.save(state, folder / "model.pt"),
        "torch.save + fsync": synced,
        "report, sync": lambda folder: reported(folder, "sync"),
        "report, async": lambda folder: reported(folder, "async"),
        "checkpoint_directory, sync": lambda _: lent("sync"),
        "checkpoint_directory, async": lambda _: lent("async"),
    }


def small(reports, num_files):
    """Return the ways to store many files of 1 KB that exist, by name."""
    source = reports.folder / "small"
    source.mkdir()
    for number in range(num_files):
        (source / f"{number:06d}").write_bytes(os.urandom(1000))

    def copied(folder):
        subprocess.run(["cp", "-r", source, folder / "copy"], check=True)
        subprocess.run(["sync", "-f", folder], check=True)

    return {COPIED: copied, "report, sync": lambda _: reports.report(source)}


def measure(reports, ways, repeats, keep=False):
    """Return the seconds of each way, turn by turn; `keep` deletes nothing that they wrote."""
    taken = defaultdict(list)
    for turn in range(repeats + 1):
        for name, way in ways.items():
            folder = tempfile.mkdtemp(dir=reports.folder)
            subprocess.run(["sync", "-f", folder], check=True)
            started_s = time.perf_counter()
            way(Path(folder))
            taken_s = time.perf_counter() - started_s
            reports.settle(prune=not keep)
            if not keep:
                shutil.rmtree(folder)
            if turn:
                taken[name].append(taken_s)
    return taken


def rows(taken, compared_with):
    for name, seconds in taken.items():
        ratio = statistics.median(own / other for own, other in zip(seconds, taken[compared_with], strict=True))
        low, middle, high = (value * 1e3 for value in spread(seconds))
        yield f"{name:28} {low:8.0f} {middle:8.0f} {high:8.0f} {ratio:7.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        reports = Reports(Path(folder))
        of_large = measure(reports, large(reports, options.mebibytes), options.repeats)
        of_small = measure(reports, small(reports, options.files), options.repeats, keep=True)
        reports.session.finish()
    head = f"{'':28} {'min':>8} {'median':>8} {'max':>8} {'ratio':>7}"
    lines = [
        *(LEGEND, "", f"one file of {options.mebibytes} MiB, to {BY_HAND!r}:", head, *rows(of_large, BY_HAND)),
        *("", f"{options.files} files of 1 KB, to {COPIED!r}:", head, *rows(of_small, COPIED)),
    ]
    write_results("directories.txt", options.repeats, lines)


if __name__ == "__main__":
    main()
