"""What a checkpoint costs a training, ours and others', on the same state, with the same steps, in the same run.

    python tests/benchmarks/state [--sizes 64 512 2048] [--peers NAME ...] [--places disk rclone sink] [--device cuda] [--quick]

Two ranks as processes, gloo, one thread each; a replicated model with AdamW, as under DDP; a step is a number of matmuls, the
same everywhere. Every way runs in gangs of its own; all take turns, and again while there is time. S3 is measured at 512 MiB:
`rclone serve s3`, and a server that keeps nothing and answers after 50 ms; "-" there stands for ways that cannot write to S3,
or for what cannot be read again. A resumed state is compared with the saved one, by a checksum of every tensor. Prints a table
and how our targets were met; a run of everything is written to tests/benchmarks/results/state.txt. --quick runs one way at
64 MiB, without other libraries. --device cuda measures a state of 7 GiB on a GPU that both ranks share, on disk, and writes
tests/benchmarks/results/state_gpu.txt.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers"), str(HERE.parents[1] / "support")]

import gang  # noqa: E402 - here and below: found by the line above
import places  # noqa: E402
import torch  # noqa: E402
from plan import Plan  # noqa: E402
from result_file import write_results  # noqa: E402
from table import HEAD, LEGEND, Row, summarize  # noqa: E402
from targets import WHY_MISSED, judge  # noqa: E402
from training import matmuls_in  # noqa: E402
from ways import QUICK, WAYS  # noqa: E402

STEP_S = 0.1
SIZES = {"cpu": [64, 512, 2048], "cuda": [7168]}
SIZE_ON_S3 = 512
MOST_TURNS = 4


@dataclass(frozen=True)
class Block:
    """One size in one place: rows that are compared with each other."""

    mebibytes: int
    where: str
    rounds: int = 4
    device: str = "cpu"


class Measured:
    """All that was measured of one block, way by way, in any number of turns."""

    def __init__(self, block, ways):
        self._block, self._ways = block, ways
        self._saves, self._resumes, self._problems = defaultdict(list), defaultdict(list), {}
        self.turns = 0
        self.turn_s = 0.0

    def take_turn(self, matmuls, parent):
        """Measure every way once more; resuming only in the first turn."""
        started_s = time.monotonic()
        for name in self._ways:
            if self._block.where != "disk" and not WAYS[name].is_on_s3:
                self._problems[name] = "-"
            if self._block.device != "cpu" and not WAYS[name].is_on_gpu:
                self._problems[name] = "-"
            if name not in self._problems:
                try:
                    self._measure(name, matmuls, parent)
                except gang.GangError as exc:
                    self._problems[name] = f"failed: {str(exc).splitlines()[-1]}"
                    print(f"{name}:\n{exc}", file=sys.stderr)
        self.turns += 1
        self.turn_s = time.monotonic() - started_s

    def rows(self):
        block = self._block
        return [
            Row(block.mebibytes, block.where, name, problem=self._problems[name])
            if name in self._problems
            else summarize(block.mebibytes, block.where, name, self._saves[name], self._resumes[name])
            for name in self._ways
        ]

    def _measure(self, name, matmuls, parent):
        block = self._block
        with places.scratch(parent) as folder, places.PLACES[block.where](folder) as place:
            files = folder / "gang"
            files.mkdir()
            plan = Plan(name, "save", block.mebibytes, block.rounds, matmuls, block.where, place.url, str(files), block.device)
            self._saves[name].append(gang.run(plan, place.environment))
            if place.keeps and not self.turns:
                self._resumes[name].append(gang.run(plan.resuming(), place.environment))


def blocks_of(options):
    if options.quick:
        return [Block(64, "disk", 2)]
    blocks = [Block(size, "disk", device=options.device) for size in options.sizes]
    if options.device == "cpu":
        blocks += [Block(SIZE_ON_S3, "rclone"), Block(SIZE_ON_S3, "sink")]
    return [block for block in blocks if block.where in options.places]


def measure_all(options, matmuls, ends_at_s):
    """Measure every block once, then again, those first that take least, as often as the time allows."""
    measured = [Measured(block, options.peers) for block in blocks_of(options)]
    for of_block in measured:
        of_block.take_turn(matmuls, options.folder)
        print("\n".join(row.text for row in of_block.rows()), flush=True)
    waiting = [] if options.quick else [*measured]
    while waiting := [it for it in waiting if it.turns < MOST_TURNS and time.monotonic() + it.turn_s < ends_at_s]:
        min(waiting, key=lambda it: (it.turns, it.turn_s)).take_turn(matmuls, options.folder)
    return measured


def report_of(blocks, options, minutes, turns):
    rows = [row for rows in blocks for row in rows]
    steps_s = [row.step for row in rows if row.step is not None]
    return [
        f"torch {torch.__version__}" + ("" if options.device == "cpu" else f", {torch.cuda.get_device_name()}"),
        f"{minutes:.0f} min, at most {turns} turns",
        f"a step took {min(steps_s, default=0) * 1e3:.0f} to {max(steps_s, default=0) * 1e3:.0f} ms",
        *("", HEAD, *(row.text for row in rows), "", LEGEND, "", "What is sure once it is durable:"),
        *(f"{name:22} {WAYS[name].gives}" for name in options.peers),
        *("", "Targets of the async report of a state:", *(line for of_block in blocks for line in judge(of_block))),
        *("", WHY_MISSED),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="MiB, on local disk")
    parser.add_argument("--peers", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME", help=", ".join(WAYS))
    parser.add_argument("--places", nargs="+", choices=list(places.PLACES), default=list(places.PLACES))
    parser.add_argument("--device", choices=list(SIZES), default="cpu", help="where the state lies")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--minutes", type=float, default=24, help="begin no further repetition that would take longer")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.sizes = options.sizes or SIZES[options.device]
    if options.quick:
        options.peers = [name for name in QUICK if name in options.peers]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks and files are cleaned up, as on Ctrl-C
    started_s = time.monotonic()
    matmuls = matmuls_in(STEP_S / 10 if options.quick else STEP_S, options.device)
    print(HEAD, flush=True)
    measured = measure_all(options, matmuls, started_s + options.minutes * 60)
    blocks = [of_block.rows() for of_block in measured]
    turns = max(it.turns for it in measured)
    report = report_of(blocks, options, (time.monotonic() - started_s) / 60, turns)
    everything = (SIZES[options.device], list(WAYS), list(places.PLACES))
    if not options.quick and (options.sizes, options.peers, options.places) == everything:
        write_results("state.txt" if options.device == "cpu" else "state_gpu.txt", turns, report)
    else:
        print("\n".join(["", *report]))
    return 1 if any(row.problem not in ("", "-") for rows in blocks for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
