"""How long a training takes from `train()`, and from the loss of a rank, to its function and to the end of the first step.

    python tests/benchmarks/start.py [--rounds 5]

Two ranks on this machine, on local disk, with Prefect's embedded server. In each round, one training whose ranks are spawned
and one whose ranks are forked, each of which loses a rank by SIGKILL and is restarted, then one by an exception, in one process
that has trained before. The first step ends with that of an optimizer, for which torch imports its compiler. Prints medians and
the ratio of each round, and writes them to tests/benchmarks/results/start.txt.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from result_file import write_results

ROWS = [f"{since} to the {point}" for since in ("train()", "SIGKILL", "exception") for point in ("function", "first step")]
WAYS = ("spawned", "forked")
LOSSES = 2


def first_step(config):
    """Write when each attempt has come how far; rank 1 is killed in the first one, and raises an error in the second."""
    began_s = time.time()
    import torch
    from prefect_torch.ckpt import get_context

    context = get_context()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    stepped_s = time.time()
    torch.distributed.barrier()
    times = {"began": began_s, "stepped": stepped_s, "lost": time.time()}
    Path(config["folder"], f"{context.attempt}-{context.world_rank}").write_text(json.dumps(times))
    if context.attempt <= LOSSES:
        if context.world_rank == 1:
            if context.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("rank 1 has failed")
        time.sleep(60)


def measure(way):
    """Return the seconds of each row for one training."""
    from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig, train

    os.environ["PREFECT_INTEGRATIONS_TORCH_FORK_RANKS"] = str(way == "forked")
    with tempfile.TemporaryDirectory(prefix="prefect-torch-start-", dir=".") as folder:
        started_s = time.time()
        place = str(Path(folder).absolute())
        run, failure = RunConfig(storage=place), FailureConfig(max_failures=1)
        train(f"{__file__}:first_step", {"folder": place}, ScalingConfig(num_workers=2), run, failure=failure)
        files = [sorted(Path(folder).glob(f"{number}-*")) for number in range(1, LOSSES + 2)]
        attempts = [[json.loads(path.read_text()) for path in each] for each in files]
    since_s = [started_s, *(attempt[1]["lost"] for attempt in attempts[:-1])]
    pairs = zip(attempts, since_s, strict=True)
    return [max(rank[point] for rank in attempt) - from_s for attempt, from_s in pairs for point in ("began", "stepped")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for way in WAYS:  # Prefect's server, and what the flow's process imports
        measure(way)
    taken = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            taken[way].append(measure(way))
    lines = [f"{'medians':28}{'spawned':>9}{'forked':>9}   forked, of spawned, in each round"]
    for number, row in enumerate(ROWS):
        spawned, forked = ([times[number] for times in taken[way]] for way in WAYS)
        ratios = " ".join(f"{one / other:.2f}" for one, other in zip(forked, spawned, strict=True))
        lines.append(f"{row:28}{statistics.median(spawned):8.2f}s{statistics.median(forked):8.2f}s   {ratios}")
    write_results("start.txt", rounds, lines)


if __name__ == "__main__":
    main()
