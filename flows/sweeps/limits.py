"""The limits at which a trial is complete, though its function would go on."""

from prefect_torch.ckpt.reporting.decisions import time_of
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.flows.sweeps.search_config import SearchConfig


def limits_of(search: SearchConfig) -> dict[str, float]:
    """Return the limits of `search.stop` and `search.max_t`, by metric or time; of two for the same time, the lower."""
    limits = dict(search.stop or {})
    if search.max_t is not None:
        limits[search.time_attr] = min(search.max_t, limits.get(search.time_attr, search.max_t))
    return limits


def reached_limit(search: SearchConfig, request: DecisionRequest) -> str | None:
    """Return which limit a report has reached, in words; None if it has reached none."""
    for name, limit in limits_of(search).items():
        reached = time_of(name, request.step, request.num_reports, request.metrics)
        if reached is not None and reached >= limit:
            return f"{name}={reached:g} has reached {limit:g}"
    return None
