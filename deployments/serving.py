"""Serving while Prefect's API is away or refuses, and after it: Prefect's own runner ends in minutes, with its flow runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from prefect.utilities.services import critical_service_loop
from prefect_torch.ckpt.text import without_login
from prefect_torch.tasks.prefect_api.outage import NO_ANSWER, is_key_refused, is_outage, repeat_without_database

# Where the runner finds the loop that polls for due flow runs, and the one for those that are cancelled or suspended.
_DUE = "prefect.runner._scheduled_run_poller.critical_service_loop"
_CANCELLED = "prefect._internal.observers.critical_service_loop"
_CANCELLED_SINCE_3_9 = "prefect._internal._observation_delivery.critical_service_loop"
_AWAY = "Prefect's API is away (%s): flow runs go on, and due ones start when it is back"
_REFUSED = (
    "Prefect's API refuses the key of this process (%s): flow runs go on, and due ones wait. Unless it is to be valid again, "
    "start another `serve` with a new key, and end this one when its flow runs have ended"
)
_logger = logging.getLogger(__name__)


@contextmanager
def runner_outlasts_outages(after_outage: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let the runners of the body poll on while Prefect's API is away or refuses the key; call `after_outage` afterwards.

    Otherwise, a refusal, or three polls in a row without an answer, end the polling for cancellations and suspensions, and the
    runner. The runner ends all flow runs that it has started, and no automation restarts them: nothing runs the restarts.

    Requests that a server without its database answers are repeated for a minute, also by a process that begins a flow run:
    otherwise that would end, and the runner fail to tell it, so that the flow run would stay Pending.
    """
    cancelled = dict.fromkeys((_CANCELLED, _CANCELLED_SINCE_3_9), partial(_poll_despite_outages, lambda: None))
    _replace({_DUE: partial(_poll_despite_outages, after_outage), **cancelled})
    try:
        with repeat_without_database():
            yield
    finally:
        _replace(dict.fromkeys((_DUE, *cancelled), critical_service_loop))


def _replace(loops: Mapping[str, Callable[..., Awaitable[None]]]) -> None:
    """Put each loop in its place, if the installed Prefect has that."""
    for place, loop in loops.items():
        module, _, name = place.rpartition(".")
        if find_spec(module) is not None and hasattr(import_module(module), name):
            setattr(import_module(module), name, loop)


async def _poll_despite_outages(
    after_outage: Callable[[], object], workload: Callable[[], Awaitable[None]], interval: float, **options: Any
) -> None:
    """Run Prefect's loop with a workload that passes over an outage or a refusal; its beginning and its end are logged."""
    lost: str | None = None

    async def poll() -> None:
        nonlocal lost
        try:
            await workload()
            if lost is not None:
                await asyncio.to_thread(_log_refusal, after_outage)
        except NO_ANSWER as exc:
            if not _may_pass(exc):
                raise
            said = _REFUSED if is_key_refused(exc) else _AWAY
            if lost != said:
                _logger.warning(said, without_login(repr(exc)))
            lost = said
        else:
            if lost is not None:
                _logger.warning("Prefect's API is back")
            lost = None

    await critical_service_loop(poll, interval, **options)


def _log_refusal(after_outage: Callable[[], object]) -> None:
    """Call `after_outage`; an error of it that would come again is logged, and ends no flow runs."""
    try:
        after_outage()
    except Exception as exc:
        if _may_pass(exc):
            raise
        _logger.warning("flow runs that died while Prefect's API was away are not restarted: %s", without_login(repr(exc)))


def _may_pass(error: Exception) -> bool:
    return is_outage(error) or is_key_refused(error)
