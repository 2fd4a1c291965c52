"""The name of a run that nobody named."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext
from prefect_torch.ckpt.runs.layout import check_run_name

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_DIGITS = 12  # of a digest, enough for a million runs below one flow run
_calls: Counter[tuple[UUID, int]] = Counter()  # by task run and try


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call from within a task.

    Attributes:
        flow_run_id: The task's flow run.
        place: The task run, and which of its calls this is.

    """

    flow_run_id: UUID | None
    place: str


def name_run(client: SyncPrefectClient, flow_run: FlowRun, within: TaskCall | None = None) -> str:
    """Return a name that all tries of one training share and no other training has.

    It is made from the flow run. Where that is a subflow, of which Prefect makes another one when its parent is retried, it is
    made from the outermost flow run and the place of each call on the way: the n-th call of that flow. Costs two requests for
    each flow above.

    Args:
        client: Knows the flow runs above.
        flow_run: The training's.
        within: The call from within a task, if there is one.

    """
    root, places = flow_run, []
    while root.parent_task_run_id is not None:
        call = client.read_task_run(root.parent_task_run_id)
        if call.flow_run_id is None:
            break
        key = within.place if within is not None and within.flow_run_id == call.flow_run_id else call.dynamic_key
        places.append(f"{call.task_key}/{key}")
        root = client.read_flow_run(call.flow_run_id)
    if not places:
        return default_run_name(root.name, str(root.id))
    digest = hashlib.sha256("\n".join([str(root.id), *places]).encode()).hexdigest()
    return _name(root.name, digest[:_DIGITS])


def count_call_in_task() -> TaskCall | None:
    """Return the call of the flow that runs here from within a task, numbered anew at each try; None outside of tasks.

    Prefect itself gives such a call a random key, since the calls of tasks that run at once have no order.
    """
    context = TaskRunContext.get()
    if context is None:
        return None
    task_run = context.task_run
    _calls[task_run.id, task_run.run_count] += 1
    number = _calls[task_run.id, task_run.run_count]
    return TaskCall(task_run.flow_run_id, f"{task_run.task_key}/{task_run.dynamic_key}/{number}")


def default_run_name(flow_run_name: str | None, flow_run_id: str) -> str:
    """Return the name for a flow run that has no parent."""
    return _name(flow_run_name, flow_run_id[:8])


def _name(flow_run_name: str | None, digits: str) -> str:
    name = _NOT_IN_NAMES.sub("-", flow_run_name or "run").strip("-._") or "run"
    return check_run_name(f"{name[:150]}-{digits}")
