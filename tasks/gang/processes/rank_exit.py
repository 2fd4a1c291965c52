"""The result that a rank has left, or one made from the exit status of its process."""

import json
import pickle
import signal
from collections.abc import Callable

from prefect_torch.tasks.rank.failures import hint_at_death, of_returncode
from prefect_torch.tasks.rank.spec import RankResult

_RETURNED = (0, 1)  # the exit codes of a rank that has left a result


def result_left(message: bytes, returncode: int | None, decode: Callable[[bytes], RankResult]) -> RankResult | None:
    """Return the result that a rank has left; None if it left none, or was killed while it wrote it.

    Args:
        message: What it wrote.
        returncode: Its exit code, negative for the signal that killed it; None when even its guard was killed.
        decode: Returns the result of a whole message.

    """
    try:
        return decode(message) if message else None
    except (pickle.UnpicklingError, EOFError, json.JSONDecodeError):
        if returncode in _RETURNED:
            raise
        return None


def result_of_exit(returncode: int | None, *, oom_killed: bool | None) -> RankResult:
    """Return the result of a rank whose process exited without one.

    Args:
        returncode: The exit code, negative for the signal that killed it; None when even its guard was killed.
        oom_killed: Whether the kernel has killed a process for lack of memory while it ran; None if unknown.

    """
    kind = of_returncode(returncode, oom_killed=bool(oom_killed))
    hint = hint_at_death(returncode, oom_killed=oom_killed)
    return RankResult(kind=kind, error=f"{_death(returncode)}{hint}", was_killed=returncode in (None, -signal.SIGKILL))


def _death(returncode: int | None) -> str:
    if returncode is None:
        return "its process and the guard of it were killed"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        return f"its process was killed by {name} ({-returncode})"
    return f"its process exited with code {returncode} before the training function returned"
