"""Rank 0's decision on the states of a report: the writes of each rank, and the values that are each rank's own."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefect_torch.ckpt.errors import ReportMismatchError
from prefect_torch.ckpt.state.plan import TensorShard, WriteItem, plan_writes
from prefect_torch.ckpt.text import show_some

from .index import rank_name, rank_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateDescription:
    """One rank's description of its state for rank 0.

    Attributes:
        values: The digests of its values.
        tensors: The digests of its unowned tensors.
        shards: Its part of each tensor; None where its structure is that of its previous description.
        parts: A digest of the parts of each module and each optimizer, with `shards`.
        samples: By module and optimizer, a digest of which parts of some tensors this rank has, and one of some elements of
            these parts, which count as equal on all ranks that have the same ones.
        epochs: The epochs of loaders that share one order among the ranks.
        partless: The names of the DTensors in its state of which it has no part, with `shards`.

    """

    values: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)
    shards: list[TensorShard] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    partless: Sequence[str] = field(default_factory=list)

    def fields(self) -> list[Any]:
        """Return a form that JSON can represent."""
        shards = None if self.shards is None else [shard.encode() for shard in self.shards]
        return [self.values, self.tensors, shards, self.parts, self.samples, self.epochs, self.partless]

    @classmethod
    def of_fields(cls, fields: Sequence[Any]) -> "StateDescription":
        """Undo `fields`."""
        values, tensors, shards, *others = fields
        return cls(values, tensors, None if shards is None else [TensorShard.decode(shard) for shard in shards], *others)


@dataclass(frozen=True, slots=True)
class StateDecision:
    """The decision on which every rank that reported a state acts.

    Attributes:
        plan: The number of the plan of the ranks' writes; a new number is followed by a message to each rank.
        own: The values and unowned tensors that differ between ranks, or that only some ranks have, which each stores under
            a name of its own.
        writers: The rank that stores a value that is equal on all ranks that have it, if rank 0 does not have it.

    """

    plan: int
    own: list[str] = field(default_factory=list)
    writers: dict[str, int] = field(default_factory=dict)


class StatePlanner:
    """Rank 0's record of the structure of each rank's state, so that ranks describe it only when it changes."""

    def __init__(self) -> None:
        self._shards: dict[int, list[TensorShard]] = {}
        self._parts: dict[int, Mapping[str, str]] = {}
        self._partless: dict[int, Sequence[str]] = {}
        self._described = 0
        self._planned_for: tuple[Any, ...] | None = None
        self._plan = 0
        self._checked: tuple[Any, ...] | None = None
        self._has_warned = self._has_warned_of_epochs = False
        self.writes: list[list[WriteItem]] = []

    def decide(self, described: Sequence[StateDescription | None]) -> StateDecision:
        """Return the decision for the ranks, with a new plan only where the structure of a rank's state changed.

        It must be called with every description that a rank has sent, even if the report is refused.

        Args:
            described: The description of each rank, None where it reports no state.

        Raises:
            ReportMismatchError: If the ranks' states do not form one state.

        """
        states = {rank: of_rank for rank, of_rank in enumerate(described) if of_rank is not None}
        for rank, of_rank in states.items():
            if of_rank.shards is not None:
                self._shards[rank], self._parts[rank] = of_rank.shards, of_rank.parts
                self._partless[rank] = of_rank.partless
                self._described += 1
        values = {rank: of_rank.values for rank, of_rank in states.items()}
        self._check_parts(list(states))
        tensors = {rank: of_rank.tensors for rank, of_rank in states.items()}
        self._check_shapes(values, tensors)
        self._has_warned = self._has_warned or _warn_of_unequal({rank: of_rank.samples for rank, of_rank in states.items()})
        epochs = {rank: of_rank.epochs for rank, of_rank in states.items()}
        self._has_warned_of_epochs = self._has_warned_of_epochs or _warn_of_epochs(epochs)
        _, own_tensors = _compare(tensors)
        digests, own_values = _compare(values)
        wanted = (self._described, tuple(own_tensors), *states)
        if wanted != self._planned_for:
            shards = [self._stored_by(rank, set(own_tensors)) if rank in states else [] for rank in range(len(described))]
            self.writes = self._with_holders(plan_writes(shards), shards, set(states))
            self._planned_for = wanted
            self._plan += 1
        writers = {name: min(by_rank) for name, by_rank in digests.items() if 0 not in by_rank and name not in own_values}
        return StateDecision(self._plan, [*own_tensors, *own_values], writers)

    def _stored_by(self, rank: int, own: Collection[str]) -> list[TensorShard]:
        shards = self._shards[rank]
        return [replace(shard, name=rank_name(shard.name, rank)) if shard.name in own else shard for shard in shards]

    def _with_holders(
        self, writes: Sequence[Sequence[WriteItem]], shards: Sequence[Sequence[TensorShard]], ranks: Collection[int]
    ) -> list[list[WriteItem]]:
        """Return `writes` with the holders of each tensor under a shared name that not all `ranks` have."""
        holders: dict[str, set[int]] = defaultdict(set)
        for rank in ranks:
            for name in (*(shard.name for shard in shards[rank]), *self._partless[rank]):
                holders[name].add(rank)
        some = {name: tuple(sorted(it)) for name, it in holders.items() if len(it) < len(ranks) and rank_of(name) is None}
        return [
            [replace(write, holders=some.get(of_rank[write.shard].name)) for write in of_writes]
            for of_rank, of_writes in zip(shards, writes, strict=True)
        ]

    def _check_parts(self, ranks: Sequence[int]) -> None:
        """Refuse a module or optimizer that has other parts on another rank: under one name, all ranks must have the same."""
        first: dict[str, int] = {}
        for rank in ranks:
            for name, digest in self._parts[rank].items():
                other = first.setdefault(name, rank)
                if digest != self._parts[other][name]:
                    differing = sorted(self._names_in(name, rank) ^ self._names_in(name, other))
                    raise ReportMismatchError(
                        f"the state's {name!r} has other parts on rank {rank} than on rank {other}"
                        + (f" ({show_some(differing)})" if differing else "")
                        + ": give it a name of its own on each rank, or mark it with RankLocal"
                    )

    def _names_in(self, name: str, rank: int) -> set[str]:
        return {shard.name for shard in self._shards[rank] if shard.name.startswith(f"{name}.")}

    def _check_shapes(self, values: Mapping[int, Mapping[str, str]], unowned: Mapping[int, Mapping[str, str]]) -> None:
        """Refuse a name that is a container on one rank only, or of a module's tensor and of another value.

        An unowned tensor is stored like a value where it is small, so it may be large on some ranks only.
        """
        names = {rank: (tuple(values[rank]), tuple(unowned[rank])) for rank in values}
        if (checked := (self._described, names)) == self._checked:
            return
        kinds: dict[str, dict[int, str]] = defaultdict(dict)
        for rank, (names_of_values, names_of_unowned) in names.items():
            for shard in self._shards[rank]:
                kinds[shard.name][rank] = "a tensor"
            for name in (*names_of_values, *names_of_unowned):
                kinds[name][rank] = "a value"
        for name in [name for name in kinds if rank_of(name) is None]:
            above = name
            while above:
                above = above.rpartition(".")[0]
                if above in kinds and kinds[above].keys().isdisjoint(kinds[name]):
                    raise _mismatch(above, kinds[above], next(iter(kinds[name])), "a container")
            if len(set(kinds[name].values())) > 1:
                rank = next(rank for rank, kind in kinds[name].items() if kind == "a tensor")
                raise _mismatch(name, {r: kind for r, kind in kinds[name].items() if kind == "a value"}, rank, "a tensor")
        self._checked = checked


def _warn_of_unequal(samples: Mapping[int, Mapping[str, Sequence[str]]]) -> bool:
    """Log a warning if a module or optimizer has other elements in the same tensors on another rank; return whether it did."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, of_rank in samples.items():
        for part, (names, found) in of_rank.items():
            other, expected = first.setdefault((part, names), (rank, found))
            if found != expected:
                _logger.warning(
                    "rank %d has other values in the state's %r than rank %d: under one name they count as replicas, of which "
                    "each rank stores a part, so the checkpoint is a mixture of both. Keep them equal with "
                    "prepare_model(model), which wraps a model in DistributedDataParallel; or give what is each rank's own, "
                    "such as a stage of a pipeline, a name of its own on each rank, or mark it with RankLocal",
                    rank,
                    part,
                    other,
                )
                return True
    return False


