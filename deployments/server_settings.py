"""Settings of a Prefect server that decide what an outage of it, or a cancellation, costs."""

from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError
from pydantic import TypeAdapter

CANCELLATION_LIMIT = "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS"
_IN_MEMORY = "prefect.server.concurrency.lease_storage.memory"


def keeps_leases_in_memory(client: SyncPrefectClient) -> bool:
    """Return whether a Prefect server loses its leases at a restart; False for Prefect Cloud, which keeps them."""
    return bool(_read(client).get("concurrency", {}).get("lease_storage") == _IN_MEMORY)


def remembers_heartbeats_for(client: SyncPrefectClient) -> timedelta | None:
    """Return for how long after a flow run's silence was due a server still notices it; None for Prefect Cloud."""
    kept = _read(client).get("events", {}).get("expired_bucket_buffer")
    return None if kept is None else TypeAdapter(timedelta).validate_python(kept)


def longest_cancellation_s(client: SyncPrefectClient) -> float | None:
    """Return after how many seconds a server sets a Cancelling flow run to Cancelled; None if never, and for Prefect Cloud."""
    cleanup = _read(client).get("services", {}).get("cancellation_cleanup", {})
    limit_s: float | None = cleanup.get("cancelling_timeout_seconds")
    return limit_s if cleanup.get("enabled") else None


def _read(client: SyncPrefectClient) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = client.request("GET", "/admin/settings").json()
    except PrefectHTTPStatusError:
        return {}
    read: dict[str, Any] = settings.get("server", {})
    return read
