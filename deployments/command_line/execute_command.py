"""`execute`: the command of containers in Docker and Kubernetes work pools."""

from uuid import UUID

import click


@click.command
@click.argument("flow_run", metavar="FLOW_RUN", type=click.UUID, envvar="PREFECT__FLOW_RUN_ID", required=False)
def execute(flow_run: UUID | None) -> int:
    """Execute a flow run, as `prefect flow-run execute` does, with its full grace.

    The id is FLOW_RUN, or PREFECT__FLOW_RUN_ID, which workers set. On SIGTERM, ranks have the training's grace_s for a last
    checkpoint, limited only by the container's own grace period; Prefect's command kills after 30 s.
    """
    if flow_run is None:
        raise click.UsageError("no flow run: give its id, or set PREFECT__FLOW_RUN_ID")
    from .execution import execute_gracefully  # noqa: PLC0415 - seconds, for this command only

    return execute_gracefully(flow_run)
