"""`execute`: what a container of a Docker or Kubernetes work pool runs."""

from uuid import UUID

import click


@click.command
@click.argument("flow_run", metavar="[FLOW_RUN]", type=click.UUID, envvar="PREFECT__FLOW_RUN_ID")
def execute(flow_run: UUID) -> int:
    """Execute a flow run, as `prefect flow-run execute` does, and give it its grace.

    The id is taken from PREFECT__FLOW_RUN_ID, as workers set it, unless FLOW_RUN says it. On SIGTERM, ranks have the training's
    grace_s for a last checkpoint, and nothing but the container's own end cuts it short; Prefect's command kills after 30 s.
    """
    from .execution import execute_patiently  # noqa: PLC0415 - seconds, for this command only

    return execute_patiently(flow_run)
