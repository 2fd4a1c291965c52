"""What the integrations add to a training, beside the bare framework on the same training in the same processes.

    python tests/benchmarks/integrations.py [--rounds 6]

Two ranks on this machine, gloo, one thread each; a classifier of scikit-learn's digits with Adam, 26 MB of state. A step is the
time from one forward pass to the next, everything between them included. Bare and ours take turns.

    bare, ours    the middle step without a checkpoint, milliseconds; ours asks at every step whether one is wanted, and logs
    added         how much longer ours is: below some per cent, this is the machine's noise
    inside        the share of a step that the training was in our code, timed there, the slower rank, its waits for the other
                  included; from step 20 on: before, the pace of the loop is not known, and each step asks by itself
    stall         the step with a checkpoint less the middle step, milliseconds, the slower rank: the framework's own to a local
                  disk (not synced), ours with upload="sync" (durable on return) and "async"

Prints the table and writes it to tests/benchmarks/results/integrations.txt.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import torch  # noqa: E402 - here and below: found by the line above
from rank_processes import launch  # noqa: E402
from result_file import write_results  # noqa: E402

FRAMEWORKS = ["PyTorch", "Lightning", "Transformers", "Accelerate"]
HEAD = f"{'':14} {'bare ms':>9} {'ours ms':>9} {'added':>8} {'inside':>8} {'stall bare':>11} {'sync':>8} {'async':>8}"


def line_of(framework, ranks):
    def slowest(kind):
        return max(statistics.median(rank[kind]) for rank in ranks) * 1e3

    bare, ours = slowest("bare"), slowest("ours")
    own, in_sync, in_async = (slowest(f"stall {kind}") for kind in ("bare", "sync", "async"))
    inside = slowest("inside") / bare
    shares = f"{ours / bare - 1:>+8.1%} {inside:>8.2%}"
    return f"{framework:14} {bare:>9.2f} {ours:>9.2f} {shares} {own:>11.1f} {in_sync:>8.1f} {in_async:>8.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="how often bare and ours take turns")
    options = parser.parse_args()
    print(HEAD, flush=True)
    lines = []
    for framework in FRAMEWORKS:
        with tempfile.TemporaryDirectory() as folder:
            codes = launch(HERE / "integrations_rank.py", [framework, str(options.rounds), folder], 2, folder)
            if codes != [0, 0]:
                return 1
            ranks = [json.loads(Path(folder, f"measured-{rank}.json").read_text()) for rank in range(2)]
        lines.append(line_of(framework, ranks))
        print(lines[-1], flush=True)
    explained = __doc__.partition("\n\n")[2].partition("\n\n")[2].rpartition("\n\n")[0]
    write_results("integrations.txt", options.rounds, [f"torch {torch.__version__}", "", HEAD, *lines, "", explained])
    return 0


if __name__ == "__main__":
    sys.exit(main())
