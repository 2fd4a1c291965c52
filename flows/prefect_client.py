"""Clients of Prefect's API for threads that show a training: each has its own, since a flow's is bound to the flow's thread."""

import ssl
from functools import cache
from typing import Any

import httpx
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY


def own_connections(timeout_s: float) -> dict[str, Any]:
    """Return the settings of httpx with which Prefect's `get_client` returns a new client, not the flow's.

    Args:
        timeout_s: The longest time for each step of a request.

    """
    if PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value():
        return {"timeout": timeout_s}
    return {"timeout": timeout_s, "verify": _trusted(PREFECT_API_SSL_CERT_FILE.value())}


@cache
def _trusted(cert_file: str | None) -> ssl.SSLContext:
    """Return the context that each client of Prefect makes for itself otherwise, which takes 40 ms of CPU."""
    return httpx.create_ssl_context() if cert_file is None else ssl.create_default_context(cafile=cert_file)
