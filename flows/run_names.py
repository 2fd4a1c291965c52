"""The name of a run for which the user gave none, the same for all tries of one training."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.runtime import flow_run
from prefect_torch.ckpt.runs.layout import check_run_name
from prefect_torch.flows.monitoring.restarted import first_known, first_name_of, restarted_before
from prefect_torch.tasks.prefect_api.flow_run import has_own_process

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_DIGITS = 12
_numbers: dict[tuple[UUID, int], Iterator[int]] = {}  # of the next call, by task run or flow run, and try
_codes: dict[tuple[UUID | int | str, ...], list[list[str]]] = {}  # of the flows that are called, by try and calls


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call of a flow which has in each try a number of its own, since the key that Prefect gives it differs between tries.

    Attributes:
        flow_run_id: The flow run that calls, itself or in a task; None for a task that no flow calls.
        key: The task run, if it is called in one, and the number of the call.
        task_name: The name of the task in which it is called; None if it is called in none.

    """

    flow_run_id: UUID | None
    key: str
    task_name: str | None = None


_given: ContextVar[tuple[NumberedCall, ...] | None] = ContextVar("numbered_calls", default=None)


def name_run(client: SyncPrefectClient, flow_run: FlowRun, numbered: Sequence[NumberedCall] = ()) -> str:
    """Return a name that all tries of one training share and no other training has.

    It is made from the flow run. Since Prefect makes another subflow run each time that its parent is retried, the name of a
    subflow is made from the outermost flow run and from each call on the way to the subflow: the flow and the number of the
    call; of a flow run in a process of its own, the deployment, or the function that is bound to a work pool, and the
    parameters, since nobody here knows which of several concurrent calls has which number in another try. Where a task that no
    flow calls is outermost, it is made from the task run. For the last flow run of a chain of restarts stands the first: it
    alone has a parent. New names of flow runs change nothing, nor do edits of code, except of a bound function. Costs two
    requests for each flow above, one for each restart, and one to record the outermost flow run's name.

    Args:
        client: A client of the API that has the flow runs above.
        flow_run: The training's flow run.
        numbered: The calls on the way to the flow that have numbers of their own.

    """
    numbers = {call.flow_run_id: call for call in numbered}
    outermost, calls, codes = flow_run, list[str](), list[str]()
    while (root := first_known(client, outermost)).parent_task_run_id is not None:
        call = client.read_task_run(root.parent_task_run_id)
        if call.flow_run_id is None:
            break
        calls.append(_call_of(root, call, numbers.get(call.flow_run_id)))
        codes.append(call.task_key)
        outermost = client.read_flow_run(call.flow_run_id)
    if (in_task := numbers.get(None)) is not None:  # each try of the task calls another flow run
        first_id, first_name = f"{root.flow_id}/{in_task.key}", in_task.task_name
    else:
        first_id, first_name = [str(root.id), *restarted_before(client, root)][-1], first_name_of(client, root)
        if not calls:
            return default_run_name(first_name, first_id)
    # Prefect numbers the calls of each code, and two flows may have one name. The code itself changes from try to try.
    known = _codes.setdefault((outermost.id, outermost.run_count, *calls), [])
    if codes not in known:
        known.append(codes)
    return _name(first_name, digest_of([first_id, *calls, *["another"] * known.index(codes)]))


def _call_of(called: FlowRun, call: TaskRun, number: NumberedCall | None) -> str:
    """Return what identifies a call of its caller, for which Prefect made the task run `call`, in all tries."""
    key = call.dynamic_key if number is None else number.key
    if not has_own_process(called):
        return f"{called.flow_id}/{key}"
    # Prefect numbers the calls of each deployment and function, of which many have one flow, and concurrent ones in any order.
    parameters = digest_of([json.dumps(called.parameters, sort_keys=True)])
    return f"{called.deployment_id or call.task_key}/{key}/{parameters}"


def name_of_flow_run() -> str:
    """Return a name for the current flow run's training or sweep, for which the user gave none."""
    with get_client(sync_client=True) as client:
        return name_run(client, client.read_flow_run(UUID(flow_run.id)), numbered_calls())


def numbered_calls() -> tuple[NumberedCall, ...]:
    """Return the calls on the way to the current flow that have numbers: from within a task, or given by `number_calls`.

    Prefect itself gives a call from a task a random key, since the calls of concurrent tasks have no order.
    """
    return _calls_in_task() if (given := _given.get()) is None else given


def number_calls() -> tuple[NumberedCall, ...]:
    """Give the call of a flow, which the current flow or task is about to make in another thread, the next number.

    Prefect numbers the calls of several threads in the order in which these arrive, which differs from try to try.
    """
    calls, context = _calls_in_task(), FlowRunContext.get()
    calling = None if context is None else context.flow_run
    if calling is None or calling.id in {call.flow_run_id for call in calls}:
        return calls
    return (*calls, NumberedCall(calling.id, f"thread/{_next_number(calling.id, calling.run_count)}"))


@contextmanager
def numbered(calls: tuple[NumberedCall, ...]) -> Iterator[None]:
    """Let the flow that the body calls be one that `number_calls` has numbered."""
    token = _given.set(calls)
    try:
        yield
    finally:
        _given.reset(token)


def _calls_in_task() -> tuple[NumberedCall, ...]:
    context = TaskRunContext.get()
    if context is None:
        return ()
    task_run = context.task_run
    number = _next_number(task_run.id, task_run.run_count)
    task_name = context.task.name
    return (NumberedCall(task_run.flow_run_id, f"{task_name}/{task_run.dynamic_key}/{number}", task_name),)


def _next_number(run_id: UUID, run_count: int) -> int:
    """Return the number of the next call, from 1, in one step: several threads may call."""
    return next(_numbers.setdefault((run_id, run_count), count(1)))


def default_run_name(flow_run_name: str | None, flow_run_id: str) -> str:
    """Return the run name of a flow run without a parent: its name, and random digits of its id.

    A schedule creates many flow runs together, a hundred at first, whose ids (UUID version 7) begin with the time.
    """
    begins_with_time = UUID(flow_run_id).version == 7  # noqa: PLR2004 - the version's number
    return _name(flow_run_name, flow_run_id[-8:] if begins_with_time else flow_run_id[:8])


def digest_of(texts: Sequence[str]) -> str:
    """Return the digits of a digest of `texts`, enough for a million runs below one flow run."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:_DIGITS]


def _name(flow_run_name: str | None, digits: str) -> str:
    name = _NOT_IN_NAMES.sub("-", flow_run_name or "run").strip("-._") or "run"
    return check_run_name(f"{name[:150]}-{digits}")
