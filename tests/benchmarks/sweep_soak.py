"""Search while something is killed every few seconds; the result is that of a sweep that nobody disturbed.

    python tests/benchmarks/sweep_soak.py [--where here|deployment] [--kills 20] [--seed 0]

A sweep with asha and TPE, one trial at a time, in a process that is started again, with the same name, whenever it was killed.
`kill -9` hits a rank, the sweep's process, or, where trials are flow runs of a served deployment, the process of a trial's flow
run, at random moments. A sweep that completes is followed by the next one, until all kills are used up. Each is compared with
one that was not disturbed:

    trials       the same configs, states, last metrics and rungs; the same best
    attempts     none that begins afresh once its trial has a checkpoint
    processes    none left of all that were started

Exits with 1 unless all of this holds. Prints what was killed, and writes it to tests/benchmarks/results/sweep_soak_<where>.txt.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import psutil  # noqa: E402 - here and below: found by the line above, or as the others are
from forked_programs import program_server  # noqa: E402
from prefect_servers import PrefectServer, rows, wait_until  # noqa: E402
from restarted_process import RestartedProcess  # noqa: E402
from result_file import write_results  # noqa: E402

MARK = "PREFECT_TORCH_SWEEP_SOAK"
DEPLOYMENT = "soaked-trials"
LONGEST_S = 900.0
MOST_OWN_ENDS = 3  # then the sweep fails for a reason of its own, which the log has


def climb(config):
    """Train as the tests of sweeps do, and write down the process."""
    from sweep_trainings import climb as climb_on

    Path(config["ranks"], str(os.getpid())).touch()
    climb_on(config)


def lead(name, folder, trials_on):
    """Run the sweep in this process."""
    from prefect_torch.flows import FailureConfig, RunConfig, SearchConfig, loguniform, sweep

    config = {"epochs": 9, "pause_s": 0.1, "ranks": f"{folder}/ranks"}
    search = SearchConfig(
        metric="loss", num_trials=8, sampler="tpe", seed=7, scheduler="asha", max_t=4, reduction_factor=2, grace_period=1
    )
    failure = FailureConfig(max_infrastructure_failures=-1)
    run = RunConfig(name=name, storage=f"{folder}/store")
    space = {"lr": loguniform(0.01, 1)}
    sweep(f"{__file__}:climb", space, config, search, run=run, failure=failure, trials_on=trials_on or None)


class Leader(RestartedProcess):
    """The sweep's process, started again until it completes."""

    def __init__(self, name: str, folder: Path, trials_on: str) -> None:
        self.name = name
        self.folder = folder
        super().__init__([sys.executable, __file__, "--lead", name, str(folder), trials_on], folder / "log")

    def pids(self, kind: str) -> list[int]:
        """Return the living processes of a kind."""
        if kind == "sweep":
            return [self.process.pid]
        if kind == "rank":
            return [int(path.name) for path in (self.folder / "ranks").iterdir() if psutil.pid_exists(int(path.name))]
        return [pid for pid in self._leaders_of_trials() if psutil.pid_exists(pid)]

    def _leaders_of_trials(self) -> list[int]:
        claims = (self.folder / "store" / self.name).glob("trial-*/attempts/[0-9]*.json")
        owners = []
        for path in claims:
            with contextlib.suppress(ValueError, KeyError, OSError):
                owners.append(json.loads(path.read_text())["owner"]["pid"])
        return [pid for pid in owners if pid != self.process.pid]


def result_of(leader):
    """Return what a sweep has found: for each trial what must not depend on kills."""
    from prefect_torch.flows import SweepResult

    found = SweepResult.from_storage(leader.folder / "store", leader.name)
    trials = [(it.number, it.state, it.reason, it.config["lr"], it.metrics) for it in found.trials]
    return trials, found.best.number


def fresh_starts_with_checkpoints(leader):
    """Return the attempts that began afresh although their trial had a checkpoint."""
    from prefect_torch.ckpt import CheckpointStore
    from prefect_torch.ckpt.runs.attempts.attempt import list_attempts
    from prefect_torch.flows import SweepResult

    wrong = []
    for trial in SweepResult.from_storage(leader.folder / "store", leader.name).trials:
        store = CheckpointStore.open(leader.folder / "store", trial.run)
        first = min((manifest.attempt for manifest in store.list()), default=None)
        wrong += [
            (trial.run, attempt.number)
            for attempt in list_attempts(store)
            if first is not None and attempt.number > first and attempt.resumed_from is None
        ]
    return wrong


