"""The restart of a crashed flow run by an automation, and the tries of one call in a flow, from the labels of flow runs."""

import json
import threading
from collections.abc import Collection, Container
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect_torch.flows.monitoring.text import page_url

RESTARTS_LABEL = "prefect-torch.restarts"
RESUMES_LABEL = "prefect-torch.resumes"
FIRST_NAME_LABEL = "prefect-torch.first-name"
RESTART_TAG = "restart"
_TRY_LABEL = "prefect-torch.try"
_recording = threading.Lock()  # the server reads all labels, and then writes all: of two requests, one is lost


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of a crashed flow run.

    Attributes:
        number: How often its training has been restarted.
        flow_run_id: The flow run that crashed.
        first_name: The name of the first flow run of the chain.

    """

    number: int
    flow_run_id: UUID
    first_name: str

    @classmethod
    def of(cls, flow_run: FlowRun) -> "Restart | None":
        """Return the restart that `flow_run` is; None unless an automation made it as one."""
        labels = flow_run.labels
        if RESUMES_LABEL not in labels:
            return None
        number, first_name = int(str(labels.get(RESTARTS_LABEL, 1))), str(labels.get(FIRST_NAME_LABEL, ""))
        return cls(number, UUID(str(labels[RESUMES_LABEL])), first_name)

    @property
    def url(self) -> str:
        """The page of the flow run that crashed."""
        return page_url("flow-run", self.flow_run_id)


def restarted_before(client: SyncPrefectClient, flow_run: FlowRun) -> tuple[str, ...]:
    """Return the earlier flow runs of the chain of restarts that `flow_run` ends, newest first; costs a request for each."""
    found: list[str] = []
    with suppress(ObjectNotFound):  # deleted by somebody: what it restarted is unknown
        while (restart := Restart.of(flow_run)) is not None:
            found.append(str(restart.flow_run_id))
            flow_run = client.read_flow_run(restart.flow_run_id)
    return tuple(found)


def first_known(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun:
    """Return the first flow run that Prefect knows of the chain of restarts that `flow_run` ends; costs a request for each."""
    with suppress(ObjectNotFound):
        while (restart := Restart.of(flow_run)) is not None:
            flow_run = client.read_flow_run(restart.flow_run_id)
    return flow_run


@dataclass(frozen=True, slots=True)
class CallTry:
    """One try of a call in a flow, of which Prefect makes another subflow run each time that the flow is retried.

    Attributes:
        call: What identifies the flows and the task on the way to the subflow.
        steps: The ids of the flow runs and the task run on this way, outermost first, each with its run count.
        process: The process.

    """

    call: str
    steps: tuple[tuple[str, int], ...]
    process: str

    @classmethod
    def of(cls, flow_run: FlowRun) -> "CallTry | None":
        """Return the try whose subflow run `flow_run` is; None if it has recorded none."""
        if (label := flow_run.labels.get(_TRY_LABEL)) is None:
            return None
        call, steps, process = json.loads(str(label))
        return cls(call, tuple((step, count) for step, count in steps), process)

    def record(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        """Record the try with its own subflow run, so that no other process writes the same labels; one request."""
        client.update_flow_run_labels(flow_run_id, {_TRY_LABEL: json.dumps([self.call, self.steps, self.process])})

    def is_earlier(self, later: "CallTry", restarted: Collection[str]) -> bool:
        """Return whether `later` is certainly a later try of the same call: the first step in which they differ was retried.

        A flow run that goes on after a suspension has another process, and the same run count. Another id is another call.

        Args:
            later: The try to compare with.
            restarted: The flow runs that the outermost one of `later` restarts.

        """
        if self.call != later.call:
            return False
        if self.steps[0][0] in restarted:
            return True
        for (step, count), (later_step, later_count) in zip(self.steps, later.steps, strict=False):
            if step != later_step:
                return False
            if count != later_count:
                return count < later_count
        return self.process != later.process


@dataclass(frozen=True, slots=True)
class EarlierTries(Container[str | None]):
    """The subflow runs that were earlier tries of a call; costs a request for each flow run that is looked for.

    Attributes:
        this: The try of the call.
        restarted: The flow runs that its outermost flow run restarts.

    """

    this: CallTry
    restarted: tuple[str, ...]

    def __contains__(self, flow_run_id: object) -> bool:
        """Return whether a flow run was an earlier try; False if Prefect does not know it."""
        try:
            known_id = UUID(str(flow_run_id))
        except ValueError:  # not of Prefect
            return False
        with suppress(ObjectNotFound), get_client(sync_client=True) as client:
            found = CallTry.of(client.read_flow_run(known_id))
            return found is not None and found.is_earlier(self.this, self.restarted)
        return False


def first_name_of(client: SyncPrefectClient, outermost: FlowRun) -> str:
    """Return the name that a flow run, or the first one that it restarts, had at the first call of this; one request then.

    A flow's `flow_run_name` is evaluated again in each process, and a person may change the name in the UI.
    """
    if FIRST_NAME_LABEL not in outermost.labels:
        with _recording:
            client.update_flow_run_labels(outermost.id, {FIRST_NAME_LABEL: outermost.name})
    return str(outermost.labels.get(FIRST_NAME_LABEL, outermost.name))
