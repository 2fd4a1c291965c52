"""Flow runs of trials that nothing takes."""

from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Late, Pending, Running, Scheduled, Suspended
from prefect_torch.flows.trials.untaken import Untaken

TOMORROW = datetime.now(timezone.utc) + timedelta(days=1)


def flow_run(state, **changes) -> FlowRun:
    return FlowRun(**{"id": uuid4(), "flow_id": uuid4(), "name": "sweep/trial-0003-0123abcd", "state": state, **changes})


def test_flow_runs_that_no_worker_takes_are_told_once_until_one_is_taken():
    untaken, place = Untaken(), {"work_pool_name": "gpu", "work_queue_name": "nightly"}
    waiting = [flow_run(Scheduled(), **place), flow_run(Late(), **place)]
    assert [untaken.warning(waiting, now_s) for now_s in (10.0, 69.0)] == [None] * 2
    assert untaken.warning(waiting, 70.0) == (
        "no trial runs, and nothing has taken 2 flow runs, such as 'sweep/trial-0003-0123abcd', for a minute: start a worker "
        "of work pool 'gpu', or resume the pool or its queue 'nightly' if that is paused, or wait if other flow "
        "runs use up a limit"
    )
    assert untaken.warning(waiting, 700.0) is None
    assert untaken.warning([*waiting, flow_run(Pending())], 701.0) is None
    assert [untaken.warning(waiting[:1], now_s) for now_s in (702.0, 761.0)] == [None] * 2
    assert untaken.warning(waiting[:1], 762.0).startswith("no trial runs, and nothing has taken 1 flow run, such as ")


def test_of_a_deployment_without_a_work_pool_the_process_that_serves_it_is_missing():
    untaken, waiting = Untaken(), [flow_run(Scheduled())]
    assert untaken.warning(waiting, 0.0) is None
    assert untaken.warning(waiting, 60.0).endswith(": start the process that serves the deployment")


@pytest.mark.parametrize(
    "states",
    [
        [],
        [AwaitingRetry()],
        [Suspended()],
        [Scheduled(name="Yielded")],
        [Scheduled(scheduled_time=TOMORROW)],
        [Scheduled(), Running()],
        [Late(), Pending()],
        [None],
    ],
    ids=range(8),
)
def test_what_waits_for_something_else_than_a_worker_is_not_told(states):
    untaken, flow_runs = Untaken(), [flow_run(state) for state in states]
    assert [untaken.warning(flow_runs, now_s) for now_s in (0.0, 60.0, 6000.0)] == [None] * 3
