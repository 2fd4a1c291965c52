"""Which task runs of a killed flow are ended by the process that goes on."""

from dataclasses import replace
from uuid import uuid4

from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run
from prefect.states import Running
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks.training.left_task_runs import end_left_task_runs

RANKS = ["rank-0", "rank-63", "node-1: ranks 64-127"]
OF_RUN = ["train-ranker", "prune-ranker"]
OTHERS = ["rank-my-results", "train-another", "prune-ranker-2"]


@task
def a_task() -> None:
    """Never called."""


def test_task_runs_of_the_killed_leader_are_ended_and_none_of_the_process_that_goes_on(tmp_path):
    found = []

    @task(task_run_name="train-ranker")
    def goes_on(flow_run_id, client):
        for name in [*RANKS, *OF_RUN, *OTHERS]:
            client.create_task_run(a_task, flow_run_id, str(uuid4()), name=name, state=Running())
        owner = Owner.current(str(flow_run_id))
        left = claim_attempt(CheckpointStore.open(tmp_path, "ranker"), replace(owner, pid=1), world_size=1)
        end_left_task_runs(left, owner, "ranker")
        found.extend(client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))))

    @flow
    def retried():
        with get_client(sync_client=True) as client:
            goes_on(flow_run.get_id(), client)

    retried()
    assert sorted(it.name for it in found if it.state.is_crashed()) == sorted([*RANKS, *OF_RUN])
    assert {it.name for it in found if it.state.is_running()} >= {*OTHERS}
