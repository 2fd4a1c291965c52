"""What a work pool's base job template offers."""

from typing import Any

from prefect.client.schemas.objects import WorkPool


def has_variable(work_pool: WorkPool, name: str) -> bool:
    """Say whether jobs of `work_pool` have the variable `name`."""
    return name in work_pool.base_job_template.get("variables", {}).get("properties", {})


def default_of(work_pool: WorkPool, name: str) -> Any:
    """Return what the variable `name` is unless a deployment says otherwise; None without one."""
    return work_pool.base_job_template.get("variables", {}).get("properties", {}).get(name, {}).get("default")
