"""How much of its time a training gets on with, while one of its two ranks is killed every 30 s; beside Ray Train.

    python tests/benchmarks/goodput.py [--minutes 3] [--every 30] [--ways ours_state ours_folder ray_sync ray_async] [--seed 0]

The same training (goodput_training.py) for every way: two ranks on this machine, gloo, 50 ms a step, a checkpoint of 50 MB
every 40 steps, on a local disk. `kill -9` hits a random rank, by the pid that it wrote down, every 30 s from the first step on;
one whose turn comes while the training is still restarting waits for its first step. Ours trains through
`prefect_torch.flows.train` with a Prefect server of its own, Ray through `TorchTrainer`, both with failures without limit.

    goodput   steps of the final lineage x 50 ms / time since the first step
    lost      steps done since the checkpoint that the next attempt began from, for each kill
    restart   from the kill to the first step of the next attempt
    stall     of the slower rank's report of a checkpoint

Ray is installed by peers/install.py, which takes some minutes the first time. Prints a table, and writes it to
tests/benchmarks/results/goodput.txt.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from goodput_training import STEP_S

HERE = Path(__file__).parent
WAYS = ["ours_state", "ours_folder", "ray_sync", "ray_async"]
HERE_ALONE = {"num_cpus": 4, "include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": str(HERE)}}}
LONGEST_START_S = 180.0
LONGEST_END_S = 120.0
COLUMNS = (
    f"{'way':<12} {'kills':>5} {'steps':>6} {'goodput':>8} {'lost p50/max':>14} {'restart p50/max':>18} {'stall p50/max':>20}"
)


@dataclass(frozen=True)
class Attempt:
    """What rank 0 of one attempt wrote down."""

    first_step: int
    steps: list[tuple[int, float]]


def train_ours(function, config):
    """Train with two ranks on this machine, or on those of `config["hosts"]`."""
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings
    from prefect.testing.utilities import prefect_test_harness
    from prefect_torch.flows import CheckpointConfig, FailureConfig, Hosts, RunConfig, ScalingConfig, train

    cluster = Hosts(**config["hosts"]) if "hosts" in config else None
    with (
        temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        train(
            f"{HERE / 'goodput_training.py'}:{function}",
            config,
            ScalingConfig(num_workers=2, cluster=cluster),
            RunConfig(name="goodput", storage=config["storage"]),
            CheckpointConfig(num_to_keep=2),
            FailureConfig(max_failures=-1, max_infrastructure_failures=-1),
        )


def train_with_ray(config):
    """Train with two ranks on the cluster of `config["ray"]`, in the interpreter that has Ray."""
    import ray
    from goodput_training import with_ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(**config["ray"])
    TorchTrainer(
        with_ray,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="goodput",
            storage_path=config["storage"],
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


def training(way, scratch, seconds, config):
    """Return the command that trains in a way and writes its notes into `scratch`."""
    config = {"seconds": seconds, "notes": str(scratch / "notes"), "storage": str(scratch / "store"), **config}
    python = sys.executable
    if way.startswith("ray"):
        from install import install

        python, config["mode"] = str(install()), way.removeprefix("ray_").upper()
    return [python, __file__, "--train", way, json.dumps(config)]


def read_notes(notes, rank):
    """Return what each process of a rank wrote down, oldest first."""
    files = [path.read_text().splitlines() for path in notes.glob(f"notes-{rank}-*.jsonl")]
    processes = []
    for lines in files:
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last one of a killed process
                found.append(json.loads(line))
        if found:
            processes.append(found)
    return sorted(processes, key=lambda process: process[0]["at"])


def living_ranks(notes):
    """Return the first notes of the newest attempt's ranks, once every rank of it has done a step."""
    newest = [read_notes(notes, rank)[-1:] for rank in range(2)]
    ranks = [process[0] for (process,) in newest if any("step" in note for note in process)] if all(newest) else []
    return ranks if len(ranks) == 2 and all(is_alive(rank["pid"]) for rank in ranks) else []


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def disturb(process, notes, seconds, every_s, disturb_one, meanwhile=lambda: None):
    """Call `disturb_one` with the living ranks until the training has ended by itself; return when each call was."""
    kills, deadline = [], time.monotonic() + LONGEST_START_S
    while not (notes / "began").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the training does not begin")
        time.sleep(0.05)
    began = float((notes / "began").read_text())
    due = began + every_s
    while process.poll() is None:
        now = time.time()
        if now > began + seconds + LONGEST_END_S:
            raise RuntimeError("the training does not end")
        if due <= now < began + seconds - every_s / 3 and (ranks := living_ranks(notes)):
            disturb_one(ranks)
            kills.append(time.time())
            due += every_s * max(1, -(-(now - due) // every_s))
        meanwhile()
        time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"the training ended with {process.returncode}")
    return kills


def kill_one(chance, ranks):
    os.kill(chance.choice(ranks)["pid"], signal.SIGKILL)


@contextlib.contextmanager
def scratch_folder():
    with tempfile.TemporaryDirectory(prefix="prefect-torch-goodput-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def measure(way, command, scratch, options, disturb_one, meanwhile=lambda: None):
    """Run a command of `training`, disturbed; return its goodput, and its row of the table."""
    (notes := scratch / "notes").mkdir()
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        kills = disturb(process, notes, options.minutes * 60, options.every, disturb_one, meanwhile)
    except RuntimeError as exc:
        raise RuntimeError(f"{way}: {exc}\n{(scratch / 'log').read_text()[-6000:]}") from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what Ray has left running, and ours has not
        process.wait()
    goodput, row = _describe(way, notes, kills)
    row += f"   load {os.getloadavg()[0]:.1f}"
    print(row, flush=True)
    return goodput, row


def _describe(way, notes, kills):
    attempts = []
    for process in read_notes(notes, 0):
        steps = [(note["step"], note["at"]) for note in process if "step" in note]
        if steps:
            attempts.append(Attempt(process[0]["first_step"], steps))
    began = float((notes / "began").read_text())
    last_step, ended = attempts[-1].steps[-1]
    lost, restarts = [], []
    for before, after in pairwise(attempts):
        killed = max(at for at in kills if at < after.steps[0][1])
        lost.append(before.steps[-1][0] - after.first_step)
        restarts.append(after.steps[0][1] - killed)
    stalls = defaultdict(list)
    for rank in range(2):
        for number, process in enumerate(read_notes(notes, rank)):
            for place, stall_s in enumerate(note["stall_s"] for note in process if "stall_s" in note):
                stalls[number, place].append(stall_s)
    slower = [max(both) for both in stalls.values()]
    goodput = last_step * STEP_S / (ended - began)
    return goodput, (
        f"{way:<12} {len(kills):>5} {last_step:>6} {goodput:>8.1%} "
        f"{_spread(lost, '{:.0f}'):>14} {_spread(restarts, '{:.1f} s'):>18} "
        f"{_spread([it * 1e3 for it in slower], '{:.0f} ms'):>20}"
    )


def _spread(values, form):
    return f"{form.format(statistics.median(values))} / {form.format(max(values))}" if values else "-"


def main():
    if sys.argv[1:2] == ["--train"]:
        way, config = sys.argv[2], json.loads(sys.argv[3])
        train_with_ray(config) if way.startswith("ray") else train_ours(way, config)
        return
    from result_file import write_results

    options = parser(WAYS, minutes=3.0, every_s=30.0).parse_args()
    sys.path[:0] = [str(HERE / "peers")]
    rows = [COLUMNS]
    for way in options.ways:
        chance = random.Random(options.seed)
        with scratch_folder() as scratch:
            command = training(way, scratch, options.minutes * 60, {"ray": HERE_ALONE})
            kill = partial(kill_one, chance)
            rows.append(measure(way, command, scratch, options, kill)[1])
    write_results("goodput.txt", 1, rows)


def parser(ways, *, minutes, every_s):
    made = argparse.ArgumentParser()
    made.add_argument("--minutes", type=float, default=minutes)
    made.add_argument("--every", type=float, default=every_s)
    made.add_argument("--ways", nargs="+", choices=ways, default=ways)
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    main()
