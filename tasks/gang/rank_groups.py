"""The ranks that share a task run."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_torch.tasks.rank.spec import MOST_TASK_RUNS, RankSpec


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of one machine that share a task run.

    Attributes:
        ranks: Their numbers.
        specs: The ranks.

    """

    ranks: range
    specs: tuple[RankSpec, ...]

    @property
    def node(self) -> int:
        """The number of their machine."""
        return self.specs[0].node_rank

    def __str__(self) -> str:
        """Return the number of the rank, or the first and the last one."""
        return str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}-{self.ranks[-1]}"


def group_ranks(specs: Sequence[RankSpec]) -> list[RankGroup]:
    """Return the groups of ranks that share a task run: each rank alone, or, of many ranks, rank 0 alone and each machine."""
    if len(specs) <= MOST_TASK_RUNS:
        return [RankGroup(range(rank, rank + 1), (spec,)) for rank, spec in enumerate(specs)]
    by_node: dict[int, list[RankSpec]] = defaultdict(list)
    for spec in specs[1:]:
        by_node[spec.node_rank].append(spec)
    return [
        RankGroup(range(1), (specs[0],)),
        *(RankGroup(range(each[0].rank, each[-1].rank + 1), tuple(each)) for each in by_node.values()),
    ]
