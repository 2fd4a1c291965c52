"""The mark for what each rank has on its own."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RankLocal:
    """Says that every rank has its own of `value` in a state: `state={"rng": RankLocal(torch.get_rng_state())}`.

    Without it, ranks compare what is in no module, optimizer or DTensor at each report, and each stores its own of what
    differs; a module's tensors count as equal on all ranks. Each rank stores its own of what is marked, compared or not; a load
    into `RankLocal(...)` gives it back to the same rank of as many ranks.

    Attributes:
        value: A tensor, a plain value, a container of them, or an object with `state_dict`.

    """

    value: Any
