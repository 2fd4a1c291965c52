"""The scheduler that a configuration names."""

from prefect_torch.flows.sweeps.optuna_study.pruning import OptunaPruning
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested

from .asha import Asha, hyperband
from .median import Median
from .pbt import PopulationBased
from .pruner import PrunedTrials
from .scheduling import RunToTheEnd, Scheduler


def make_scheduler(search: SearchConfig, space: Nested, seed: int, num_trials: int) -> Scheduler:
    """Return the scheduler of a search.

    Args:
        search: The configuration.
        space: The space.
        seed: The seed of its choices.
        num_trials: The number of trials.

    """
    if search.scheduler in ("asha", "hyperband"):
        assert search.max_t is not None
        make = Asha if search.scheduler == "asha" else hyperband
        return make(search.grace_period, search.reduction_factor, search.max_t, num_trials)
    if search.scheduler == "median":
        return Median(search.grace_period)
    if search.scheduler == "pbt":
        assert search.perturbation_interval is not None
        return PopulationBased(space, search.perturbation_interval, num_trials, seed, search.max_concurrent)
    if search.scheduler == "pruner":
        assert search.pruner is not None
        pruning, counts_reports = OptunaPruning(search.pruner, search.modes[0]), search.is_timed_by_metric
        return PrunedTrials(pruning, search.grace_period, counts_reports=counts_reports)
    return RunToTheEnd()
