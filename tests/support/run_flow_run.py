"""Run a training's flow run in a process of its own, as a worker does, asking often: run_flow_run.py FLOW_RUN_ID."""

import sys
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect_torch.flows import interruptions, train

if __name__ == "__main__":
    interruptions._POLL_S = 0.5
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(sys.argv[1]))
    run_flow(train, flow_run=flow_run)
