"""The completed state of a flow, whose result reaches the caller also where Prefect loses it on the way."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from prefect.exceptions import MissingResult
from prefect.states import Completed

P = ParamSpec("P")
R = TypeVar("R")
_returned: ContextVar[list[Any] | None] = ContextVar("returned", default=None)  # by the flow that is called, one for each run


def completed(message: str, result: R) -> R:
    """Return the state in which a flow ends, to be returned by the flow: its call returns `result`.

    Args:
        message: The state's message.
        result: The flow's result.

    """
    returned = _returned.get()
    if returned is not None:
        returned.append(result)
    return cast("R", Completed(message=message, data=result))


def call_for_result(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a flow, and return its result also where Prefect raises MissingResult for one that has completed.

    Prefect's client repeats the request for the final state when its answer is lost. The server, which has that state by then,
    refuses the second one, and answers with a state that has no data.

    Args:
        call: Calls the flow.
        args: Its arguments.
        kwargs: The same.

    """
    results: list[Any] = []
    token = _returned.set(results)
    try:
        return call(*args, **kwargs)
    except MissingResult:
        if not results:
            raise
        result: R = results[-1]
        return result
    finally:
        _returned.reset(token)
