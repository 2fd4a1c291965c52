"""What a work pool's base job template offers."""

from prefect.client.schemas.objects import WorkPool


def has_variable(work_pool: WorkPool, name: str) -> bool:
    """Say whether jobs of `work_pool` have the variable `name`."""
    return name in work_pool.base_job_template.get("variables", {}).get("properties", {})
