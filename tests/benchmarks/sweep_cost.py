"""What a sweep costs beside its trainings: the time for each trial, and memory.

    python tests/benchmarks/sweep_cost.py [--trials 200] [--simulated 10000]

- A sweep of 200 real trials of one rank, whose training takes a millisecond and reports once, one trial at a time, on local
  disk with Prefect's embedded server: the time from the end of one trial's function to the beginning of the next one's, without
  that from the start of the rank's process to the function.
- A search of 10,000 trials without trainings, with its journal in a local directory: the memory of the process, and the time of
  its decisions and records for each trial. Then the journal is read once more, as by a sweep that is started again.

Prints both, and writes them to tests/benchmarks/results/sweep_cost.txt.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from result_file import write_results  # noqa: E402 - found by the line above

PER_TRIAL = ("between two functions", "start of the rank", "the sweep's own")


def train_briefly(config):
    """Train for a millisecond, and write when this process started and the function began and ended."""
    began_s = time.time()
    from prefect_torch.ckpt import get_context, report

    time.sleep(0.001)
    report({"loss": config["x"]})
    times = {"started": process_start_s(), "began": began_s, "ended": time.time()}
    Path(config["folder"], get_context().run_name.replace("/", " ")).write_text(json.dumps(times))


def process_start_s():
    """Return when this process started, to a clock tick (10 ms)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def measure_trials(trials):
    with tempfile.TemporaryDirectory(prefix="prefect-torch-sweep-", dir=".") as folder:
        place = str(Path(folder).absolute())
        os.environ["PREFECT_HOME"] = f"{place}/prefect"  # before Prefect's import
        from prefect_torch.flows import RunConfig, SearchConfig, sweep, uniform

        search = SearchConfig(metric="loss", num_trials=trials, sampler="random", seed=0)
        times = Path(place, "times")
        times.mkdir()
        run = RunConfig(name="cost", storage=f"{place}/store")
        sweep(f"{__file__}:train_briefly", {"x": uniform(0, 1)}, {"folder": str(times)}, search, run=run)
        found = sorted((json.loads(path.read_text()) for path in times.iterdir()), key=lambda it: it["began"])
    assert len(found) == trials, len(found)
    return [
        (after["began"] - before["ended"], after["began"] - after["started"], after["started"] - before["ended"])
        for before, after in pairwise(found)
    ]


def show_trials(trials):
    rows = measure_trials(trials)
    yield f"a sweep of {trials} trials of 1 ms, one at a time: seconds for each trial"
    yield f"{'':<24}{'median':>8}{'mean':>8}{'highest':>9}"
    for name, values in zip(PER_TRIAL, zip(*rows, strict=True), strict=True):
        yield f"{name:<24}{statistics.median(values):>8.3f}{statistics.fmean(values):>8.3f}{max(values):>9.3f}"
    own = [row[2] for row in rows]
    tenth = max(1, len(own) // 10)
    first, last = statistics.median(own[:tenth]), statistics.median(own[-tenth:])
    yield f"the sweep's own: {first:.3f} in the median of the first tenth, {last:.3f} of the last"
    yield ""


def show_memory(trials):
    from prefect_torch.ckpt.runs.attempts.attempt import claim_key
    from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
    from prefect_torch.ckpt.runs.attempts.owner import Owner
    from prefect_torch.ckpt.runs.run import Run
    from prefect_torch.flows import SearchConfig, uniform
    from prefect_torch.flows.sweeps.domains import parse_space
    from prefect_torch.flows.sweeps.journal.events import decode_event
    from prefect_torch.flows.sweeps.journal.journal import Journal, list_parts, read_journal
    from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
    from prefect_torch.flows.sweeps.search import Search
    from prefect_torch.flows.sweeps.trial_end import TrialEnd

    yield f"a search of {trials} trials with the random sampler, one report each"
    yield f"{'trials':>8}{'MiB':>8}{'ms/trial':>10}"
    config = SearchConfig(metric="loss", sampler="random", seed=0, num_trials=trials)
    space = parse_space({"lr": uniform(0, 1), "momentum": uniform(0, 1)})
    with tempfile.TemporaryDirectory(prefix="prefect-torch-sweep-", dir=".") as folder:
        run = Run.open(folder, "sweep")
        claim = claim_key(run, claim_attempt(run, Owner.current(), world_size=0))
        search = Search(config, space, 0, RecordedTrials([], Journal(run, claim, 0).append), "sweep")
        begun_s = time.perf_counter()
        for number in range(1, trials + 1):
            trial = search.next_trial()
            assert trial is not None
            search.end(trial.number, TrialEnd("completed", None, {"loss": trial.config["lr"]}))
            if number % (trials // 10) == 0:
                ms = (time.perf_counter() - begun_s) / (trials // 10) * 1e3
                yield f"{number:>8}{resident_mib():>8.0f}{ms:>10.2f}"
                begun_s = time.perf_counter()
        before_mib, begun_s = resident_mib(), time.perf_counter()
        entries = read_journal(run)
        events = [event for entry in entries if (event := decode_event(entry, "the journal")) is not None]
        again = Search(config, space, 0, RecordedTrials(events, lambda _: None), "sweep")
        took_s, parts = time.perf_counter() - begun_s, len(list_parts(run))
    assert again.trials == search.trials
    more_mib = resident_mib() - before_mib
    yield f"started again: {len(entries)} entries, in {parts} objects read once, {took_s:.1f} s, {more_mib:.0f} MiB more"


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--simulated", type=int, default=10_000)
    options = parser.parse_args()
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")  # also on a loaded machine
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lines = []
    if options.trials:
        lines += show_trials(options.trials)
    if options.simulated:
        lines += show_memory(options.simulated)
    write_results("sweep_cost.txt", 1, lines)


if __name__ == "__main__":
    main()
