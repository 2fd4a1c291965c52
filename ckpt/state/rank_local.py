"""The mark for values that each rank has of its own."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RankLocal:
    """Mark `value` in a state as each rank's own: `state={"rng": RankLocal(torch.get_rng_state())}`.

    Without the mark, ranks compare at each report the values that are in no module, optimizer or DTensor, and each stores its
    own where they differ; a module's tensors count as equal on all ranks. Each rank stores its own marked values without a
    comparison; a load into `RankLocal(...)` restores them on the same rank if the number of ranks is the same.

    Attributes:
        value: A tensor, a plain value, a container of them, or an object with `state_dict`.

    """

    value: Any
