"""Where the time of a run went: a pure account of its attempts.

The time from the first claim of the run to its end, or to now, is divided without rest into

training        what the run has gone on from, or still may: from an attempt's first step to its end, without the rest below.
checkpointing   for how long the slowest rank was held up by checkpoints, as their commits measured it; of one that was deleted
                before anybody looked, the mean of the others.
restarting      from an attempt's claim to its first step: processes start, import and restore. That moment is not recorded; it
                is taken to be the first report, less the mean time between two reports of the run. And between two attempts of
                one flow run, from the end of the one to the claim of the next.
lost            what was done after the checkpoint that a later attempt began from, and so was done again. Of an attempt that
                failed or was killed and has no later one, what was done after its newest checkpoint.
away            between two flow runs, when nobody trained.

The goodput is the share of training in all of it but the time away. What a damaged checkpoint threw back counts as lost, too,
and so does everything before an attempt that began anew (`resume="never"`). The times are those of the machines' clocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .attempt_log import END, AttemptLog, Place, frontiers, place_of


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where the time of a run went, in seconds; the module says what each word means.

    Attributes:
        training: What has brought the run forward.
        checkpointing: Held up by checkpoints.
        restarting: From a claim, or the end of the attempt before, to the first step.
        lost: What has to be done again, or was.
        away: Between flow runs.

    """

    training: float = 0.0
    checkpointing: float = 0.0
    restarting: float = 0.0
    lost: float = 0.0
    away: float = 0.0

    @property
    def counted(self) -> float:
        """All but the time away."""
        return self.training + self.checkpointing + self.restarting + self.lost

    @property
    def goodput(self) -> float | None:
        """The share of training in `counted`; None where no time has passed."""
        return self.training / self.counted if self.counted > 0 else None

    def plus(self, other: "TimeSpent") -> "TimeSpent":
        """Return both together."""
        return TimeSpent(
            self.training + other.training,
            self.checkpointing + other.checkpointing,
            self.restarting + other.restarting,
            self.lost + other.lost,
            self.away + other.away,
        )


def time_spent(logs: Sequence[AttemptLog], now_s: float) -> TimeSpent:
    """Return where the time of the run went, from its first claim on.

    Args:
        logs: Every attempt, oldest first.
        now_s: The time, which is the end of an attempt that runs.

    """
    until = frontiers(logs)
    interval_s = _mean_interval_s(logs)
    stall_s = _mean_stall_s(logs)
    spent = TimeSpent()
    clock_s = logs[0].claimed_s if logs else now_s
    for index, log in enumerate(logs):
        after = logs[index + 1] if index + 1 < len(logs) else None
        begun_s = clock_s
        taken_over_s = math.inf if after is None else after.claimed_s  # from then on, what it did was not the run's any more
        clock_s = max(begun_s, min(now_s if log.ended_s is None else log.ended_s, taken_over_s))
        spent = spent.plus(_within(log, begun_s, clock_s, until[log.number], interval_s, stall_s))
        if after is not None:
            pause_s = max(0.0, after.claimed_s - clock_s)
            spent = spent.plus(_between(log, after, pause_s))
            clock_s += pause_s
    return spent


def _between(before: AttemptLog, log: AttemptLog, pause_s: float) -> TimeSpent:
    flow_run_id = log.attempt.owner.flow_run_id
    is_same = flow_run_id is not None and flow_run_id == before.attempt.owner.flow_run_id
    return TimeSpent(restarting=pause_s) if is_same else TimeSpent(away=pause_s)


def _within(
    log: AttemptLog, begun_s: float, ended_s: float, until: Place, interval_s: float | None, mean_stall_s: float
) -> TimeSpent:
    if log.first_report_s is None:
        return TimeSpent(restarting=ended_s - begun_s)
    first_step_s = log.first_report_s - begun_s if interval_s is None else interval_s
    worked_from_s = _clamp(log.first_report_s - first_step_s, begun_s, ended_s)
    kept_until_s = _clamp(_kept_until_s(log, until, ended_s), worked_from_s, ended_s)
    stalls = [
        (mark.reported_s, mark.stall_s + mean_stall_s * max(0, mark.num_reported - mark.num_timed))
        for mark in log.checkpoints
        if mark.reported_s is not None
    ]
    kept_s = kept_until_s - worked_from_s
    lost_s = ended_s - kept_until_s
    kept_stall_s = min(kept_s, sum(stall_s for at_s, stall_s in stalls if at_s <= kept_until_s))
    lost_stall_s = min(lost_s, sum(stall_s for at_s, stall_s in stalls if at_s > kept_until_s))
    return TimeSpent(
        training=kept_s - kept_stall_s,
        checkpointing=kept_stall_s + lost_stall_s,
        restarting=worked_from_s - begun_s,
        lost=lost_s - lost_stall_s,
    )


def _kept_until_s(log: AttemptLog, until: Place, ended_s: float) -> float:
    """Return the time up to which the work of `log` is kept, or may still be."""
    is_newest = until == END
    if is_newest and (log.is_completed or log.is_running):
        return ended_s
    # Of a failed attempt without a successor, only commits are known to be kept.
    kept = [mark for mark in log.checkpoints if mark.num_timed or not is_newest]
    return max((it.reported_s for it in kept if it.reported_s is not None and place_of(it.newest) <= until), default=0.0)


def _mean_interval_s(logs: Sequence[AttemptLog]) -> float | None:
    """Return the mean time between two reports of an attempt; None if no attempt had two."""
    spans = [
        (log.last_report_s - log.first_report_s, log.num_reports - 1)
        for log in logs
        if log.first_report_s is not None and log.last_report_s is not None
    ]
    count = sum(number for _, number in spans)
    return sum(span_s for span_s, _ in spans) / count if count else None


def _mean_stall_s(logs: Sequence[AttemptLog]) -> float:
    marks = [mark for log in logs for mark in log.checkpoints]
    num_timed = sum(mark.num_timed for mark in marks)
    return sum(mark.stall_s for mark in marks) / num_timed if num_timed else 0.0


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
