"""Ends the trainings that tasks in threads call when the flow that submitted the tasks is interrupted."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prefect.context import FlowRunContext, TaskRunContext
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.tasks.gang.termination import TERMINATIONS, TerminationSwitch


@contextmanager
def terminated_with_caller() -> Iterator[None]:
    """Terminate the training of the body when the flow that submitted the calling task is interrupted.

    Ctrl-C and SIGTERM reach the main thread alone. There they end the flow, which then waits for its tasks in threads: a
    training would continue to its end, or to the SIGKILL that follows, without a last checkpoint.
    """
    task, above = TaskRunContext.get(), FlowRunContext.get()
    runner = None if task is None or above is None else above.task_runner
    if not isinstance(runner, ThreadPoolTaskRunner):
        yield
        return
    switch = TerminationSwitch.current() or TerminationSwitch()
    switches = _switches_of(runner)
    switches.append(switch)
    try:
        with switch.governs():
            yield
    finally:
        switches.remove(switch)


def _switches_of(runner: ThreadPoolTaskRunner[Any]) -> list[TerminationSwitch]:
    """Return the switches that an interruption of the runner sets; no other end does, since a flow need not wait for tasks."""
    if not isinstance(runner.cancel_all, partial):  # which Prefect calls when the flow's body has ended, before it waits
        runner.cancel_all = partial(_cancel_all, runner.cancel_all, [])  # type: ignore[method-assign]
    assert isinstance(runner.cancel_all, partial)
    switches: list[TerminationSwitch] = runner.cancel_all.args[1]
    return switches


def _cancel_all(cancel_all: Callable[[], None], switches: list[TerminationSwitch]) -> None:
    if isinstance(sys.exc_info()[1], TERMINATIONS):
        for switch in [*switches]:
            switch.cause = switch.cause or asyncio.CancelledError()
    cancel_all()
