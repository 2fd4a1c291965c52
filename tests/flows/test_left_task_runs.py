"""Which task runs of a killed flow are ended by the process that goes on."""

from dataclasses import replace
from uuid import uuid4

from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.logging import disable_run_logger
from prefect.states import Running
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks.training.left_task_runs import end_left_task_runs


@flow
def a_flow() -> None:
    """Never called."""


@task
def a_task() -> None:
    """Never called."""


def test_task_runs_of_ranks_are_ended_and_none_of_the_process_that_goes_on(tmp_path):
    names = ["rank-0", "rank-63", "node-1: ranks 64-127", "train-ranker", "rank-my-results", "prune-ranker"]
    with get_client(sync_client=True) as client, disable_run_logger():
        flow_run = client.create_flow_run(a_flow)
        for name in names:
            client.create_task_run(a_task, flow_run.id, str(uuid4()), name=name, state=Running())
        owner = Owner.current(str(flow_run.id))
        left = claim_attempt(CheckpointStore.open(tmp_path, "ranker"), replace(owner, pid=1), world_size=1)
        end_left_task_runs(left, owner)
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
    assert {it.name for it in found if it.state.is_crashed()} == set(names[:3])
    assert {it.name for it in found if it.state.is_running()} == set(names[3:])
