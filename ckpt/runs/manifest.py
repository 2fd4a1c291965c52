"""The manifest: the one small file whose existence commits a checkpoint; and a cache of those that were read."""

import re
import reprlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from prefect_torch.ckpt.errors import MalformedRecordError, ReportMismatchError
from prefect_torch.ckpt.runs.metrics import Metrics, to_json
from prefect_torch.ckpt.runs.records.fields import Count, Within, decode
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, fields_of, seal, unseal

_WHAT = "a manifest"
_STEP_DIGITS = 8
_LENGTHS = "abcdefghij"  # before a longer step, so that it sorts after all shorter ones: "a" for 9 digits, "b" for 10
MAX_STEP = 10 ** (_STEP_DIGITS + len(_LENGTHS)) - 1
MAX_ATTEMPT = 10**6 - 1
_LONGER = (f"{letter}[1-9][0-9]{{{_STEP_DIGITS + place}}}" for place, letter in enumerate(_LENGTHS))
_ID = re.compile(rf"[0-9]{{6}}-(?:[0-9]{{{_STEP_DIGITS}}}|{'|'.join(_LONGER)})-[0-9a-f]{{8}}")
_MOST_FILES = 500_000  # about 150 MB, for a hundred thousand checkpoints; beyond that, manifests are read each time


def new_id(attempt: int, step: int) -> str:
    """Return a new checkpoint id; ids sort as (attempt, step) and are never reused.

    Raises:
        ValueError: If the step or the attempt is out of range.

    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is not within 0 and {MAX_STEP}")
    if not 1 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempt {attempt} is not within 1 and {MAX_ATTEMPT}")
    return f"{id_prefix(attempt, step)}{secrets.token_hex(4)}"


def id_prefix(attempt: int, step: int) -> str:
    """Return how the ids of an attempt's checkpoints of a step begin."""
    number = f"{step:0{_STEP_DIGITS}d}"
    length = "" if len(number) == _STEP_DIGITS else _LENGTHS[len(number) - _STEP_DIGITS - 1]
    return f"{attempt:06d}-{length}{number}-"


def is_id(text: str) -> bool:
    """Return whether `text` has the form of a checkpoint id."""
    return _ID.fullmatch(text) is not None


def check_id(text: str) -> None:
    """Raise ValueError unless `text` is a checkpoint id.

    Raises:
        ValueError: If it is not.

    """
    if not is_id(text):
        raise ValueError(f"{reprlib.repr(text)} is no checkpoint id")


def attempt_of(checkpoint_id: str) -> int:
    """Return the attempt that wrote `checkpoint_id`."""
    return int(checkpoint_id.partition("-")[0])


def step_of(checkpoint_id: str) -> int:
    """Return the step of `checkpoint_id`."""
    return int(checkpoint_id.split("-")[1].lstrip(_LENGTHS))


StepNumber: TypeAlias = Annotated[int, Within(0, MAX_STEP)]
AttemptNumber: TypeAlias = Annotated[int, Within(1, MAX_ATTEMPT)]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: Relative to the checkpoint's directory, with "/" between names.
        bytes: Its size.
        digest: xxh3-128 of its content, 32 hexadecimal digits.
        rank: The rank that stored it.

    """

    path: Annotated[str, check_key]
    bytes: Count
    digest: str
    rank: Count


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of a commit, and the proof of it: sizes and digests of every file.

    Attributes:
        id: `<attempt:06d>-<step:08d>-<8 hex>`; sorts by attempt, then step. From 10^8 on, a letter is before the step.
        step: The step that the training reported.
        attempt: The attempt that wrote it, counted from 1 over the life of the run.
        metrics: Rank 0's metrics of the report, and under the name of each evaluation the metrics that it attached afterwards:
            the accuracy of the evaluation "eval" is `metrics["eval"]["accuracy"]`, and sorts checkpoints as "eval/accuracy".
        files: Every file of every rank, by path.
        world_size: The number of ranks that wrote it.
        parent: The id of the checkpoint that it continues, or a URL when that belongs to another run.
        created_at: The time of the commit (UTC, the committing machine's clock; nothing is sorted by it).
        metadata: The user's own metadata.
        timings: The cost in seconds: `stall_s`, the time that the slowest rank's training waited, and `durable_s`, from the
            first rank's report to this manifest. Each rank measures by its own clock, and no two clocks are compared.
        evaluations: The names in `metrics` that were attached after the commit; the manifest in storage has none.

    """

    id: Annotated[str, check_id]
    step: StepNumber
    attempt: AttemptNumber
    metrics: Metrics
    files: tuple[FileEntry, ...]
    world_size: Count
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
        """Return strict JSON that carries its own digest: the committed record, without metrics attached since."""
        body = {
            "format": FORMAT_VERSION,
            "id": self.id,
            "step": self.step,
            "attempt": self.attempt,
            "metrics": to_json(self.reported),
            "files": [fields_of(it) for it in self.files],
            "world_size": self.world_size,
            "parent": self.parent,
            "created_at": self.created_at.isoformat(),
            "metadata": to_json(self.metadata),
            "timings": to_json(self.timings),
        }
        return seal(body)

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Return the manifest that `encode` wrote.

        Args:
            data: The bytes as stored.
            where: The location of the bytes, for the error.

        Raises:
            CheckpointCorruptError: If any bit differs from what was written.
            MalformedRecordError: If it is no manifest that this package wrote.
            UnsupportedFormatError: If a newer version wrote it.

        """
        body = unseal(data, where, _WHAT)
        body.pop("evaluations", None)  # each evaluation is an object of its own
        manifest = decode(cls, body, where, _WHAT)
        try:
            _check(manifest)
        except ValueError as exc:
            raise MalformedRecordError(f"{where} is not {_WHAT}: {exc}") from None
        return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError if no commit can have made this manifest."""
    if (manifest.attempt, manifest.step) != (attempt_of(manifest.id), step_of(manifest.id)):
        raise ValueError(f"attempt {manifest.attempt} and step {manifest.step} are not those of its id {manifest.id}")
    paths = {entry.path for entry in manifest.files}
    if len(paths) < len(manifest.files):
        raise ValueError("it has a file twice")
    if both := next((parent for path in paths for parent in _parents(path) if parent in paths), None):
        raise ValueError(f"its {both!r} is a file and a directory")


