"""The states in a rank's reports: from the training's objects to the staged files of a commit."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect_torch.ckpt.state.plan import WriteItem
from prefect_torch.ckpt.state.planner import StateDecision, StatePlanner
from prefect_torch.ckpt.state.save import StagedState, StateSaver, StateSnapshot

from .peers import Peers


class StateReports:
    """One rank's states; on rank 0 also the plan for all ranks.

    Args:
        peers: The ranks.

    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._planner = StatePlanner()
        self._saver = StateSaver(peers.rank, peers.world_size)
        self._plan = 0

    def capture(self, state: Mapping[str, Any]) -> StateSnapshot:
        """Return a snapshot of `state` with copies of its plain values; raises ValueError if a part cannot be stored."""
        return self._saver.capture(state)

    def describe(self, snapshot: StateSnapshot) -> dict[str, Any]:
        """Return the description of `snapshot` for rank 0; it must be sent."""
        return self._saver.describe(snapshot)

    def stage_early(self, snapshot: StateSnapshot) -> None:
        """Stage while the ranks agree, as the plan of the previous report may still be valid."""
        with contextlib.suppress(Exception):  # `finalize` stages again and raises it
            self._saver.stage_early(snapshot)

    def decide(self, told: Sequence[Mapping[str, Any] | None], topic: str, *, refused: bool) -> dict[str, Any] | None:
        """As rank 0, decide on the states of all ranks, and send each rank its part of a new plan.

        Args:
            told: The description from each rank, None where it reports no state.
            topic: The name of this report.
            refused: Whether the report is refused for other reasons.

        Raises:
            ReportMismatchError: If the ranks' states do not form one state.

        """
        for rank, of_rank in enumerate(told):
            if of_rank is not None:
                self._planner.receive(rank, of_rank)
        if refused or all(of_rank is None for of_rank in told):
            return None
        decision = self._planner.decide(told)
        if decision.plan != self._plan:
            parts = [[[write.piece, write.start, write.stop] for write in writes] for writes in self._planner.writes]
            self._peers.scatter(f"{topic}/plan", [json.dumps(part).encode() for part in parts])
        return asdict(decision)

    def apply(self, decided: Mapping[str, Any], topic: str) -> StateDecision:
        """Apply rank 0's decision, also on a rank that reports no state."""
        decision = StateDecision(**decided)
        if decision.plan != self._plan:
            data = self._peers.scattered(f"{topic}/plan")
            self._saver.apply([WriteItem(*fields) for fields in json.loads(data)])
            self._plan = decision.plan
        return decision

    def finalize(self, snapshot: StateSnapshot, decision: StateDecision) -> StagedState:
        """Return `snapshot` staged; the training may change the state when this returns."""
        return self._saver.finalize(snapshot, decision)