def _warn_of_epochs(epochs: Mapping[int, Mapping[str, int]]) -> bool:
    """Log a warning if a loader is in another epoch on another rank; return whether it did."""
    first: dict[str, tuple[int, int]] = {}
    for rank, of_rank in epochs.items():
        for name, epoch in of_rank.items():
            other, expected = first.setdefault(name, (rank, epoch))
            if epoch != expected:
                _logger.warning(
                    "the state's %r is in epoch %d on rank %d, and in epoch %d on rank %d: these ranks share out different "
                    "orders of the samples, of which some are used twice and others never. Begin equally many iterations on "
                    "every rank (one next(iter(loader)) between two loops counts as none), or call %s.set_epoch(epoch)",
                    name,
                    expected,
                    other,
                    epoch,
                    rank,
                    name,
                )
                return True
    return False


def _compare(by_rank: Mapping[int, Mapping[str, str]]) -> tuple[dict[str, dict[int, str]], list[str]]:
    """Return the digests of each name by rank, and the names that are each rank's own.

    Values of those names differ, or only some ranks have them: the others must not receive a value that they did not have.
    """
    digests: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, of_rank in by_rank.items():
        for name, digest in of_rank.items():
            digests[name][rank] = digest
    own = [
        name
        for name, of_name in digests.items()
        if len(set(of_name.values())) > 1 or (len(of_name) < len(by_rank) and rank_of(name) is None)
    ]
    return digests, own


def _mismatch(name: str, kinds: Mapping[int, str], other: int, other_kind: str) -> ReportMismatchError:
    rank, kind = next(iter(kinds.items()))
    return ReportMismatchError(
        f"the state's {name!r} is {kind} on rank {rank} and {other_kind} on rank {other}: give it one form on every rank, or "
        "mark it with RankLocal"
    )
