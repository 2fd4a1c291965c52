"""The completed state of a flow, whose result reaches the caller even if Prefect loses it on the way."""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import MissingResult, ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect_torch.ckpt.text import encodable, without_login

from .outage import NO_ANSWER

P = ParamSpec("P")
R = TypeVar("R")
_logger = logging.getLogger(__name__)
_SET_STATE = re.compile(r"/flow_runs/[^/]+/set_state$")
# Of the flow that is called: the flow run's id and the state of each try that has completed.
_returned: ContextVar[list[tuple[str, State[Any]]] | None] = ContextVar("returned", default=None)


def completed(message: str, result: R) -> R:
    """Return the state in which a flow ends, to be returned by the flow: its call returns `result`.

    Args:
        message: The state's message; what Prefect's databases cannot hold is escaped in it.
        result: The flow's result.

    """
    state: State[R] = Completed(message=encodable(message), data=result)
    returned = _returned.get()
    if returned is not None:
        returned.append((flow_run.id, state.model_copy()))  # Prefect replaces the data of the other
    return cast("R", state)


def call_for_result(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a flow, and return its result, or its state with that, even if Prefect loses it or raises although it has completed.

    Prefect's client repeats the request for the final state when its answer is lost. The server, which has that state by then,
    refuses the second one, and answers with a state that has no data: MissingResult. If no state can be recorded, the error of
    that request is raised, and would also hide the flow's own exception: ObjectNotFound if the server's database was replaced
    or the flow run was deleted from it, and an HTTP error if the API key has expired meanwhile or the API stays away. For a
    flow that has retries and returns a state, Prefect's engine raises the exception of a try before the one that has completed.

    Args:
        call: Calls the flow.
        args: Its arguments.
        kwargs: Its keyword arguments; with `return_state`, a state is returned, also of a flow that has failed.

    """
    states: list[tuple[str, State[Any]]] = []
    token = _returned.set(states)
    try:
        returned = call(*args, **kwargs)
    except Exception as exc:
        if (state := _unrecorded(exc, states)) is None:
            raise
        if kwargs.get("return_state"):
            return cast("R", state)
        if isinstance(state.data, Exception):
            raise state.data from state.data.__cause__
        return cast("R", state.data)
    finally:
        _returned.reset(token)
    if isinstance(returned, State) and returned.is_completed() and returned.data is None and states:
        returned.data = states[-1][1].data
    return returned


def _unrecorded(error: Exception, states: list[tuple[str, State[Any]]]) -> State[Any] | None:
    """Return the state in which a flow has ended although its call raised `error`; None if that is the flow's own."""
    is_unrecorded = isinstance(error, ObjectNotFound) or is_of_state(error)
    if not states:
        if not is_unrecorded or (raised := _raised_before(error)) is None:
            return None
        return Failed(message=f"Flow run encountered an exception: {type(raised).__name__}: {raised}", data=raised)
    flow_run_id, state = states[-1]
    if isinstance(error, ObjectNotFound):
        _logger.warning("it has completed, but Prefect's API does not know flow run %s any more", flow_run_id)
    elif is_unrecorded:
        text = "it has completed, but Prefect's API did not record that of flow run %s: %s"
        _logger.warning(text, flow_run_id, without_login(str(error).partition("\n")[0] or repr(error)))
    return state if is_unrecorded or isinstance(error, MissingResult) or _has_completed(flow_run_id) else None


def is_of_state(error: BaseException) -> bool:
    """Return whether `error` is an HTTP error of a request to Prefect's API that sets the state of a flow run."""
    with suppress(RuntimeError):  # httpx: an error without a request
        if isinstance(error, httpx.HTTPError):
            return _SET_STATE.search(error.request.url.path) is not None
    return False


def _raised_before(lost: Exception) -> Exception | None:
    """Return the exception whose state Prefect's API did not record; None if `lost` is the flow's own."""
    error = lost.__context__
    while isinstance(error, (ObjectNotFound, httpx.HTTPError)):
        error = error.__context__
    return error if isinstance(error, Exception) else None


def _has_completed(flow_run_id: str) -> bool:
    # No answer counts as no.
    with suppress(*NO_ANSWER, ObjectNotFound), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        return state is not None and state.is_completed()
    return False
