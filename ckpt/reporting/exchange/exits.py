"""How ranks leave a training, as recorded in the dictionary that its processes share."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from prefect_torch.ckpt.text import show_count

from .key_value import KeyValue

ExitStatus: TypeAlias = Literal["returned", "failed", "died"]
_GET_S = 0.2  # for keys that are known to be set
_NUM_LEFT = "ends"
_NUM_FAILURES = "failures"


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank left the training.

    Attributes:
        rank: The rank.
        reports: How many reports it completed, or None where its process died and this is unknown.
        status: Whether its function returned, raised, or its process died.
        detail: The error or the signal.
        is_consequence: Whether it left because of another rank, to which it lost its connection for example.

    """

    rank: int
    reports: int | None
    status: ExitStatus
    detail: str = ""
    is_consequence: bool = False

    @property
    def has_returned(self) -> bool:
        """Whether its function returned."""
        return self.status == "returned"

    @property
    def is_cause(self) -> bool:
        """Whether it failed or died by itself, as far as that is known."""
        return not (self.has_returned or self.is_consequence)

    def __str__(self) -> str:
        """Return the exit in one line."""
        after = "" if self.reports is None else f" after {show_count(self.reports, 'report')}"
        return f"rank {self.rank} {self.status}{after}{f' ({self.detail})' if self.detail else ''}"


def announce_exit(key_value: KeyValue, left: RankExit) -> None:
    """Announce to all processes that share `key_value` that a rank left; the first announcement of a rank counts."""
    if not key_value.check(exit_key(left.rank)):
        key_value.set(exit_key(left.rank), json.dumps(asdict(left)).encode())
        if not left.has_returned:
            key_value.add(_NUM_FAILURES, 1)
        key_value.set(_left_key(key_value.add(_NUM_LEFT, 1)), str(left.rank).encode())


def has_failure(key_value: KeyValue) -> bool:
    """Return whether a rank failed or died; costs one request."""
    return key_value.add(_NUM_FAILURES, 0) > 0


def has_announced_failure(key_value: KeyValue, rank: int) -> bool:
    """Return whether a rank has announced that it failed or died."""
    key = exit_key(rank)
    return key_value.check(key) and not decode_exit(key_value.get([key], _GET_S)[0]).has_returned


def read_exits(key_value: KeyValue) -> list[RankExit]:
    """Return the exits of the ranks that left, by rank; costs one request while none has, and some for each that has."""
    keys = [_left_key(number + 1) for number in range(key_value.add(_NUM_LEFT, 0))]
    ranks = {int(key_value.get([key], _GET_S)[0]) for key in keys if key_value.check(key)}  # the newest may be yet to come
    return [decode_exit(key_value.get([exit_key(rank)], _GET_S)[0]) for rank in sorted(ranks)]


def is_first_exit(key_value: KeyValue, rank: int) -> bool:
    """Return whether `rank`, which left, was the first; costs one request."""
    return key_value.get([_left_key(1)], _GET_S) == [str(rank).encode()]


def exit_key(rank: int) -> str:
    """Return the key of a rank's exit."""
    return f"end/{rank}"


def decode_exit(data: bytes) -> RankExit:
    """Return the exit in a value of `exit_key`."""
    return RankExit(**json.loads(data))


def _left_key(number: int) -> str:
    return f"left/{number}"
