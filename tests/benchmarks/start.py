"""How long a training takes from `train()`, and from the loss of a rank, to its function and to the end of the first step.

    python tests/benchmarks/start.py [--rounds 5]

Two ranks on this machine, on local disk, with Prefect's embedded server. In each round, one training whose ranks are spawned
and one whose ranks are forked, each of which loses a rank by SIGKILL and is restarted, in one process that has trained before.
The first step ends with that of an optimizer, for which torch imports its compiler. Prints medians and the ratio of each round,
and writes them to tests/benchmarks/results/start.txt.
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

ROWS = ("train() to the function", "train() to the first step", "loss to the function", "loss to the first step")
WAYS = ("spawned", "forked")


def first_step(config):
    """Write when each attempt has come how far; kill rank 1 in the first attempt."""
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
    times = {"began": began_s, "stepped": stepped_s, "killed": time.time()}
    Path(config["folder"], f"{context.attempt}-{context.world_rank}").write_text(json.dumps(times))
    if context.attempt == 1:
        if context.world_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def measure(way):
    """Return the seconds of each row for one training."""
    from prefect_torch.flows import RunConfig, ScalingConfig, train

    os.environ["PREFECT_INTEGRATIONS_TORCH_FORK_RANKS"] = str(way == "forked")
    with tempfile.TemporaryDirectory(prefix="prefect-torch-start-", dir=".") as folder:
        started_s = time.time()
        place = str(Path(folder).absolute())
        train(f"{__file__}:first_step", {"folder": place}, ScalingConfig(num_workers=2), RunConfig(storage=place))
        first, second = (
            [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{attempt}-*"))] for attempt in (1, 2)
        )
    lost_s = first[1]["killed"]
    since = ((first, started_s), (second, lost_s))
    return [max(rank[point] for rank in attempt) - from_s for attempt, from_s in since for point in ("began", "stepped")]


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
