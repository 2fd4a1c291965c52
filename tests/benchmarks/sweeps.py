"""What the search of a sweep finds, beside peers.

    python tests/benchmarks/sweeps.py [--seeds 100]

Trials are simulated: the real search, schedulers and journal entries decide, and a training is a formula. Measured are

- asha, Optuna's SuccessiveHalvingPruner and no pruner (random search, with the random sampler), at the same total number of
  steps, with as many trials at once, and the same suggestions as far as they do not depend on results: how far the best value
  of any report lies above the optimum;
- pbt beside the best fixed config of its own first population, over 5 seeds.

Prints the tables, and writes them to tests/benchmarks/results/sweeps.txt.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import optuna
from prefect_torch.flows import SearchConfig, loguniform, uniform
from prefect_torch.flows.sweeps.optuna_study.study import seed_of_trial
from result_file import write_results
from simulated_sweeps import Simulation, follow_schedule

SPACE = {"lr": loguniform(1e-5, 1.0), "momentum": uniform(0.0, 1.0)}
MAX_T, ETA, BUDGET, CONCURRENT = 81, 3, 1600, 4
PRINTED = 10
PEERS = ("SHA", "no pruner")
SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}


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
        max_concurrent=CONCURRENT,
    )
    advance = Advance()
    search = Simulation(config, SPACE, advance, MAX_T, most_steps=BUDGET, seed=seed).lead()
    return advance.best, len(search.trials)


class OptunaTrial:
    """A trial of Optuna's own loop; its sampler has the seed that a sweep's trial of that number has."""

    def __init__(self, study, sampler, seed):
        study.sampler = SAMPLERS[sampler](seed=seed_of_trial(seed, len(study.trials)))
        self.trial, self.step, self.study = study.ask(), 0, study
        self.config = {
            "lr": self.trial.suggest_float("lr", 1e-5, 1.0, log=True),
            "momentum": self.trial.suggest_float("momentum", 0.0, 1.0),
        }

    def advance(self):
        """Take a step; return its value, and whether the trial goes on."""
        self.step += 1
        value = loss(self.config, self.step)
        self.trial.report(value, self.step)
        if self.step < MAX_T and not self.trial.should_prune():
            return value, True
        if self.step < MAX_T:
            self.study.tell(self.trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(self.trial, value)
        return value, False


def peer(seed, pruner, sampler):
    """Return the best value that Optuna's own loop has reported after `BUDGET` steps, with as many trials at once."""
    study = optuna.create_study(pruner=pruner)
    left, best, running = BUDGET, math.inf, []
    while left > 0:
        while len(running) < CONCURRENT:
            running.append(OptunaTrial(study, sampler, seed))
        for trial in tuple(running):
            value, goes_on = trial.advance()
            left, best = left - 1, min(best, value)
            if not goes_on:
                running.remove(trial)
    return best, len(study.trials)


def compare_halving(seeds):
    sha = {"min_resource": 1, "reduction_factor": ETA}
    for sampler in SAMPLERS:
        yield f"best loss above the optimum after {BUDGET} steps in all, at most {MAX_T} a trial, sampler {sampler}"
        yield f"{CONCURRENT} trials at once; trial n has the same sampler and seed in all three"
        yield f"{'seed':>6}{'asha':>10}{'SHA':>10}{'no pruner':>11}   trials"
        rows = [
            (
                asha(seed, sampler),
                peer(seed, optuna.pruners.SuccessiveHalvingPruner(**sha), sampler),
                peer(seed, optuna.pruners.NopPruner(), sampler),
            )
            for seed in range(seeds)
        ]
        for seed, row in enumerate(rows[:PRINTED]):
            values = "".join(f"{value:>{width}.4f}" for (value, _), width in zip(row, (10, 10, 11), strict=True))
            yield f"{seed:>6}{values}   {', '.join(str(trials) for _, trials in row)}"
        yield from summarize([[value for value, _ in row] for row in rows[:PRINTED]])
        yield from summarize([[value for value, _ in row] for row in rows])
        yield ""


def summarize(rows):
    """Yield the medians, and how asha differs from each peer, seed by seed."""
    yield f"the {len(rows)} seeds from 0 on: medians " + ", ".join(
        f"{name} {statistics.median(row[place] for row in rows):.4f}" for place, name in enumerate(("asha", *PEERS))
    )
    for place, name in enumerate(PEERS, 1):
        differences = [row[0] - row[place] for row in rows]
        error = statistics.stdev(differences) / math.sqrt(len(rows))
        signs = f"lower in {sum(it < 0 for it in differences)}, equal in {differences.count(0)}, "
        signs += f"higher in {sum(it > 0 for it in differences)}"
        yield f"  asha - {name}: mean {statistics.fmean(differences):+.4f} (standard error {error:.4f}); {signs}"


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100, help=f"of the comparison; the first {PRINTED} are printed")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    write_results("sweeps.txt", options.seeds, [*compare_halving(options.seeds), *compare_populations()])


if __name__ == "__main__":
    main()
