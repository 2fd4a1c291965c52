"""Flows whose failures fit on a screen: their exceptions have no frames that say nothing to a user."""

import asyncio
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.exceptions import ParameterBindError, ParameterTypeError, SignatureMismatchError
from prefect.transactions import BaseTransaction
from prefect_torch.flows.interruptions import call_cancellable
from prefect_torch.flows.leading import set_terminated_state
from prefect_torch.flows.monitoring.parameters import as_shown
from prefect_torch.flows.monitoring.terminal import show_short
from prefect_torch.tasks.gang.processes.fork_servers import check_interpreter
from prefect_torch.tasks.options.run_form import plain_signature
from prefect_torch.tasks.prefect_api.final_state import call_for_result
from prefect_torch.tasks.prefect_api.settings import without_empty_url
from prefect_torch.tasks.rank.one_line_messages import restore_message
from prefect_torch.tasks.rank.tracebacks import is_defect, shorten
from prefect_torch.tasks.rank.user_code.function import check_is_no_rank

from .awaited_call import check_not_awaited
from .cluster_runner import use_threads
from .log_filter import is_called, is_validating, shorten_logs
from .parameters import large_parameters_explained
from .submitted_call import terminated_with_caller
from .unknown_arguments import explain_unbound

P = ParamSpec("P")
R = TypeVar("R")


class ShortTracebackFlow(Flow[P, R]):
    """A flow whose exceptions show its caller's frames, and none of Prefect's or this package's."""

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Call the flow; see `prefect.Flow`."""
            __tracebackhide__ = True  # IPython and pytest leave out the frame; Python itself shows short ones, see below
            check_interpreter()
            check_not_awaited(sys._getframe(1), self.fn.__name__)  # noqa: SLF001 - inspect reads the source of each frame
            shorten_logs()
            token = is_called.set(not kwargs.get("return_state", False))
            try:
                if "scaling" in self.parameters.properties:  # it starts ranks
                    check_is_no_rank()  # before Prefect has a flow run, or even a server, of each rank
                with (
                    large_parameters_explained(),
                    without_empty_url(),
                    terminated_with_caller(),
                    _outside_transactions(),
                ):
                    return _with_whole_message(call_cancellable(call_for_result, super().__call__, *args, **kwargs))
            except ParameterBindError as exc:
                raise ParameterBindError(explain_unbound(self.fn, args, kwargs) or str(exc)) from None
            except Exception as exc:
                whole = restore_message(exc)
                if is_defect(whole):
                    raise
                shorten(whole)
                show_short(whole)
                raise whole from whole.__cause__
            except (KeyboardInterrupt, asyncio.CancelledError) as exc:  # the latter at a timeout of the caller's task, say
                shorten(exc)
                show_short(exc)
                raise exc from None
            finally:
                is_called.reset(token)

        def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """Return the valid parameters; see `prefect.Flow`. The error is one line, as a state's, and not logged."""
            shorten_logs()
            token = is_validating.set(True)
            try:
                return super().validate_parameters(parameters)
            except SignatureMismatchError as exc:
                raise SignatureMismatchError(explain_unbound(self.fn, (), parameters) or str(exc)) from None
            except ParameterTypeError as exc:
                first, *others = str(exc).split("\n - ")
                raise ParameterTypeError(" ".join([first, "; ".join(others)])) from None
            finally:
                is_validating.reset(token)

        def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """Return the parameters as Prefect shows them; see `as_shown`."""
            return super().serialize_parameters({name: as_shown(value) for name, value in parameters.items()})

        def with_options(self, **options: Any) -> "ShortTracebackFlow[P, R]":
            """Return a copy with other options; see `prefect.Flow`. A task runner of Ray or Dask names the ranks' cluster.

            Given hooks run in addition to this package's own, which says what is safe and which end is a cancellation.
            """
            return short_tracebacks(super().with_options(**_with_own_hook(self, use_threads(options, self.task_runner))))


def _with_own_hook(flow: Flow[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose hooks do not replace the one that sets the state of a terminated flow run."""
    hooks = {"on_crashed": flow.on_crashed_hooks, "on_failure": flow.on_failure_hooks}
    lost = [
        kind
        for kind, own in hooks.items()
        if set_terminated_state in own
        and isinstance(given := options.get(kind), list)
        and given
        and set_terminated_state not in given
    ]
    return {**options, **{kind: [set_terminated_state, *options[kind]] for kind in lost}}


@contextmanager
def _outside_transactions() -> Iterator[None]:
    """Run the body outside of the caller's transactions, so that failures that are retried or skipped do not roll them back.

    Otherwise, the task of each failed attempt would roll them back: their hooks would run beside the next attempt, and nothing
    would be committed in the end. An exception that leaves the body still rolls them back, when it leaves the transactions.
    """
    current: Any = BaseTransaction.__var__
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


def _with_whole_message(returned: Any) -> Any:
    """Return what a call of a flow returned; the exception of a failed state has all lines of its message."""
    if isinstance(returned, State) and returned.is_failed():
        raised = returned.result(raise_on_failure=False)
        if (whole := restore_message(raised)) is not raised:
            returned.data = whole
    return returned


def short_tracebacks(flow: Flow[P, R]) -> Flow[P, R]:
    """Return `flow` as a ShortTracebackFlow; Prefect's decorator stays visible to its tools, which read it as text."""
    flow.__class__ = ShortTracebackFlow
    flow.__signature__ = plain_signature(inspect.signature(flow.fn))  # type: ignore[attr-defined]  # inspect reads it first
    return flow
