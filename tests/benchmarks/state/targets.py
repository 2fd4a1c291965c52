"""What the async report of a state is meant to reach, as ratios of one run; a missed one is told with by how much."""

from ways import RAY_SYNC, STATE, TORCH, WAYS

WHY_MISSED = """\
Why targets can be missed on this machine:
a later stall / memcpy     beside the copy, a report looks at every object and has one round between the ranks: 2 ms, which
                           tell most in small states. At 64 MiB a twentieth of Ray's stall is less than the copy.
the first stall            is page faults and the plan of who writes what, which all ranks make together.
the next 10 steps          hashing and writing want a part of a core, and two ranks use both; a server of S3 wants one, too.
durable, training goes on  the commit has a lower priority than the training; in dcp.save the training stands still."""


def judge(rows):
    """Yield a line for each target that the rows of one size and place can tell of."""
    measured = {row.way: row for row in rows if row.p50 is not None}
    ours = measured.get(STATE)
    if ours is None:
        return
    peers = [row for row in measured.values() if not WAYS[row.way].is_ours]
    for text, value, most in _targets(ours, peers, measured):
        told = "met   " if value <= most else "MISSED"
        by = "" if value <= most else f", {value / most:.2f} x too much"
        yield f"{ours.mebibytes:>5} {ours.where:7} {told} {text}: {value:.3g}, at most {most:g}{by}"


def _targets(ours, peers, measured):
    yield "a later stall / a warm memcpy of the owned bytes", ours.p50 / ours.memcpy, 1.25
    if peers:
        best = min(peers, key=lambda row: row.p50)
        yield f"a later stall / that of the best peer, {best.way}", ours.p50 / best.p50, 0.5
    if RAY_SYNC in measured:
        yield f"a later stall / that of {RAY_SYNC}", ours.p50 / measured[RAY_SYNC].p50, 0.05
    yield "the first stall / a later one", ours.first / ours.p50, 3
    yield "the next 10 steps / 10 steps without a checkpoint", 1 + ours.next_steps, 1.02
    for column, what in (("durable", "while training goes on"), ("alone", "while training waits")):
        known = [row for row in peers if getattr(row, column) is not None]
        if known and getattr(ours, column) is not None:
            best = min(known, key=lambda row: getattr(row, column))
            yield f"durable {what} / at the best peer, {best.way}", getattr(ours, column) / getattr(best, column), 1
    if TORCH in measured and ours.resume is not None:
        yield f"resume / with torch.load, {TORCH}", ours.resume / measured[TORCH].resume, 1
        yield "loading from a cold disk / with torch.load", ours.cold / measured[TORCH].cold, 1
