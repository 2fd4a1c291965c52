"""What the search of a sweep finds, and what it needs, beside peers.

    python tests/benchmarks/sweeps.py [--memory-trials 10000]

Trials are simulated: the real search, schedulers and journal entries decide, and a training is a formula. Measured are

- asha, Optuna's SuccessiveHalvingPruner and random search, at the same total number of steps, over 10 seeds and with the same
  sampler: how far the best value that is known at the end lies above the optimum;
- pbt beside the best fixed config of its own first population, over 5 seeds;
- memory after each tenth of 10,000 trials, and the time of a search's own decisions for each trial.

Prints the tables, and writes them to tests/benchmarks/results/sweeps.txt.
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import optuna
from prefect_torch.flows import SearchConfig, loguniform, uniform
from prefect_torch.flows.sweeps.search import Search, TrialEnd
from prefect_torch.flows.sweeps.space import parse_space
from result_file import write_results
from simulated_sweeps import Simulation

SPACE = {"lr": loguniform(1e-5, 1.0), "momentum": uniform(0.0, 1.0)}
MAX_T, ETA, BUDGET = 81, 3, 1600
SEEDS = range(10)


def loss(config, step):
    """Return the loss after `step` steps: an asymptote, 0 at lr=0.01 and momentum 0.7, and a speed."""
    decades = abs(math.log10(config["lr"]) + 2)
    asymptote = 0.15 * decades**2 + (config["momentum"] - 0.7) ** 2
    speed = 0.05 + 0.4 * config["momentum"] * min(1.0, config["lr"] * 30)
    return asymptote + math.exp(-speed * step)


class Advance:
    """A step of a training, and the best value that was ever reported: every report counts, whoever decides at it."""

    def __init__(self):
        self.best = math.inf

    def __call__(self, _state, config, step):
        value = loss(config, step + 1)
        self.best = min(self.best, value)
        return None, value


def asha(seed, sampler):
    """Return the best value that a sweep with asha has reported after `BUDGET` steps."""
    config = SearchConfig(
        metric="loss",
        scheduler="asha",
        sampler=sampler,
        seed=seed,
        max_t=MAX_T,
        reduction_factor=ETA,
        num_trials=10_000,
        max_concurrent=4,
    )
    advance = Advance()
    search = Simulation(config, SPACE, advance, MAX_T, most_steps=BUDGET, seed=seed).lead()
    return advance.best, len(search.trials)


def peer(seed, pruner, sampler):
    """Return the best value that Optuna's own loop has reported after `BUDGET` steps."""
    samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    study = optuna.create_study(sampler=samplers[sampler](seed=seed), pruner=pruner)
    left, best = BUDGET, math.inf
    while left > 0:
        trial = study.ask()
        config = {"lr": trial.suggest_float("lr", 1e-5, 1.0, log=True), "momentum": trial.suggest_float("momentum", 0.0, 1.0)}
        state = optuna.trial.TrialState.COMPLETE
        for step in range(1, MAX_T + 1):
            left -= 1
            value = loss(config, step)
            best = min(best, value)
            trial.report(value, step)
            if left <= 0 or trial.should_prune():
                state = optuna.trial.TrialState.PRUNED
                break
        study.tell(trial, value if state == optuna.trial.TrialState.COMPLETE else None, state)
    return best, len(study.trials)


def compare_halving():
    sha = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)
    for sampler in ("random", "tpe"):
        yield f"best loss above the optimum after {BUDGET} steps in all, at most {MAX_T} a trial, sampler {sampler}"
        yield f"{'seed':>6}{'asha':>10}{'SHA':>10}{'no pruner':>11}   trials"
        rows = [
            (asha(seed, sampler), peer(seed, sha, sampler), peer(seed, optuna.pruners.NopPruner(), sampler)) for seed in SEEDS
        ]
        for seed, row in zip(SEEDS, rows, strict=True):
            values = "".join(f"{value:>{width}.4f}" for (value, _), width in zip(row, (10, 10, 11), strict=True))
            yield f"{seed:>6}{values}   {', '.join(str(trials) for _, trials in row)}"
        medians = [statistics.median(row[place][0] for row in rows) for place in range(3)]
        wins = [sum(row[0][0] <= row[place][0] for row in rows) for place in (1, 2)]
        yield f"median{medians[0]:>10.4f}{medians[1]:>10.4f}{medians[2]:>11.4f}"
        yield f"asha is at least as good as SHA in {wins[0]} of {len(rows)} seeds, as no pruner in {wins[1]}"
        yield ""


def follow_schedule(state, config, step):
    """The best rate falls with the steps, so that no fixed one is good all the time."""
    distance = 1.0 if state is None else state
    decades_off = math.log10(config["rate"]) - math.log10(0.5 * 0.9**step)
    distance *= 1 - 0.3 * math.exp(-((3 * decades_off) ** 2))
    return distance, distance


def compare_populations():
    yield "final loss on a problem whose best rate falls with the steps: 12 trials of 40 steps"
    yield f"{'seed':>6}{'pbt':>10}{'best fixed':>12}"
    space, wins = {"rate": loguniform(0.001, 1)}, 0
    for seed in range(5):
        common = {"metric": "loss", "sampler": "random", "seed": seed, "num_trials": 12, "max_t": 40, "max_concurrent": 4}
        pbt = Simulation(
            SearchConfig(**common, scheduler="pbt", perturbation_interval=2), space, follow_schedule, 100, seed=seed
        )
        fixed = Simulation(SearchConfig(**common), space, follow_schedule, 100, seed=seed)
        values = pbt.best(pbt.lead()), fixed.best(fixed.lead())
        wins += values[0] < values[1]
        yield f"{seed:>6}{values[0]:>10.4f}{values[1]:>12.4f}"
    yield f"pbt is better in {wins} of 5 seeds"
    yield ""


def measure_memory(trials):
    yield f"a search of {trials} trials with the random sampler, one report each: memory, and time of its decisions"
    yield f"{'trials':>8}{'MiB':>8}{'ms/trial':>10}"
    config = SearchConfig(metric="loss", sampler="random", seed=0, num_trials=trials)
    search = Search(config, parse_space(SPACE), 0, [], lambda _: None, "sweep")
    begun_s = time.perf_counter()
    for number in range(1, trials + 1):
        trial = search.next_trial()
        assert trial is not None
        search.end(trial.number, TrialEnd("completed", None, {"loss": loss(trial.config, 9)}))
        if number % (trials // 10) == 0:
            ms = (time.perf_counter() - begun_s) / (trials // 10) * 1e3
            yield f"{number:>8}{resident_mib():>8.0f}{ms:>10.2f}"
            begun_s = time.perf_counter()


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-trials", type=int, default=10_000)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    write_results(
        "sweeps.txt", len(SEEDS), [*compare_halving(), *compare_populations(), *measure_memory(options.memory_trials)]
    )


if __name__ == "__main__":
    main()
