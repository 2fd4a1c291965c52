"""Ends the trainings that tasks in threads call when a flow that submitted the tasks is interrupted or times out."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.flows.leading import TIMED_OUT
from prefect_torch.tasks.gang.termination import TERMINATIONS, TerminationSwitch

_registering = threading.Lock()  # tasks of one flow may begin at once


@contextmanager
def terminated_with_caller() -> Iterator[None]:
    """Terminate the training of the body when a flow that submitted the calling task is interrupted, or has timed out.

    Ctrl-C, SIGTERM and a flow's `timeout_seconds` reach the flow's thread alone. There they end the flow, which then waits for
    its tasks in threads: a training would continue to its end, or to the SIGKILL that follows, without a last checkpoint. The
    task may have called other flows, of which one calls the training.
    """
    above = [] if TaskRunContext.get() is None else [*_flows_above()]
    lists = [_switches_of(it.task_runner, it.flow_run) for it in above if isinstance(it.task_runner, ThreadPoolTaskRunner)]
    if not lists:
        yield
        return
    switch = TerminationSwitch.current() or TerminationSwitch()
    for switches in lists:
        switches.append(switch)
    try:
        with switch.governs():
            yield
    finally:
        for switches in lists:
            switches.remove(switch)


def _flows_above() -> Iterator[FlowRunContext]:
    """Yield the contexts of the flows of this process that call, the innermost first."""
    context = FlowRunContext.get()
    while isinstance(context, FlowRunContext):
        yield context
        token = context._token  # noqa: SLF001 - Prefect names no context but the innermost
        context = None if token is None else token.old_value


def _switches_of(runner: ThreadPoolTaskRunner[Any], flow_run: FlowRun | None) -> list[TerminationSwitch]:
    """Return the switches that an interruption of the runner sets; no usual end does, since a flow need not wait for tasks."""
    with _registering:
        if not isinstance(runner.cancel_all, partial):  # which Prefect calls when the flow's body has ended, before it waits
            runner.cancel_all = partial(_cancel_all, runner.cancel_all, flow_run, [])  # type: ignore[method-assign]
        assert isinstance(runner.cancel_all, partial)
        switches: list[TerminationSwitch] = runner.cancel_all.args[2]
        return switches


def _cancel_all(cancel_all: Callable[[], None], flow_run: FlowRun | None, switches: list[TerminationSwitch]) -> None:
    state = None if flow_run is None else flow_run.state
    if isinstance(sys.exc_info()[1], TERMINATIONS) or (state is not None and state.name == TIMED_OUT):
        for switch in [*switches]:
            switch.cause = switch.cause or asyncio.CancelledError()
    cancel_all()
