"""Checks of the installed versions and of Prefect's API."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from prefect_torch.ckpt.text import show_some, without_login

from .findings import Finding, Status

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_OLDEST_PYTHON = (3, 10)
_NEWEST_STRICT_PREFECT = (3, 8, 8)  # up to this version the server cannot use a `ServerLibrary`'s refused versions
_API_TIMEOUT_S = 10
_LONG_OUTAGE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class ServerLibrary:
    """A dependency of Prefect's server, and the first version with which the server fails.

    Attributes:
        name: Its name on PyPI.
        first_refused: The first version with which the server fails.
        consequence: How the server fails.
        status: The status of the finding if the server runs on this machine.

    """

    name: str
    first_refused: tuple[int, int]
    consequence: str
    status: Status


FASTAPI = ServerLibrary("fastapi", (0, 151), "refuses requests of its own client, or does not start", "wrong")
SQLALCHEMY = ServerLibrary("sqlalchemy", (2, 1), "starts no scheduled deployment", "warning")


def check_python() -> Iterator[Finding]:
    """Check the version of the interpreter."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= _OLDEST_PYTHON
    yield Finding("python", "ok" if good else "wrong", found, "" if good else "use Python 3.10 or newer")


def check_prefect() -> Iterator[Finding]:
    """Check Prefect's version against the one that this package requires."""
    found = version("prefect")
    needed = next(one for one in map(Requirement, requires("prefect-torch") or ()) if one.name == "prefect")
    good = needed.specifier.contains(found, prereleases=True)
    yield Finding("prefect", "ok" if good else "wrong", found, "" if good else f"pip install '{needed.name}{needed.specifier}'")


def check_server_library(library: ServerLibrary) -> Iterator[Finding]:
    """Check whether a Prefect server can run with the installed version of a library."""
    name = library.name
    try:
        found = version(name)
    except PackageNotFoundError:
        yield Finding(
            name, "warning", "not installed: no Prefect server can run here", "pip install prefect, or set PREFECT_API_URL"
        )
        return
    if _parts(found) < library.first_refused or _parts(version("prefect")) > _NEWEST_STRICT_PREFECT:
        yield Finding(name, "ok", found)
        return
    yield Finding(
        name,
        "warning" if _api_url() else library.status,
        f"{found}: with it, a server of prefect {version('prefect')} {library.consequence}",
        f"pip install '{name}<{'.'.join(map(str, library.first_refused))}' on the machine of the Prefect server",
    )


def check_api() -> Iterator[Finding]:
    """Query Prefect's API, which needs its database and credentials, and check what an outage would cost."""
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - seconds, for doctor only
    from prefect.settings import get_current_settings  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.tasks.prefect_api.embedded_server.database import newer_database  # noqa: PLC0415 - imports prefect
    from prefect_torch.tasks.prefect_api.settings import unusable_home, unused_key  # noqa: PLC0415 - imports prefect

    url = _api_url()
    if url is None:
        if not get_current_settings().server.ephemeral.enabled:
            yield Finding("prefect api", "wrong", "no PREFECT_API_URL, and ephemeral mode is off", "set PREFECT_API_URL")
        elif (why := unusable_home() or newer_database()) is not None:
            yield Finding("prefect api", "wrong", *why)
        elif (why := unused_key()) is not None:
            yield Finding("prefect api", "warning", *why)
        else:
            yield Finding("prefect api", "ok", "no PREFECT_API_URL: each flow starts its own server for its duration")
        return
    try:
        with get_client(httpx_settings={"timeout": _API_TIMEOUT_S}, sync_client=True) as client:
            client.read_flows(limit=1)
            deployed = [*_check_limits(client), *_check_restarts(client), *_check_queues(client)]
    except Exception as exc:  # noqa: BLE001 - with any error the API cannot be used
        advice = (
            "start it (prefect server start), correct PREFECT_API_URL, or log in (PREFECT_API_AUTH_STRING, prefect cloud login)"
        )
        yield Finding("prefect api", "wrong", without_login(f"{url}: {type(exc).__name__}: {exc}"), advice)
    else:
        yield Finding("prefect api", "ok", f"{url} answers")
        yield from deployed


def _check_limits(client: "SyncPrefectClient") -> Iterator[Finding]:
    from prefect_torch.deployments import concurrency_leases as limits  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.deployments.server_settings import keeps_leases_in_memory  # noqa: PLC0415 - seconds, for doctor only

    limited = sorted(limits.limited_deployments(client))
    if not limited or not keeps_leases_in_memory(client):
        yield Finding("deployments", "ok", f"{len(limited) or 'none'} with a concurrency limit")
        return
    yield Finding(
        "deployments", "warning", f"concurrency limits on {show_some(limited)}: {limits.LEASES_LOST}", limits.WITHOUT_LEASE
    )


def _check_restarts(client: "SyncPrefectClient") -> Iterator[Finding]:
    """Check whether automations restart flow runs in work pools that die while the server is away; `serve` does it itself."""
    from prefect_torch.deployments.restarts import restarted_in_pools  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.deployments.server_settings import remembers_heartbeats_for  # noqa: PLC0415 - seconds, for doctor only

    restarted = sorted(restarted_in_pools(client))
    remembered = remembers_heartbeats_for(client) if restarted else None
    if remembered is None or remembered >= _LONG_OUTAGE:
        yield Finding("restarts", "ok", f"{len(restarted) or 'none'} by automations in work pools")
        return
    found = (
        f"of {show_some(restarted)}: a flow run that dies during an outage of the Prefect server is not restarted if the "
        f"outage ends more than {remembered.total_seconds():g} s after the death would have been noticed"
    )
    yield Finding("restarts", "warning", found, "start the server with PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER=P1D")


def _check_queues(client: "SyncPrefectClient") -> Iterator[Finding]:
    """Yield a warning if what restarts flow runs has to wait for a slot that a dead one may keep."""
    from prefect_torch.deployments.restarts import restarted_behind_limits  # noqa: PLC0415 - seconds, for doctor only

    if waiting := sorted(restarted_behind_limits(client)):
        found = (
            f"what restarts flow runs waits in a work queue with a concurrency limit, for {show_some(waiting)}: one that died "
            "silently keeps its slot there until it begins"
        )
        advice = "deploy them, or call resume_crashed, again: it then waits in the pool's default queue, which is to have none"
        yield Finding("queues", "warning", found, advice)


def _api_url() -> str | None:
    from prefect.settings import get_current_settings  # noqa: PLC0415 - seconds, for doctor only

    url = get_current_settings().api.url
    return None if url is None else without_login(url)


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