def merge_files(parts: Sequence[Sequence[FileEntry]]) -> tuple[FileEntry, ...]:
    """Return the files of all ranks, each path once, sorted by path.

    Raises:
        ReportMismatchError: If two ranks reported different bytes under one path, or a file where another has a directory.

    """
    merged: dict[str, FileEntry] = {}
    for entry in (entry for part in parts for entry in part):
        known = merged.setdefault(entry.path, entry)
        if (known.bytes, known.digest) != (entry.bytes, entry.digest):
            raise ReportMismatchError(
                f"rank {known.rank} and rank {entry.rank} both reported a file {entry.path!r} with different content; "
                'put the rank into its name, such as f"model-rank={rank}.pt" (a file of torch.save holds the number of a '
                "tensor's GPU: save equal tensors on rank 0 alone, or from the CPU)"
            )
    for path, entry in merged.items():
        for parent in _parents(path):
            if parent in merged:
                raise ReportMismatchError(
                    f"rank {merged[parent].rank} reported a file {parent!r} where rank {entry.rank} reported a directory"
                )
    return tuple(merged[path] for path in sorted(merged))


def _parents(path: str) -> list[str]:
    names = path.split("/")[:-1]
    return ["/".join(names[: depth + 1]) for depth in range(len(names))]


class ManifestMemory:
    """Manifests of one run by id, as they were committed; safe to share between threads.

    An unreadable manifest is remembered, too, so that each is read, and warned of, once.

    Only a listing shows whether a checkpoint still exists. A resume or a verification reads the manifest itself.
    """

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}
        self._left_out: set[str] = set()
        self._num_files = 0

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle empty: another process reads the manifests itself."""
        return ManifestMemory, ()

    def recall(self, checkpoint_id: str) -> Manifest | None:
        """Return the manifest of `checkpoint_id`, or None if it is not remembered."""
        return self._manifests.get(checkpoint_id)

    def ids(self) -> list[str]:
        """Return the ids of those that are remembered."""
        return list(self._manifests)

    def recall_all(self, checkpoint_ids: Iterable[str]) -> dict[str, Manifest]:
        """Return those manifests that are remembered, by id."""
        return {it: manifest for it in checkpoint_ids if (manifest := self._manifests.get(it)) is not None}

    def remember(self, manifest: Manifest) -> None:
        """Keep `manifest`, unless the cache is full."""
        if self._num_files < _MOST_FILES and manifest.id not in self._manifests:
            self._manifests[manifest.id] = manifest
            self._num_files += 1 + len(manifest.files)

    def leave_out(self, checkpoint_id: str) -> None:
        """Record that the manifest of `checkpoint_id` cannot be read."""
        self._left_out.add(checkpoint_id)

    def is_left_out(self, checkpoint_id: str) -> bool:
        """Return whether the manifest of `checkpoint_id` could not be read."""
        return checkpoint_id in self._left_out

    def forget(self, checkpoint_id: str) -> None:
        """Drop the manifest of a checkpoint that was deleted."""
        if (manifest := self._manifests.pop(checkpoint_id, None)) is not None:
            self._num_files -= 1 + len(manifest.files)

    def forget_all_but(self, existing: Collection[str]) -> None:
        """Drop the manifests of checkpoints that a listing does not contain."""
        self._left_out.intersection_update(existing)
        for checkpoint_id in self._manifests.keys() - set(existing):
            self.forget(checkpoint_id)
