"""The restart of a crashed flow run by an automation, and the tries of one call in a flow, from the labels of flow runs."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect_torch.flows.monitoring.text import page_url

RESTARTS_LABEL = "prefect-torch.restarts"
RESUMES_LABEL = "prefect-torch.resumes"
FIRST_NAME_LABEL = "prefect-torch.first-name"
RESTART_TAG = "restart"
_TRIES_LABEL = "prefect-torch.tries."  # and the call
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


def tries_before(client: SyncPrefectClient, outermost: UUID, call: str, this_try: str, flow_run_id: UUID) -> tuple[str, ...]:
    """Return the subflow runs that a call has had in earlier tries, and record that of this try; two requests.

    Prefect makes another subflow run each time that its parent is retried, and does not relate the two.

    Args:
        client: A client of the API that has the flow runs.
        outermost: The outermost flow run, whose labels the resumer hands on to its restart.
        call: What identifies the flows and the task on the way to the subflow.
        this_try: What identifies the try of all of them together. A loop may have several subflow runs in it.
        flow_run_id: The subflow run.

    """
    label, this = f"{_TRIES_LABEL}{call}", f"{this_try}/{flow_run_id}"
    with _recording:
        known = str(client.read_flow_run(outermost).labels.get(label, "")).split()
        client.update_flow_run_labels(outermost, {label: " ".join([*known, this])})
    return tuple(of_try.rpartition("/")[2] for of_try in known if not of_try.startswith(f"{this_try}/"))


def first_name_of(client: SyncPrefectClient, outermost: FlowRun) -> str:
    """Return the name that a flow run, or the first one that it restarts, had at the first call of this; one request then.

    A flow's `flow_run_name` is evaluated again in each process, and a person may change the name in the UI.
    """
    if FIRST_NAME_LABEL not in outermost.labels:
        with _recording:
            client.update_flow_run_labels(outermost.id, {FIRST_NAME_LABEL: outermost.name})
    return str(outermost.labels.get(FIRST_NAME_LABEL, outermost.name))
