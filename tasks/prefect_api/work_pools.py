"""The variables of the jobs of a work pool, as its base job template has them."""

from typing import Any

from prefect.client.schemas.objects import WorkPool


def has_variable(work_pool: WorkPool, name: str) -> bool:
    """Return whether jobs of `work_pool` have the variable `name`."""
    return name in work_pool.base_job_template.get("variables", {}).get("properties", {})


def default_of(work_pool: WorkPool, name: str) -> Any:
    """Return the default of the variable `name`; None without one."""
    return work_pool.base_job_template.get("variables", {}).get("properties", {}).get(name, {}).get("default")
