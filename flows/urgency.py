"""Which flow runs of a work pool give way to more urgent ones: as many as wait, in an order on which all of them agree."""

from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    WorkQueueFilter,
    WorkQueueFilterId,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkQueue
from prefect_torch.tasks.prefect_api.paging import read_pages

YIELDED = "Yielded"  # the state of a flow run that has given way, and waits
_ALIVE_OR_YIELDED = ["Running", "Retrying", YIELDED]
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING]
_TURN_S = 120.0  # a grace of 20 s, two polls, and time to store a last checkpoint


def find_urgent(client: SyncPrefectClient, this: FlowRun) -> FlowRun | None:
    """Return the flow run to which `this` gives way now, which waits in a more urgent queue of its work pool; None if it stays.

    As many give way as wait, those of the least urgent queue first, of these the ones that began last. One that is dead, or
    whose slot no worker gives to the urgent one, would keep the others from it: while one waits, another follows every two
    minutes. None while the pool is paused: neither an urgent flow run nor this one would begin.
    """
    if this.work_pool_name is None or this.work_queue_id is None or this.state is None:
        return None
    queues = {queue.id: queue for queue in read_pages(client.read_work_queues, work_pool_name=this.work_pool_name)}
    mine = queues.get(this.work_queue_id)
    if mine is None or mine.priority is None:
        return None
    more_urgent = {key: queue for key, queue in queues.items() if queue.priority is not None and queue.priority < mine.priority}
    waiting = _waiting(client, this, more_urgent) if more_urgent else []
    if not waiting or client.read_work_pool(this.work_pool_name).is_paused:
        return None
    others = {key: queue for key, queue in queues.items() if key not in more_urgent}
    turn = _num_before(client, this, others, waiting)
    return waiting[min(turn, len(waiting) - 1)] if turn < len(waiting) + _num_overdue(waiting[0]) else None


def _waiting(client: SyncPrefectClient, this: FlowRun, queues: dict[UUID, WorkQueue]) -> list[FlowRun]:
    """Return the flow runs of `queues` that wait, although their queue's own limit admits them, the oldest first.

    One that was late before this one began was passed over by the workers, and would not begin if this one left.
    """
    late: dict[UUID, list[FlowRun]] = {}
    for flow_run in _read(client, FlowRunFilterState(name=FlowRunFilterStateName(any_=["Late"])), queues):
        if flow_run.work_queue_id is not None and _since(flow_run) >= _since(this):
            late.setdefault(flow_run.work_queue_id, []).append(flow_run)
    admitted = [it for key, found in late.items() for it in sorted(found, key=_since)[: _room(client, queues[key])]]
    return sorted(admitted, key=_since)


def _room(client: SyncPrefectClient, queue: WorkQueue) -> int | None:
    """Return how many flow runs of a queue may begin now; None if it has no limit of its own."""
    if queue.is_paused:
        return 0
    if queue.concurrency_limit is None:
        return None
    under_way = _read(client, FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY)), [queue.id])
    return max(0, queue.concurrency_limit - len(under_way))


def _num_before(client: SyncPrefectClient, this: FlowRun, queues: dict[UUID, WorkQueue], waiting: Sequence[FlowRun]) -> int:
    """Return how many flow runs of `queues` give way before `this`, or have done so since the first of `waiting` waits."""
    first, last, mine = _since(waiting[0]), _since(waiting[-1]), _rank(this, queues)

    def is_before(other: FlowRun) -> bool:
        if other.state is not None and other.state.name == YIELDED:
            return _since(other) >= first
        return other.id != this.id and _gives_way(other) and _since(other) <= last and _rank(other, queues) > mine

    states = FlowRunFilterState(name=FlowRunFilterStateName(any_=_ALIVE_OR_YIELDED))
    return sum(map(is_before, _read(client, states, queues)))


def _rank(flow_run: FlowRun, queues: dict[UUID, WorkQueue]) -> tuple[int, datetime, UUID]:
    """Return by what flow runs give way, the highest first: one that began last has the least to do again."""
    assert flow_run.work_queue_id is not None
    return queues[flow_run.work_queue_id].priority or 0, _since(flow_run), flow_run.id


def _gives_way(flow_run: FlowRun) -> bool:
    """Return whether the parameters of a training say so; those of a block do not."""
    run = flow_run.parameters.get("run")
    return isinstance(run, dict) and run.get("yields_to_urgent") is True


def _num_overdue(waiting: FlowRun) -> int:
    return max(0, int((datetime.now(timezone.utc) - _since(waiting)).total_seconds() // _TURN_S))


def _since(flow_run: FlowRun) -> datetime:
    """Return when a flow run came into its state, by the clock of Prefect's server."""
    assert flow_run.state is not None
    return flow_run.state.timestamp


def _read(client: SyncPrefectClient, states: FlowRunFilterState, queues: Collection[UUID]) -> list[FlowRun]:
    """Return the flow runs of these queues alone: each training of a pool asks, and thousands of trials may wait in it."""
    return list(
        read_pages(
            client.read_flow_runs,
            flow_run_filter=FlowRunFilter(state=states),
            work_queue_filter=WorkQueueFilter(id=WorkQueueFilterId(any_=list(queues))),
        )
    )
