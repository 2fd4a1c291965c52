"""What one rank is to measure, as its command line carries it."""

import json
from dataclasses import asdict, dataclass, replace

WORLD_SIZE = 2


@dataclass(frozen=True)
class Plan:
    """One way of checkpointing, at one size, in one place.

    Attributes:
        way: A key of `ways.WAYS`.
        phase: "save", or "resume" what was saved.
        mebibytes: The size of the state: a model and what AdamW keeps of it.
        rounds: How many checkpoints.
        matmuls: How many make a step of training.
        where: A key of `places.PLACES`.
        url: Where the checkpoints go, a folder or `s3://bucket/prefix`; only this way's.
        folder: Local files of this gang: its results, and what a way needs beside its storage.
        device: Where the state lies, "cpu" or "cuda"; all ranks share one GPU.
        rank: Of this process; None for the driver of a way that starts its ranks itself.
        started_s: When the gang was started, by `time.monotonic()`.
        group_port: Where the ranks' process group meets.
        leader: What the leader's own side tells the ranks.

    """

    way: str
    phase: str
    mebibytes: int
    rounds: int
    matmuls: int
    where: str
    url: str
    folder: str
    device: str = "cpu"
    rank: int | None = None
    started_s: float = 0.0
    group_port: int = 0
    leader: str = ""

    @property
    def is_local(self) -> bool:
        return self.where == "disk"

    def of_rank(self, rank: int) -> "Plan":
        return replace(self, rank=rank)

    def resuming(self) -> "Plan":
        return replace(self, phase="resume")

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Plan":
        return cls(**json.loads(text))
