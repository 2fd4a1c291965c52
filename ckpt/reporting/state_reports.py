"""The states in a rank's reports: between what the training hands over and what a commit stores."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect_torch.ckpt.state.plan import Write
from prefect_torch.ckpt.state.planner import StateDecision, StatePlanner
from prefect_torch.ckpt.state.save import HeldState, StagedState, StateSaver

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

    def hold(self, state: Mapping[str, Any]) -> HeldState:
        """Look at `state` and copy its plain values; raises ValueError for what cannot be stored."""
        return self._saver.hold(state)

    def tell(self, held: HeldState) -> dict[str, Any]:
        """Return what rank 0 must know; it must be sent."""
        return self._saver.tell(held)

    def stage_early(self, held: HeldState) -> None:
        """Stage while the ranks agree, where the plan of the report before may still hold."""
        with contextlib.suppress(Exception):  # `settle` stages again and raises it
            self._saver.stage_early(held)

    def decide(self, told: Sequence[Mapping[str, Any] | None], topic: str, *, refused: bool) -> dict[str, Any] | None:
        """As rank 0, decide on the states of all ranks, and send each rank its part of a new plan.

        Args:
            told: What each rank told, None where it brings no state.
            topic: Names this report.
            refused: Whether the report is refused for other reasons.

        Raises:
            ReportMismatchError: If the ranks' states cannot be one.

        """
        for rank, of_rank in enumerate(told):
            if of_rank is not None:
                self._planner.hear(rank, of_rank)
        if refused or all(of_rank is None for of_rank in told):
            return None
        decision = self._planner.decide(told)
        if decision.plan != self._plan:
            parts = [[[write.piece, write.start, write.stop] for write in writes] for writes in self._planner.writes]
            self._peers.scatter(f"{topic}/plan", [json.dumps(part).encode() for part in parts])
        return asdict(decision)

    def follow(self, decided: Mapping[str, Any], topic: str) -> StateDecision:
        """Take over what rank 0 decided, also on a rank that brings no state."""
        decision = StateDecision(**decided)
        if decision.plan != self._plan:
            data = self._peers.scattered(f"{topic}/plan")
            self._saver.follow([Write(*fields) for fields in json.loads(data)])
            self._plan = decision.plan
        return decision

    def settle(self, held: HeldState, decision: StateDecision) -> StagedState:
        """Return `held` staged; from now on the training may change it."""
        return self._saver.settle(held, decision)
