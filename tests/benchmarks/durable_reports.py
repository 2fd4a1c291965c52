"""Which report a training resumes from whose rank is killed as soon as its third one has returned; beside Ray Train.

    python tests/benchmarks/durable_reports.py [--repeats 5]

One rank on this machine reports a directory of 1 MB three times, with the defaults of `report`, and sends itself SIGKILL; its
next attempt notes which report it restored and ends. Ours trains through `prefect_torch.flows.train` with a Prefect server of
its own, Ray (of peers/install.py) through `TorchTrainer`. Prints a line for each way, and writes them to
tests/benchmarks/results/durable_reports.txt.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from result_file import write_results

sys.path.append(str(Path(__file__).with_name("peers")))
from install import install

REPORTS = 3


def run(config, restored, report):
    """Report three times and be killed, or note the report that was restored."""
    if Path(config["notes"]).exists():
        Path(config["notes"]).write_text(str(restored))
        return
    Path(config["notes"]).write_text("killed")
    for number in range(1, REPORTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "number").write_text(str(number))
            Path(folder, "data").write_bytes(bytes(10**6))
            report(number, folder)
    os.kill(os.getpid(), signal.SIGKILL)


def number_in(checkpoint):
    """Return the number of the report that a checkpoint is of; 0 without one."""
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "number").read_text())


def ours_in_rank(config):
    from prefect_torch.ckpt import Checkpoint, get_checkpoint, report

    restored = number_in(get_checkpoint())
    run(config, restored, lambda number, folder: report({"number": number}, Checkpoint.from_directory(folder)))


def ray_in_worker(config):
    import ray.train

    def report(number, folder):
        ray.train.report({"number": number}, ray.train.Checkpoint.from_directory(folder))

    run(config, number_in(ray.train.get_checkpoint()), report)


def train_ours(config):
    from prefect.testing.utilities import prefect_test_harness
    from prefect_torch.flows import RunConfig, train

    with prefect_test_harness(server_startup_timeout=120):
        train(f"{__file__}:ours_in_rank", config, run=RunConfig(name="run", storage=config["storage"]))


def train_ray(config):
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    TorchTrainer(
        ray_in_worker,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=config["storage"], failure_config=FailureConfig(max_failures=1)),
    ).fit()


WAYS = {"ray": train_ray, "ours": train_ours}


def resumed_from(way):
    """Train in a process of its own and return the report that the second attempt restored."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"notes": f"{folder}/notes", "storage": f"{folder}/store"}
        python = install() if way == "ray" else sys.executable
        subprocess.run([python, __file__, "--train", way, json.dumps(config)], check=True, capture_output=True)
        return int(Path(config["notes"]).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", nargs=2, metavar=("WAY", "CONFIG"), help="one training, in this process")
    options = parser.parse_args()
    if options.train:
        way, config = options.train
        WAYS[way](json.loads(config))
        return
    found = {way: Counter() for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            found[way][resumed_from(way)] += 1
    lines = [f"killed after report {REPORTS} had returned; resumed from report (0: from the beginning), times"]
    for way, counts in found.items():
        lines.append(f"{way:5}" + "".join(f"  {report}: {times}" for report, times in sorted(counts.items())))
    write_results("durable_reports.txt", options.repeats, lines)


if __name__ == "__main__":
    main()
