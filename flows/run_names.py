"""The name of a run for which the user gave none, the same for all tries of one training."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from prefect_torch.ckpt.runs.layout import check_run_name
from prefect_torch.flows.monitoring.restarted import first_name_of, restarted_before

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_DIGITS = 12
_calls: Counter[tuple[UUID, int]] = Counter()  # by task run and try
_codes: dict[tuple[UUID | int | str, ...], list[list[str]]] = {}  # of the flows that are called, by try and calls


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call of a flow from within a task.

    Attributes:
        flow_run_id: The task's flow run.
        key: The task run, and the number of the call in it.

    """

    flow_run_id: UUID | None
    key: str


def name_run(client: SyncPrefectClient, flow_run: FlowRun, within: TaskCall | None = None) -> str:
    """Return a name that all tries of one training share and no other training has.

    It is made from the flow run. Since Prefect makes another subflow run each time that its parent is retried, the name of a
    subflow is made from the outermost flow run and from each call on the way to the subflow: the flow and the number of the
    call. Of a chain of restarts, it is made from the first flow run. Edits of code and new names of flow runs change nothing.
    Costs two requests for each flow above, one for each restart, and one to record the outermost flow run's name.

    Args:
        client: A client of the API that has the flow runs above.
        flow_run: The training's flow run.
        within: The call from within a task; None if the flow was not called from one.

    """
    root, calls, codes = flow_run, list[str](), list[str]()
    while root.parent_task_run_id is not None:
        call = client.read_task_run(root.parent_task_run_id)
        if call.flow_run_id is None:
            break
        key = within.key if within is not None and within.flow_run_id == call.flow_run_id else call.dynamic_key
        calls.append(f"{root.flow_id}/{key}")
        codes.append(call.task_key)
        root = client.read_flow_run(call.flow_run_id)
    first_id = [str(root.id), *restarted_before(client, root)][-1]
    first_name = first_name_of(client, root)
    if not calls:
        return default_run_name(first_name, first_id)
    # Prefect numbers the calls of each code, and two flows may have one name. The code itself changes from try to try.
    known = _codes.setdefault((root.id, root.run_count, *calls), [])
    if codes not in known:
        known.append(codes)
    return _name(first_name, digest_of([first_id, *calls, *["another"] * known.index(codes)]))


def name_of_flow_run() -> str:
    """Return a name for the current flow run's training or sweep, for which the user gave none."""
    with get_client(sync_client=True) as client:
        return name_run(client, client.read_flow_run(UUID(flow_run.id)), count_call_in_task())


def count_call_in_task() -> TaskCall | None:
    """Return the call of the current flow from within a task, numbered from 1 in each try; None outside of tasks.

    Prefect itself gives such a call a random key, since the calls of concurrent tasks have no order.
    """
    context = TaskRunContext.get()
    if context is None:
        return None
    task_run = context.task_run
    _calls[task_run.id, task_run.run_count] += 1
    number = _calls[task_run.id, task_run.run_count]
    return TaskCall(task_run.flow_run_id, f"{context.task.name}/{task_run.dynamic_key}/{number}")


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
