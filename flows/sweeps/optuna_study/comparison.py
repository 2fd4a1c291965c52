"""The values by which a sampler compares trials, where they are not those that the trials were observed with."""

from prefect_torch.flows.sweeps.journal.history import History, scores_in
from prefect_torch.flows.sweeps.schedulers.scheduling import Scheduler
from prefect_torch.flows.sweeps.search_config import SearchConfig

from .storage import Compared

_MODELS = ("tpe", "gp")  # samplers that fit a model to values


def compared_values(history: History, scheduler: Scheduler, search: SearchConfig, sampler: str) -> Compared:
    """Return the values of the metrics by which a sampler compares trials, and None for each trial that it does not see.

    Optuna leaves failed trials out of a model, and gp also those that were stopped, as if nothing were known of their configs:
    it would suggest these again and again. They count as the worst in each metric. So does a completed trial without a score,
    such as one that diverged: "Trials that return NaN are treated as failures" (Optuna's FAQ), and an infinite value, which gp
    would cut off at the largest float, has no distance to the others.

    Args:
        history: The trials.
        scheduler: The scheduler, which may compare trials before their ends.
        search: The configuration of the search.
        sampler: The sampler's name.

    Returns:
        The values, by the trials' numbers; the sampler sees all other trials as they were observed.

    """
    if sampler not in _MODELS:
        return {}
    is_gp = sampler == "gp"  # tpe tries other places by itself, and learns more from few trials that compare
    found = {
        number: None if value is None else [value] for number, value in scheduler.compared(history, with_behind=is_gp).items()
    }
    others = [trial for trial in history.values() if trial.number not in found and not trial.is_cloned]
    ended = {
        it.number: scores_in(it.metrics, it.state, search.metrics, search.modes)
        for it in others
        if it.state in ("completed", "failed")
    }
    if known := [scores for scores in (*found.values(), *ended.values()) if scores is not None]:
        worst = list(map(max, zip(*known, strict=True)))
        stopped = [it.number for it in others if it.state == "stopped"] if is_gp else []
        found |= dict.fromkeys([*stopped, *(number for number, scores in ended.items() if scores is None)], worst)
    signs = [1 if mode == "min" else -1 for mode in search.modes]
    return {
        number: None if values is None else [value * sign for value, sign in zip(values, signs, strict=True)]
        for number, values in found.items()
    }
