"""The time as records tell it."""

from datetime import datetime, timezone


def utc_now() -> str:
    """Return the time by this machine's clock: UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat()
