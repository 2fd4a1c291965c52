"""What a flow run does about a Prefect API that is away: its training goes on, and what it has to tell is told later."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from .embedded_server import ServerKeeper, embedded_server_kept_running

# Pauses of 2, 4, ..., 128 s: lines wait for the API for about four minutes. Prefect's own 5 retries drop them after one.
_RETRIES = 7
_LONGEST_S = 600.0
_POLL_S = 1.0


@contextmanager
def outlast_api_outages() -> Iterator[None]:
    """Keep lines logged in the body for minutes while Prefect's API is away, and end only once it answers, or after ten.

    Ended from outside (SIGTERM, a cancel), the body's end waits for nothing. A user's own PREFECT_CLIENT_MAX_RETRIES holds.

    Without that wait, the flow run would stay "Running" for ever and its process would end with a connection error: Prefect's
    engine proposes the final state for a minute only, with settings that the flow's body cannot change. An embedded server that
    dies is started again; one that cannot be is not waited for.
    """
    with temporary_settings(set_defaults={PREFECT_CLIENT_MAX_RETRIES: _RETRIES}), embedded_server_kept_running() as keeper:
        # What sends lines keeps the settings it was begun with: it is ended here, and the next line begins another.
        APILogWorker.instance().drain()
        try:
            yield
        except Exception:
            _wait_for_api(keeper)
            raise
        _wait_for_api(keeper)


def _wait_for_api(keeper: ServerKeeper) -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    is_told = False
    while (error := _outage()) is not None and time.monotonic() < deadline_s:
        if keeper.has_given_up:
            get_run_logger().error(
                "the training has ended, and Prefect's embedded server died and does not start again, so how it ended is not "
                "told there: all that it stored is in its storage, for Result.from_storage(storage, run) and the next start"
            )
            return
        if not is_told:
            get_run_logger().warning(
                "the training has ended, and Prefect's API is away (%r): waiting up to %g s to tell it how", error, _LONGEST_S
            )
            is_told = True
        time.sleep(_POLL_S)


def _outage() -> Exception | None:
    """Return why the API does not answer, or None; asks for the flow run, since a server without its database is away, too."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        try:
            client.read_flow_run(UUID(flow_run.id))
        except httpx.TransportError as exc:
            return exc
        except httpx.HTTPStatusError as exc:
            return exc if exc.response.is_server_error else None
        except ObjectNotFound:  # its database is another one now, and no waiting brings the old one back
            return None
    return None
