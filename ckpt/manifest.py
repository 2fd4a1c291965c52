"""The manifest: the one small file whose existence is a checkpoint's existence."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, cast

import xxhash

from .errors import CheckpointCorruptError
from .metrics import Metrics, from_json, to_json

FORMAT_VERSION = 1
MAX_STEP = 10**8 - 1
MAX_ATTEMPT = 10**6 - 1
_ID = re.compile(r"(?P<attempt>[0-9]{6})-(?P<step>[0-9]{8})-[0-9a-f]{8}")


def new_id(attempt: int, step: int) -> str:
    """Return a fresh checkpoint id; ids sort as (attempt, step) and are never reused."""
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is not within 0 and {MAX_STEP}")
    if not 1 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempt {attempt} is not within 1 and {MAX_ATTEMPT}")
    return f"{attempt:06d}-{step:08d}-{secrets.token_hex(4)}"


def is_id(text: str) -> bool:
    """Say whether `text` has the form of a checkpoint id."""
    return _ID.fullmatch(text) is not None


def attempt_of(checkpoint_id: str) -> int:
    """Return the attempt that wrote `checkpoint_id`."""
    return int(checkpoint_id.partition("-")[0])


def step_of(checkpoint_id: str) -> int:
    """Return the step of `checkpoint_id`."""
    return int(checkpoint_id.split("-")[1])


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: Relative to the checkpoint's directory, with "/" between folders.
        bytes: Its size.
        digest: xxh3-128 of its content, 32 hexadecimal digits.
        rank: The rank that stored it.

    """

    path: str
    bytes: int
    digest: str
    rank: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was committed, and the proof of it: sizes and digests of every file.

    Attributes:
        id: `<attempt:06d>-<step:08d>-<8 hex>`; sorts by attempt, then step.
        step: The step that the training reported.
        attempt: The attempt that wrote it, counted from 1 over the life of the run.
        metrics: Rank 0's metrics of the report, and under the name of each evaluation what it attached afterwards: what the
            evaluation "eval" says of accuracy is `metrics["eval"]["accuracy"]`, and ranks as "eval/accuracy".
        files: Every file of every rank, by path.
        world_size: The number of ranks that wrote it.
        parent: The id of the checkpoint that it continues, or a URL when that belongs to another run.
        created_at: When it was committed (UTC, the committing machine's clock; nothing is ordered by it).
        metadata: The user's own.
        timings: What it cost, in seconds: `stall_s`, for which its slowest rank's training waited, and `durable_s`, from the
            report to this manifest, both by the ranks' clocks.
        evaluations: The names in `metrics` that were attached after the commit; the manifest in storage has none.

    """

    id: str
    step: int
    attempt: int
    metrics: Metrics
    files: tuple[FileEntry, ...]
    world_size: int
    parent: str | None
    created_at: datetime
    metadata: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    evaluations: tuple[str, ...] = ()

    @property
    def reported(self) -> Metrics:
        """The metrics of the report alone."""
        return {name: value for name, value in self.metrics.items() if name not in self.evaluations}

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.bytes for entry in self.files)

    def encode(self) -> bytes:
        """Return strict JSON that carries its own digest: what was committed, whatever was attached to it since."""
        fields = {**asdict(self), "metrics": self.reported, "created_at": self.created_at.isoformat()}
        del fields["evaluations"]
        return seal(to_json({"format": FORMAT_VERSION, **fields}))

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Return the manifest that `encode` wrote.

        Args:
            data: The bytes as stored.
            where: The place they come from, for the error.

        Raises:
            CheckpointCorruptError: If any bit differs from what was written, or a newer format is found.

        """
        try:
            body = json.loads(data)["body"]
            intact = data == seal(body)  # the bytes, since JSON has several spellings of one value
        except (ValueError, KeyError, TypeError) as exc:
            raise CheckpointCorruptError(f"{where} is not a manifest: {exc}") from exc
        if not intact:
            raise CheckpointCorruptError(f"{where} does not match its own digest: it was changed after the commit")
        return cls._from_body(body, where)

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> "Manifest":
        if body.get("format") != FORMAT_VERSION:
            raise CheckpointCorruptError(
                f"{where} has format {body.get('format')!r} and this version reads {FORMAT_VERSION}: upgrade prefect-torch"
            )
        fields = cast("dict[str, Any]", from_json({key: body[key] for key in body if key != "format"}))
        fields["files"] = tuple(FileEntry(**entry) for entry in fields["files"])
        fields["created_at"] = datetime.fromisoformat(fields["created_at"])
        return cls(**fields)


def _dump(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def seal(body: object) -> bytes:
    """Return strict JSON of `body` and its digest, so that whoever reads it knows whether it is whole."""
    return _dump({"body": body, "digest": xxhash.xxh3_128_hexdigest(_dump(body))})
