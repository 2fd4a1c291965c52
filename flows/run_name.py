"""The name of a run that nobody named."""

import re

from prefect_torch.ckpt.layout import check_run_name

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def default_run_name(flow_run_name: str | None, flow_run_id: str) -> str:
    """Return a name that the retries of a flow run share and no other flow run has."""
    name = _NOT_IN_NAMES.sub("-", flow_run_name or "run").strip("-._") or "run"
    return check_run_name(f"{name[:150]}-{flow_run_id[:8]}")