def living():
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_sweep(leader, killer=None):
    (leader.folder / "ranks").mkdir(parents=True, exist_ok=True)
    leader.start()
    deadline_s = time.monotonic() + LONGEST_S
    while not leader.completed():
        assert time.monotonic() < deadline_s, leader.log.read_text()[-3000:]
        assert len(leader.ended_by_itself) < MOST_OWN_ENDS, leader.log.read_text()[-3000:]
        if killer is not None:
            killer.poll(leader)
        time.sleep(0.05)
    return leader


class Killer:
    """Kills a process of a random kind at random moments; counts what it hit."""

    def __init__(self, seed, kinds, kills):
        self._random, self._kinds, self._left = random.Random(seed), kinds, kills
        self.hit = Counter()
        self._plan()

    @property
    def is_done(self):
        return self._left == 0

    def _plan(self):
        self._kind = self._random.choice(self._kinds)
        self._at_s = time.monotonic() + self._random.uniform(2, 12)

    def poll(self, leader):
        if self.is_done or time.monotonic() < self._at_s:
            return
        pids = leader.pids(self._kind)
        if not pids:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._random.choice(pids), signal.SIGKILL)
            self.hit[self._kind] += 1
            self._left -= 1
            self._plan()


@contextlib.contextmanager
def served(folder, where):
    """Give the environment a Prefect server, and where trials are flow runs a process that serves their deployment."""
    home = folder / "prefect"
    server = PrefectServer(home)
    server.start()
    os.environ.update(PREFECT_API_URL=server.api, PREFECT_RUNNER_POLL_FREQUENCY="1", PYTHONPATH=str(HERE.parent / "support"))
    runner = None
    try:
        if where == "deployment":
            with (folder / "runner").open("wb") as log:
                command = [sys.executable, str(HERE.parent / "support" / "serve_trials.py"), DEPLOYMENT]
                runner = subprocess.Popen(command, stdout=log, stderr=log)
            wait_until(lambda: rows(server.api, "deployments"), lambda: (folder / "runner").read_text()[-2000:])
        yield
    finally:
        if runner is not None:
            runner.terminate()
            runner.wait()
        server.stop()


def check(options, folder):
    trials_on = f"train/{DEPLOYMENT}" if options.where == "deployment" else ""
    kinds = ["rank", "sweep", *(["trial's flow run"] if trials_on else [])]
    wrong, lines, begun_s = [], [], time.monotonic()
    with served(folder, options.where):
        expected = result_of(run_sweep(Leader("soak", folder / "undisturbed", trials_on)))
        killer, number = Killer(options.seed, kinds, options.kills), 0
        while not killer.is_done:
            number += 1
            leader = run_sweep(Leader("soak", folder / str(number), trials_on), killer)
            if (found := result_of(leader)) != expected:
                wrong.append(f"sweep {number} found {found}, undisturbed {expected}")
            wrong += [f"afresh in spite of a checkpoint: {it}" for it in fresh_starts_with_checkpoints(leader)]
            wrong += [f"the sweep's process ended by itself with {code}" for code in leader.ended_by_itself]
    program_server().close()  # the servers are forked from it
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not living_but_this(), "no process is left", 30)
    wrong += [f"left: {process.cmdline()}" for process in living_but_this()]
    hit = ", ".join(f"{count} x {kind}" for kind, count in sorted(killer.hit.items()))
    lines.append(f"trials {options.where}: {number} sweeps of {len(expected[0])} trials, {time.monotonic() - begun_s:.0f} s")
    lines.append(f"killed: {hit}")
    lines.append(f"best: trial {expected[1]}, in all sweeps" if not wrong else "DIFFERS")
    return lines + wrong, not wrong


def living_but_this():
    return [process for process in living() if process.pid != os.getpid()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", choices=["here", "deployment"], default="here")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lead", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lead:
        lead(*options.lead)
        return
    os.environ[MARK] = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="prefect-torch-sweep-soak-", ignore_cleanup_errors=True) as folder:
        lines, is_right = check(options, Path(folder))
    write_results(f"sweep_soak_{options.where}.txt", options.kills, lines)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
