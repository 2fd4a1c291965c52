"""The goodput of a run: how the time of its attempts is divided; pure.

Each second from the first claim of the run, or from its last fresh start (`resume="never"`), to its end, or to now, is one of

training        work that later attempts continued from, or still may: from an attempt's first step to its end, without the
                times below.
checkpointing   the stalls of the slowest rank, as the commits measured them; the mean stall for a checkpoint that was deleted
                before its commit was read.
restarting      from an attempt's claim to its first step, while processes start, import and restore. The time of the first step
                is not recorded; it is estimated as the first report less the mean time between two reports of the run. Also,
                between two attempts of one flow run, from the end of the one to the claim of the next.
lost            work after the checkpoint that a later attempt resumed from, which is done again. If an attempt failed or was
                killed and there is no later one, the work after its newest checkpoint.
away            between two flow runs.

The goodput is the share of training in all of this time except the time away. The work between a damaged checkpoint and the one
restored instead counts as lost, and so does all work before an attempt that had no checkpoint to restore. Times are those of
the machines' clocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .attempt_log import END, AttemptLog, Position, position_of, resume_points


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The division of a run's time, in seconds; the module's docstring defines the parts.

    Attributes:
        training: Time of training that was kept.
        checkpointing: Time of stalls.
        restarting: Time from a claim, or the end of the attempt before, to the first step.
        lost: Time of training that is done again.
        away: Time between flow runs.

    """

    training: float = 0.0
    checkpointing: float = 0.0
    restarting: float = 0.0
    lost: float = 0.0
    away: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the time that is counted."""
        return {name: getattr(self, name) for name in ("training", "checkpointing", "restarting", "lost")}

    @property
    def counted(self) -> float:
        """The whole time except the time away."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """The share of training in `counted`; None if no time has passed."""
        return self.training / self.counted if self.counted > 0 else None

    def plus(self, other: "TimeSpent") -> "TimeSpent":
        """Return the sum of both."""
        return TimeSpent(
            self.training + other.training,
            self.checkpointing + other.checkpointing,
            self.restarting + other.restarting,
            self.lost + other.lost,
            self.away + other.away,
        )


def time_spent(logs: Sequence[AttemptLog], now_s: float) -> TimeSpent:
    """Return how the time of the run since its first claim is divided.

    Args:
        logs: Every attempt, oldest first.
        now_s: The current time (seconds since the epoch), up to which a running attempt counts.

    """
    points = resume_points(logs)
    interval_s = _mean_interval_s(logs)
    stall_s = _mean_stall_s(logs)
    spent = TimeSpent()
    clock_s = logs[0].claimed_s if logs else now_s
    for index, log in enumerate(logs):
        after = logs[index + 1] if index + 1 < len(logs) else None
        begun_s = clock_s
        taken_over_s = math.inf if after is None else after.claimed_s  # its later work does not belong to the run
        clock_s = max(begun_s, min(now_s if log.ended_s is None else log.ended_s, taken_over_s))
        spent = spent.plus(_within(log, begun_s, clock_s, points[log.number], interval_s, stall_s))
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
    log: AttemptLog, begun_s: float, ended_s: float, resume_point: Position, interval_s: float | None, mean_stall_s: float
) -> TimeSpent:
    if log.first_record_s is None:
        return TimeSpent(restarting=ended_s - begun_s)
    first_step_s = log.first_record_s - begun_s if interval_s is None else interval_s
    worked_from_s = _clamp(log.first_record_s - first_step_s, begun_s, ended_s)
    kept_until_s = _clamp(_kept_until_s(log, resume_point, ended_s), worked_from_s, ended_s)
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


def _kept_until_s(log: AttemptLog, resume_point: Position, ended_s: float) -> float:
    """Return the time up to which the work of `log` is kept, or may still be kept."""
    is_newest = resume_point == END
    if is_newest and (log.status.is_done or log.is_running):
        return ended_s
    # Only committed work of a failed attempt without a successor is known to be kept.
    kept = [mark for mark in log.checkpoints if mark.num_timed or not is_newest]
    until = [mark for mark in kept if position_of(mark.newest) <= resume_point]
    return max((mark.reported_s for mark in until if mark.reported_s is not None), default=0.0)


def _mean_interval_s(logs: Sequence[AttemptLog]) -> float | None:
    """Return the mean time between two records of an attempt; None if no attempt had two."""
    spans = [
        (log.last_record_s - log.first_record_s, log.num_records - 1)
        for log in logs
        if log.first_record_s is not None and log.last_record_s is not None
    ]
    count = sum(number for _, number in spans)
    return sum(span_s for span_s, _ in spans) / count if count else None


def _mean_stall_s(logs: Sequence[AttemptLog]) -> float:
    marks = [mark for log in logs for mark in log.checkpoints]
    num_timed = sum(mark.num_timed for mark in marks)
    return sum(mark.stall_s for mark in marks) / num_timed if num_timed else 0.0


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
