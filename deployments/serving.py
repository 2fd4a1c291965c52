"""Serving while Prefect's API is away: Prefect's own runner ends after four minutes, and its flow runs with it."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import httpx
from prefect.utilities.services import critical_service_loop
from prefect_torch.flows.prefect_api.outage import is_outage

# Where the runner finds the loop that polls for due flow runs, and for those that are cancelled or suspended.
_LOOPS = ("prefect.runner._scheduled_run_poller.critical_service_loop", "prefect._internal.observers.critical_service_loop")
_logger = logging.getLogger(__name__)


@contextmanager
def runner_outlasts_outages() -> Iterator[None]:
    """Let the runners of the body poll on for as long as Prefect's API is away.

    Otherwise, three polls in a row without an answer end the polling for cancellations and suspensions, and the runner. The
    runner ends all flow runs that it has started, and no automation restarts them, since nothing runs the restarts.
    """
    places = [(import_module(module), name) for module, _, name in (loop.rpartition(".") for loop in _LOOPS)]
    for module, name in places:
        setattr(module, name, _poll_patiently)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, critical_service_loop)


async def _poll_patiently(workload: Callable[[], Awaitable[None]], interval: float, **options: Any) -> None:
    """Run Prefect's loop with a workload that passes over an outage; its beginning and its end are logged."""
    is_lost = False

    async def poll() -> None:
        nonlocal is_lost
        try:
            await workload()
        except httpx.HTTPError as exc:
            if not is_outage(exc):
                raise
            if not is_lost:
                _logger.warning("Prefect's API is away (%r): flow runs go on, and due ones start when it is back", exc)
            is_lost = True
        else:
            if is_lost:
                _logger.warning("Prefect's API is back")
            is_lost = False

    await critical_service_loop(poll, interval, **options)
