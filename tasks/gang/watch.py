"""Whether ranks still live and get on, judged by what is heard of them and this process's own clock."""

import time
from collections.abc import Callable, Mapping

from prefect_torch.tasks.rank.errors import RankFailedError

BEAT_S = 5.0  # how often a rank's supervisor gives a sign of life
_LOST_S = 60.0
_ASLEEP_S = 10.0  # whoever looks as rarely was stopped itself, and could not hear anybody


class RankWatch:
    """Tells when a rank's supervisor has fallen silent, or when all ranks have.

    Args:
        ranks: How many there are.
        hang_timeout_s: How long no report may come; None for ever.
        clock: Seconds that only grow.

    """

    def __init__(self, ranks: int, hang_timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hang_timeout_s = hang_timeout_s
        self._looked_s = self._reported_s = clock()
        self._beats = dict.fromkeys(range(ranks), 0)
        self._heard_s = dict.fromkeys(range(ranks), self._looked_s)

    def take_report(self) -> None:
        """Take note that the ranks have reported."""
        self._reported_s = self._clock()

    def take_beats(self, beats: Mapping[int, int]) -> None:
        """Take note of how many signs of life each running rank's supervisor has given."""
        for rank, number in beats.items():
            if number != self._beats[rank]:
                self._beats[rank] = number
                self._heard_s[rank] = self._clock()

    def problem(self, running: list[int]) -> RankFailedError | None:
        """Return what is wrong with the ranks that still run, if anything is."""
        now_s = self._clock()
        missed_s = now_s - self._looked_s
        self._looked_s = now_s
        if missed_s > _ASLEEP_S:
            self._reported_s += missed_s
            self._heard_s = {rank: heard_s + missed_s for rank, heard_s in self._heard_s.items()}
        for rank in running:
            silent_s = now_s - self._heard_s[rank]
            if silent_s > _LOST_S:
                return RankFailedError(
                    f"rank {rank} is lost: its supervisor has given no sign of life for {silent_s:.0f} s, so its machine, or "
                    "the network to it, is gone",
                    rank,
                    "infrastructure",
                )
        if self._hang_timeout_s is not None and running and now_s - self._reported_s > self._hang_timeout_s:
            return RankFailedError(
                f"the training hangs: no report came for {self._hang_timeout_s:g} s (hang_timeout_s); the stacks of all ranks "
                "are in their logs",
                None,
                "infrastructure",
            )
        return None
