"""How long object_store's client waits, for the requests that another client has to send."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_PART = re.compile(r"([0-9.]+)\s*([a-zA-Z]+)")
# The units of the notation that object_store reads (https://docs.rs/humantime/latest/humantime/fn.parse_duration.html).
_UNITS_S = {
    **dict.fromkeys(("nsec", "ns"), 1e-9),
    **dict.fromkeys(("usec", "us"), 1e-6),
    **dict.fromkeys(("millis", "msec", "ms"), 1e-3),
    **dict.fromkeys(("seconds", "second", "secs", "sec", "s"), 1.0),
    **dict.fromkeys(("minutes", "minute", "mins", "min", "m"), 60.0),
    **dict.fromkeys(("hours", "hour", "hrs", "hr", "h"), 3600.0),
    **dict.fromkeys(("days", "day", "d"), 86400.0),
}
_LEAST_S, _MOST_S = 0.001, 7 * 86400.0  # no client takes 0 for a wait, nor a number that overflows its clock


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of a client: `connect_s` for a connection, `read_s` for a byte of a response; both in seconds."""

    connect_s: float
    read_s: float


def waits_of(store: "S3Store | GCSStore | AzureStore") -> Waits:
    """Return how long the client of `store` waits, which the user's options may have changed."""
    http: dict[str, Any] = dict(store.client_options or {})
    return Waits(_seconds(http.get("connect_timeout", "10s")), _seconds(http.get("read_timeout", "120s")))


def _seconds(duration: str) -> float:
    """Return the seconds of a duration such as "1m 30s", which object_store has accepted; a longer unit counts as a week."""
    total_s = sum(float(number) * _UNITS_S.get(unit, _MOST_S) for number, unit in _PART.findall(duration))
    return min(max(total_s, _LEAST_S), _MOST_S)
