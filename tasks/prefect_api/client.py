"""Clients of Prefect's API: for threads that show a training, since a flow's client is bound to its thread, and the engine."""

import secrets
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun, FlowRunPolicy, State
from prefect.context import AsyncClientContext, FlowRunContext, SyncClientContext, TagsContext
from prefect.flow_engine import FlowRunEngine
from prefect.flows import Flow
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY
from prefect.states import Pending, Running, to_state_create
from prefect.tasks import Task
from prefect.utilities.asyncutils import run_coro_as_sync

_NUM_SOON, _SOON_S = 3, 0.1
_REFUSALS = "prefect_torch_refusals"
_Context = TypeVar("_Context", AsyncClientContext, SyncClientContext)


class SubflowClients:
    """The clients with which Prefect's engine runs subflows in this process, open until they are closed.

    Otherwise, the engine makes a client for the parent task run of each subflow, which takes 40 ms of CPU for the certificates.
    A request that the server refuses with 503, as it does when another write has SQLite's lock, is repeated three times after
    a tenth of a second each, before Prefect's 2 s, 4 s and so on.
    """

    def __init__(self) -> None:
        self._asynchronous: AsyncClientContext = cast("Any", run_coro_as_sync(_opened()))
        self._synchronous = _context(SyncClientContext, _repeat_soon)
        self._synchronous.client.__enter__()
        self._places: dict[tuple[UUID, str], _Place] = {}
        self._placing = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the engine use them for the flows that are called in the body, in this thread."""
        with self._asynchronous.model_copy(), self._synchronous.model_copy():
            yield

    def call(self, flow: Flow[..., Any], name: str, parameters: dict[str, Any], key: str | None = None) -> Any:
        """Call a flow that has no `flow_run_name`, within `used` and a flow's body, and return what it returns.

        A plain call would request the id of the flow, an earlier flow run of the same call, the name, and the state Running,
        one after the other. This flow run is created with its name, and running.

        Args:
            flow: The flow.
            name: The name of the new flow run.
            parameters: Its parameters.
            key: The key by which the server recognizes a request that is repeated because its answer was lost; a random one if
                None.

        """
        engine = _SubflowEngine(flow, parameters)
        engine.create = partial(self._create_run, flow, name, parameters, key or secrets.token_hex(16))
        with engine.start():
            while engine.is_running():
                with engine.run_context():
                    engine.call_flow_fn()
        return engine.result()

    def _create_run(self, flow: Flow[..., Any], name: str, parameters: dict[str, Any], key: str) -> FlowRun:
        place = self._place(flow)
        wanted = FlowRunCreate(
            flow_id=place.flow_id,
            flow_version=flow.version,
            name=name,
            parameters=flow.serialize_parameters(parameters),
            tags=list(TagsContext.get().current_tags),
            parent_task_run_id=place.task_run_id,
            idempotency_key=key,
            state=to_state_create(Running()),
            empirical_policy=FlowRunPolicy(retries=flow.retries, retry_delay=int(flow.retry_delay_seconds or 0)),
        )
        body = wanted.model_dump(mode="json", exclude_unset=True)
        return FlowRun.model_validate(self._synchronous.client.request("POST", "/flow_runs/", json=body).json())

    def _place(self, flow: Flow[..., Any]) -> "_Place":
        """Return where flow runs of a flow belong below the current one: Prefect relates them by a task run.

        They share the task run, whose state is that of the flow run whose state was set last. Its key is random: Prefect would
        number the subflows of a flow run, and a retried flow run would take the results of its earlier subflows for those of
        others.
        """
        client, above = self._synchronous.client, FlowRunContext.get()
        assert above is not None
        assert above.flow_run is not None
        below = above.flow_run.id
        with self._placing:
            if (below, flow.name) not in self._places:
                flow_id = client.create_flow_from_name(flow.name)
                between: Task[..., Any] = Task(name=flow.name, fn=flow.fn, version=flow.version)
                run = client.create_task_run(between, below, str(uuid4()), name=flow.name, state=Pending())
                self._places[below, flow.name] = _Place(flow_id, run.id)
            return self._places[below, flow.name]

    def close(self) -> None:
        """Close their connections."""
        run_coro_as_sync(self._asynchronous.client.__aexit__(None, None, None))
        self._synchronous.client.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Place:
    """A flow, and the task run between a flow run and those of this flow below it."""

    flow_id: UUID
    task_run_id: UUID


class _SubflowEngine(FlowRunEngine[..., Any]):
    """Prefect's engine for a flow run that is created running; it would send a given flow run to the server again."""

    create: Callable[[], FlowRun]

    def create_flow_run(self, client: SyncPrefectClient) -> FlowRun:  # noqa: ARG002 - Prefect's signature
        """Create the flow run of a new subflow."""
        return self.create()

    def begin_run(self) -> State[Any]:
        """Return the state of the flow run: it runs already, and its parameters wait for nothing."""
        return self.state


async def _opened() -> AsyncClientContext:
    context = _context(AsyncClientContext, _arepeat_soon)
    await context.client.__aenter__()
    return context


def _context(kind: type[_Context], hook: Callable[[httpx.Response], object]) -> _Context:
    context = kind({**_trust(), "event_hooks": {"response": [hook]}})
    context._httpx_settings = None  # a caller without settings gets this client  # noqa: SLF001
    return context


async def _arepeat_soon(response: httpx.Response) -> None:
    _repeat_soon(response)


def _repeat_soon(response: httpx.Response) -> None:
    if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE or "Retry-After" in response.headers:
        return
    refusals = response.request.extensions.get(_REFUSALS, 0)
    response.request.extensions[_REFUSALS] = refusals + 1
    # Prefect itself would count the early repetitions, and wait 16 s after them.
    wait_s = _SOON_S if refusals < _NUM_SOON else 2 ** (refusals - _NUM_SOON + 1)
    response.headers["Retry-After"] = str(wait_s)


class LazyClient:
    """A client with connections of its own, opened when it is first used: each new one costs two requests.

    Args:
        timeout_s: See `own_connections`.

    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client: SyncPrefectClient | None = None

    def open(self) -> SyncPrefectClient:
        """Return the client."""
        if self._client is None:
            self._client = get_client(httpx_settings=own_connections(self._timeout_s), sync_client=True).__enter__()
        return self._client

    def close(self) -> None:
        """Close the client, if it was opened."""
        if self._client is not None:
            self._client.__exit__()


def own_connections(timeout_s: float) -> dict[str, Any]:
    """Return the settings of httpx with which Prefect's `get_client` returns a new client, not the flow's.

    Args:
        timeout_s: The longest time for each step of a request.

    """
    return {"timeout": timeout_s, **_trust()}


def _trust() -> dict[str, Any]:
    if PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value():
        return {}
    return {"verify": _trusted(PREFECT_API_SSL_CERT_FILE.value())}


@cache
def _trusted(cert_file: str | None) -> ssl.SSLContext:
    """Return the SSL context that each client of Prefect would otherwise make for itself, which takes 40 ms of CPU."""
    return httpx.create_ssl_context() if cert_file is None else ssl.create_default_context(cafile=cert_file)
