"""What rank 0 decides about the states of a report: who writes what, and which values are each rank's own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .state_plan import Piece, Write, plan_writes


@dataclass(frozen=True, slots=True)
class StateDecision:
    """What every rank that brought a state acts on.

    Attributes:
        plan: The number of the plan of who writes what; a new number is followed by a word to each rank.
        own: The values that differ between ranks, which each of them stores under a name of its own.
        writers: Who stores a value that is equal on all ranks that have it, where that is not rank 0.

    """

    plan: int
    own: list[str] = field(default_factory=list)
    writers: dict[str, int] = field(default_factory=dict)


class StatePlanner:
    """Rank 0's memory of what each rank's state is made of, so that ranks describe it only when it changes."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Piece]] = {}
        self._described = 0
        self._planned_for: tuple[Any, ...] | None = None
        self._plan = 0
        self.writes: list[list[Write]] = []

    def hear(self, rank: int, told: Mapping[str, Any]) -> None:
        """Take what a rank tells of its state; every report of it must be heard, also one that is refused."""
        if told["pieces"] is not None:
            self._pieces[rank] = [Piece.decode(fields) for fields in told["pieces"]]
            self._described += 1

    def decide(self, told: Sequence[Mapping[str, Any] | None]) -> StateDecision:
        """Return what the ranks do; plans anew only where a rank's state changed its structure.

        Args:
            told: What each rank tells, None where it brings no state.

        Raises:
            ReportMismatchError: If the ranks' states cannot be one.

        """
        bringing = [rank for rank, of_rank in enumerate(told) if of_rank is not None]
        wanted = (self._described, *bringing)
        if wanted != self._planned_for:
            pieces = [self._pieces[rank] if rank in bringing else [] for rank in range(len(told))]
            self.writes = plan_writes(pieces)
            self._planned_for = wanted
            self._plan += 1
        return self._decide_values(told)

    def _decide_values(self, told: Sequence[Mapping[str, Any] | None]) -> StateDecision:
        digests: dict[str, dict[int, str]] = defaultdict(dict)
        for rank, of_rank in enumerate(told):
            for name, digest in (of_rank or {}).get("values", {}).items():
                digests[name][rank] = digest
        decision = StateDecision(self._plan)
        for name, by_rank in digests.items():
            if len(set(by_rank.values())) > 1:
                decision.own.append(name)
            elif 0 not in by_rank:
                decision.writers[name] = min(by_rank)
        return decision
