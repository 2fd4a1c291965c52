"""The completed state of a flow, whose result reaches the caller also where Prefect loses it on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from prefect.states import Completed

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


@contextmanager
def returned_results() -> Iterator[list[Any]]:
    """Give the results with which the flow that is called in the body has completed.

    Prefect's client repeats the request for the final state when its answer is lost. The server, which has that state by then,
    refuses the second one, and answers with a state that has no data: the engine raises MissingResult.
    """
    results: list[Any] = []
    token = _returned.set(results)
    try:
        yield results
    finally:
        _returned.reset(token)
