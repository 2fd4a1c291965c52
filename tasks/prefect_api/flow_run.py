"""The current flow run, as Prefect's server had it when it began."""

from prefect.context import FlowRunContext


def has_run_before() -> bool:
    """Return whether the current flow run has had another process: Prefect's count leaves out those that were suspended."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.run_count > 1 or bool(context.flow_run.empirical_policy.pause_keys)
