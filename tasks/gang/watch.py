"""Detecting lost and hanging ranks, by their heartbeats, their reports and the clock of this process."""

import time
from collections.abc import Callable, Collection, Mapping

from prefect_torch.tasks.rank.errors import RankFailedError

RANK_HEARTBEAT_S = 5.0  # between two heartbeats of a rank's supervisor
_LOST_S = 60.0
_ASLEEP_S = 10.0  # a longer time between two looks means that this process was stopped itself


class RankWatch:
    """Detects when the heartbeats of a rank's supervisor stop, and when the reports of all ranks do.

    Args:
        ranks: The first rank of each supervisor.
        hang_timeout_s: The longest time without a report; None for unlimited.
        clock: Returns seconds of a monotonic clock.

    """

    def __init__(
        self, ranks: Collection[int], hang_timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._hang_timeout_s = hang_timeout_s
        self._looked_s = self._reported_s = clock()
        self._heartbeats = dict.fromkeys(ranks, 0)
        self._heard_s = dict.fromkeys(ranks, self._looked_s)

    def record_report(self) -> None:
        """Record that the ranks have reported, or wait for a decision on their report."""
        self._reported_s = self._clock()

    def record_heartbeats(self, heartbeats: Mapping[int, int]) -> None:
        """Record how many heartbeats the supervisor of each running rank has sent."""
        for rank, number in heartbeats.items():
            if number != self._heartbeats[rank]:
                self._heartbeats[rank] = number
                self._heard_s[rank] = self._clock()

    def problem(self, running: list[int]) -> RankFailedError | None:
        """Return the error of a running rank that is lost, or of a training that hangs; None if all is well."""
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
                    f"rank {rank} is lost: its supervisor has sent no heartbeat for {silent_s:.0f} s: the "
                    "thread of its task run, in this process, hangs or has not begun",
                    rank,
                    "infrastructure",
                )
        if self._hang_timeout_s is not None and running and now_s - self._reported_s > self._hang_timeout_s:
            return RankFailedError(
                f"the training hangs: no report came for {self._hang_timeout_s:g} s (hang_timeout_s); the stack traces "
                "of all ranks are in their logs",
                None,
                "infrastructure",
            )
        return None
