"""`train` for callers in an event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import Any

from prefect_torch.ckpt import Checkpoint
from prefect_torch.flows.result import Result
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.gang.termination import TerminationSwitch

from .run_names import number_calls, numbered
from .training import train


async def atrain(
    train_fn: str | Callable[..., Any],
    config: dict[str, Any] | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    failure: FailureConfig | None = None,
    resume_from: str | Path | Checkpoint | None = None,
) -> Result:
    """Train as `train` does, without blocking the event loop: the flow runs in a thread, as a subflow of the caller's flow.

    Any number of trainings run concurrently, each in a thread of its own.

    When the caller is cancelled, the ranks have `FailureConfig.grace_s` for a last checkpoint. The cancellation continues
    when they have ended, so none of them outlives the await.

    Args:
        train_fn: See `train`, as for all arguments.
        config: The function's argument.
        scaling: The number of ranks and their devices.
        run: The run's name, the location of its checkpoints, and how it starts.
        checkpoint: Which checkpoints are kept.
        failure: How often the training is restarted.
        resume_from: The initial checkpoint, of another run.

    Raises:
        Exception: The exception that `train` raises; a StopIteration as the cause of a RuntimeError, as from any coroutine.
        asyncio.CancelledError: If the caller is cancelled.

    """
    switch, calls = TerminationSwitch(), number_calls()

    def call() -> Result:
        try:
            with numbered(calls), switch.governs():
                return train(train_fn, config, scaling, run, checkpoint, failure, resume_from)
        except StopIteration as exc:  # an asyncio.Future that was given one would never be done
            raise RuntimeError("the training raised StopIteration") from exc

    work = _in_thread_of_its_own(call)
    while True:
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError as exc:
            if work.done():
                raise
            switch.cause = switch.cause or exc  # a second cancellation waits for the same end
        else:
            if switch.cause is not None:  # it came when the ranks had ended
                raise switch.cause
            return result


def _in_thread_of_its_own(call: Callable[[], Result]) -> asyncio.Future[Result]:
    """Start a call in a copy of this context, which makes the flow a subflow.

    The event loop's own threads (`asyncio.to_thread`) are few, and `getaddrinfo` and other code need them meanwhile.
    """
    called: Future[Result] = Future()
    called.set_running_or_notify_cancel()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - raised by the await
            called.set_exception(exc)

    threading.Thread(target=copy_context().run, args=(run,), name="atrain").start()
    return asyncio.wrap_future(called)
