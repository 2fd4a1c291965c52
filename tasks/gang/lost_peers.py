"""The message of a rank that lost its connection to another rank."""

import time

from prefect_torch.ckpt.reporting.exchange.exits import read_exits
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue

_POLL_S = 0.05
_LONGEST_S = 0.5  # the exit of the rank that caused it may be announced a moment later


def describe_lost_connection(key_value: KeyValue, rank: int, error: str, longest_s: float = _LONGEST_S) -> str:
    """Return which rank `rank` lost its connection to, according to the announced exits; `error` if none of them explains it.

    Args:
        key_value: The store that the ranks share.
        rank: The rank that lost its connection.
        error: The error of that rank, which names an address.
        longest_s: For how long to wait for another rank's exit.

    """
    until_s = time.monotonic() + longest_s
    while not (gone := [it.rank for it in read_exits(key_value) if it.rank != rank and it.is_cause]):
        if time.monotonic() >= until_s:
            return error
        time.sleep(_POLL_S)
    return f"lost its connection to rank {gone[0]}" if len(gone) == 1 else "lost its connection to other ranks"
