"""The mark for what each rank has on its own."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RankLocal:
    """Says that every rank has its own of `value` in a state: `state={"rng": RankLocal(torch.get_rng_state())}`.

    Without it, tensors of one name and shape are taken for equal on all ranks unless they are small (< 64 KiB) and differ.
    Each rank stores its own; a load into `RankLocal(...)` gives it back to the same rank of as many ranks.

    Attributes:
        value: A tensor, a plain value, a container of them, or an object with `state_dict`.

    """

    value: Any
