"""How fast a training starts, restarts and reports, with two ranks on this machine.

    python tests/benchmarks/main_job.py          prints a table, and writes it to tests/benchmarks/results/main_job.txt

Start: from `train()` to the first step of the user's function, less what an empty Prefect flow with one task takes and less
importing torch in as many processes at once. Restart: from a rank's exception, and from its SIGKILL, to the first step of the
next attempt, torch's import included. Report: a sync report of 1 KB on local disk, and one without a checkpoint.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect_torch.ckpt import Checkpoint, get_context, report
from result_file import write_results

REPEATS = 5
REPORTS = 200


def first_step(config):
    if config.get("fail") and get_context().attempt == 1:
        if get_context().world_rank == 1:
            Path(config["failed_at"]).write_text(repr(time.time()))
            if config["fail"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("on purpose")
        time.sleep(60)
    return time.time()


def many_reports(config):
    with tempfile.TemporaryDirectory(dir=config["folder"]) as folder:
        rank = get_context().world_rank
        Path(folder, f"model-{rank}.pt").write_bytes(b"x" * 1024)
        took: dict[str, list[float]] = {"checkpoint": [], "metrics": []}
        for kind, times in took.items():
            for step in range(REPORTS):
                started = time.perf_counter()
                report({"step": step}, Checkpoint.from_directory(folder) if kind == "checkpoint" else None)
                times.append(time.perf_counter() - started)
    return took


def import_torch_at_once(processes):
    started = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(processes)]
    for process in running:
        process.wait()
    return time.perf_counter() - started


def main():
    from prefect import flow, task
    from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train

    @task
    def nothing():
        return time.time()

    @flow
    def empty():
        return nothing.submit().result()

    folder = tempfile.mkdtemp(prefix="prefect-torch-bench-", dir=".")
    this = f"{__file__}:"

    def run(function, **config):
        return train(
            this + function,
            {"folder": os.path.abspath(folder), **config},
            ScalingConfig(num_workers=2),
            RunConfig(storage=folder),
            CheckpointConfig(num_to_keep=2),
            FailureConfig(max_failures=1),
        ).return_value

    empty()  # starts the server
    rows = []

    def row(name, seconds, target=None):
        values = sorted(seconds)
        text = f"{name:<58} median {statistics.median(values) * 1e3:8.1f} ms   worst {values[-1] * 1e3:8.1f} ms"
        rows.append(text + (f"   target {target}" if target else ""))

    starts, empties, imports = [], [], []
    for _ in range(REPEATS):
        called = time.time()
        empties.append(empty() - called)
        imports.append(import_torch_at_once(2))
        called = time.time()
        starts.append(run("first_step") - called)
    row("train() to the first step", starts)
    row("  an empty flow to its first task", empties)
    row("  import torch in two processes at once", imports)
    net = [start - bare - imported for start, bare, imported in zip(starts, empties, imports, strict=True)]
    row("  so the package's own share", net, "< 3000 ms")

    for how in ("raise", "kill"):
        restarts = []
        for _ in range(REPEATS):
            with tempfile.NamedTemporaryFile() as file:
                again = run("first_step", fail=how, failed_at=file.name)
                restarts.append(again - float(Path(file.name).read_text()))
        row(f"failure ({how}) to the next attempt's first step", restarts, "< 5000 ms")

    took = run("many_reports")
    row("a sync report of 1 KB from each of 2 ranks", took["checkpoint"], "< 30 ms")
    row("a report without a checkpoint, 2 ranks", took["metrics"])

    write_results("main_job.txt", REPEATS, rows)
    subprocess.run(["rm", "-r", folder], check=True)


if __name__ == "__main__":
    main()
