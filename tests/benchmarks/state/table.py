"""From what the ranks measured to one line of a table for each way."""

import statistics
from dataclasses import dataclass

HEAD = (
    f"{'MiB':>5} {'where':7} {'way':22} {'first ms':>9} {'p50 ms':>8} {'p95 ms':>8} {'/memcpy':>8} {'next 10':>8} "
    f"{'durable s':>9} {'alone s':>8} {'cpu s/GiB':>9} {'memory':>7} {'resume s':>8} {'cold s':>7}"
)
LEGEND = """\
first, p50, p95  for how long the call held the training up, the slower rank, first and later; the state may change afterwards
                 before the first save, memory that nobody uses is touched in another process: a virtual machine's host takes
                 back what is free, and a first touch would measure the host
/memcpy          p50 against a copy of half of the state, what a rank owns, into warm memory, timed before each save
next 10          how much longer the 10 steps right after the call took than the 10 right before it, the slower rank
durable          from the call until another process would resume from it, fsynced, while training goes on
alone            the same while training waits
cpu              of all processes, until durable, while training waits; the servers of S3 do not count
memory           what all processes held more at their peaks than before the first save, as a share of the state's size
resume           from the start of the processes to the state loaded in both ranks: interpreter, imports, rendezvous,
                 verification; without Prefect's start for ours, with Ray's own for Ray; from the page cache where the writer
                 left the files there
cold             loading alone, verification included, with the files not in the page cache"""


@dataclass(frozen=True)
class Row:
    """One way at one size in one place, over all of its repetitions; seconds, shares of the state's size.

    A `problem` stands instead of numbers that could not be had.
    """

    mebibytes: int
    where: str
    way: str
    first: float | None = None
    p50: float | None = None
    p95: float | None = None
    memcpy: float | None = None
    next_steps: float | None = None
    step: float | None = None
    durable: float | None = None
    alone: float | None = None
    cpu: float | None = None
    memory: float | None = None
    resume: float | None = None
    cold: float | None = None
    problem: str = ""

    @property
    def text(self):
        named = f"{self.mebibytes:>5} {self.where:7} {self.way:22}"
        if self.p50 is None:
            return f"{named} {self.problem}"
        return (
            f"{named} {self.first * 1e3:>9.1f} {self.p50 * 1e3:>8.1f} {self.p95 * 1e3:>8.1f} {self.p50 / self.memcpy:>8.2f} "
            f"{self.next_steps:>+8.1%} {_seconds(self.durable, 9)} {_seconds(self.alone, 8)} {_seconds(self.cpu, 9)} "
            f"{self.memory:>6.2f}x {_seconds(self.resume, 8)} {_seconds(self.cold, 7)}  {self.problem}"
        ).rstrip()


def summarize(mebibytes, where, way, saves, resumes):
    """Return the row of a way's gangs, each a list with what every rank measured; the slower rank counts."""
    gangs = [[_slowest(of_ranks) for of_ranks in zip(*(rank["rounds"] for rank in ranks), strict=True)] for ranks in saves]
    later = [of for rounds in gangs for of in rounds[1:]]
    going_on = [of for of in later if of["goes_on"]] or [rounds[0] for rounds in gangs]
    waiting = [of for of in later if not of["goes_on"]]
    stalls, size = [of["stall"] for of in later], saves[0][0]["bytes"]
    problem = "" if all(rank["is_right"] for ranks in resumes for rank in ranks) else "WRONG: not the state that was saved"
    return Row(
        *(mebibytes, where, way),
        first=statistics.median(rounds[0]["stall"] for rounds in gangs),
        p50=statistics.median(stalls),
        p95=sorted(stalls)[-1 - len(stalls) // 20],
        memcpy=statistics.median(of["floor"] for of in later),
        next_steps=statistics.median(of["after"] / of["before"] - 1 for of in going_on),
        step=statistics.median(of["before"] / 10 for of in going_on),
        durable=statistics.median(of["durable"] for of in going_on),
        alone=_middle(of["durable"] for of in waiting),
        cpu=statistics.mean(of["cpu"] for of in waiting) / (size / 2**30) if waiting else None,
        memory=max(ranks[0]["memory"] for ranks in saves) / size,
        resume=_middle(max(rank["resume"] for rank in ranks) for ranks in resumes),
        cold=_middle(max(rank["cold"] for rank in ranks) for ranks in resumes if ranks[0]["cold"] is not None),
        problem=problem,
    )


def _slowest(of_ranks):
    return {
        key: None if all(of[key] is None for of in of_ranks) else max(of[key] for of in of_ranks if of[key] is not None)
        for key in of_ranks[0]
    }


def _middle(values):
    values = list(values)
    return statistics.median(values) if values else None


def _seconds(value, width):
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"
