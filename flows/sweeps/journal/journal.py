"""The journal of a sweep: numbered entries, each an object of its own that is written once, by one process at a time.

The process that leads the sweep owns it as the leader of a training owns its run: by a claim, which fences all earlier ones.
The first entry of an attempt fences the entries of earlier attempts: an entry of an earlier attempt with that number or a
higher one is ignored. A torn last entry is ignored, too, since an entry takes effect only once it is stored. A torn entry that
was merged is damage, since it had been stored.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefect_torch.ckpt import CheckpointCorruptError
from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.layout import attempt_number
from prefect_torch.ckpt.runs.metrics import from_json, to_json
from prefect_torch.ckpt.runs.parts.merging import Merging
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, seal, unseal

Entry: TypeAlias = dict[str, Any]
MOST_PARTS = 64
MOST_ENTRIES = 1024  # of one object
MOST_BYTES = 16 * 2**20  # after which a new object begins: metrics may be long texts, and each merge stores all of it again
_NAME = re.compile(r"(?P<last>[0-9]{9})-(?P<attempt>[0-9]{6})-(?P<count>[0-9]{6})\.jsonl")
_WHAT = "an entry of a sweep's journal"
_logger = logging.getLogger(__name__)


class JournalDamagedError(CheckpointCorruptError):
    """Entries of a sweep's journal are missing or damaged."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One object of the journal; of two with the same last entry, that of the newer attempt, or else the longer, is last."""

    last: int
    attempt: int
    count: int
    key: str


@dataclass(frozen=True, slots=True)
class LostEntries:
    """The entries of a journal that are missing, damaged or malformed.

    Attributes:
        count: Their number.
        first: A sentence on the first one.

    """

    count: int
    first: str


class Journal:
    """The journal of a sweep as its leader writes it.

    Args:
        run: The sweep.
        claim: The key of the leader's claim.
        entries: The number of entries so far, which this leader has read.

    """

    def __init__(self, run: Run, claim: str, entries: int) -> None:
        self._run = run
        self._claim = claim
        self._attempt = attempt_number(claim)
        self._next = entries
        self._parts: list[Part] = []  # of this attempt, not merged yet
        self._lines: list[bytes] = []
        self._merging = Merging(run.storage, f"the journal of sweep {run.name!r}")

    def append(self, entry: Entry) -> None:
        """Store `entry`; durable when this returns. Costs a put and a listing of a few keys.

        Raises:
            FencedError: If another process leads the sweep by now.
            StorageError: If the storage fails, also if only the merge with earlier entries does, after this one was stored.

        """
        check_fence(self._run, self._claim)
        line = seal({"format": FORMAT_VERSION, "number": self._next, "attempt": self._attempt, "entry": to_json(entry)})
        part = self._part(self._next, 1)
        self._run.storage.put_bytes(part.key, line)
        self._parts.append(part)
        self._lines.append(line)
        self._next += 1
        if len(self._parts) >= MOST_PARTS or len(self._lines) >= MOST_ENTRIES:
            self._merge()

    def _merge(self) -> None:
        """Replace the newest parts by one object, which sorts after them."""
        whole = self._part(self._next - 1, len(self._lines))
        data = b"\n".join(self._lines)
        self._merging.replace([part.key for part in self._parts], whole.key, data)
        self._parts = [whole]
        if len(self._lines) >= MOST_ENTRIES or len(data) >= MOST_BYTES:
            self._parts, self._lines = [], []
        self._merging.delete_replaced()

    def _part(self, last: int, count: int) -> Part:
        return Part(last, self._attempt, count, f"{self._run.layout.journal}{last:09d}-{self._attempt:06d}-{count:06d}.jsonl")


def read_journal(run: Run) -> list[Entry]:
    """Return every entry, in order, even if the leader merges objects meanwhile.

    Costs a listing and a read for each object. There is one object per thousand entries or 16 MiB, and up to 64 more per start
    of the sweep.

    Raises:
        JournalDamagedError: If an entry is missing or damaged that others follow or that was merged.
        UnsupportedFormatError: If a newer version wrote an entry.

    """
    entries, lost = read_known_entries(run)
    if lost is not None:
        raise damaged(f"{lost.first}; entries after it depend on it", "the object")
    return [*entries.values()]


def damaged(problem: str, restored: str = "it") -> JournalDamagedError:
    """Return the error for a journal with `problem`, which a backup of what is to be `restored` would mend."""
    return JournalDamagedError(
        f"{problem}: restore {restored} from a backup, or begin again with resume='never'; `prefect-torch show` and "
        "SweepResult.from_storage(..., partial=True) show what is known"
    )


def place_of(run: Run, number: int) -> str:
    """Return where the object lies that holds an entry, for a message; costs a listing."""
    holding = (part.key for part in list_parts(run) if part.last - part.count < number <= part.last)
    return f"{run.storage.url}/{next(holding, run.layout.journal)}"


def read_known_entries(run: Run) -> tuple[dict[int, Entry], LostEntries | None]:
    """Return the entries that can be read, by number, in order, and which cannot be; costs as much as `read_journal`.

    Raises:
        UnsupportedFormatError: If a newer version wrote an entry.

    """
    known: dict[Part, list[bytes] | None] = {}
    while unread := [part for part in list_parts(run) if part not in known]:
        known |= dict(zip(unread, read_all(unread, lambda part: _lines(run, part)), strict=True))
    found: dict[int, tuple[int, Entry]] = {}  # by number, with the newest attempt that wrote it
    unreadable: dict[int, str] = {}
    for part in sorted(known):
        for number, line in _numbered(part, known[part] or []):
            try:
                entry = _decode(line, number, f"{run.storage.url}/{part.key}")
            except CheckpointCorruptError as exc:
                unreadable[number] = str(exc)
                continue
            if number not in found or found[number][0] <= part.attempt:
                found[number] = (part.attempt, entry)
    entries = _without_overtaken(found)
    count = max([*entries, *_merged_last(known, found)], default=-1) + 1
    return entries, _find_lost(run, count, [*entries], unreadable)


def delete_journal(run: Run) -> None:
    """Delete every entry."""
    run.storage.delete(run.keys(run.layout.journal))


def list_parts(run: Run) -> list[Part]:
    """Return the objects of the journal in their order."""
    found: set[Part] = set()
    for key in run.keys(run.layout.journal):
        name = _NAME.fullmatch(key.rpartition("/")[2])
        if name is None or int(name["count"]) > int(name["last"]) + 1:
            _logger.warning("left out: %s/%s is no part of a sweep's journal", run.storage.url, key)
        else:
            found.add(Part(int(name["last"]), int(name["attempt"]), int(name["count"]), key))
    return sorted(found)


def _lines(run: Run, part: Part) -> list[bytes] | None:
    """Return the lines of a part, damaged or not; read again after damage, since a gateway may cut off a whole object."""

    def whole(data: bytes) -> list[bytes]:
        lines = data.split(b"\n")
        unseal(lines[part.count - 1] if len(lines) >= part.count else b"", part.key, _WHAT)
        return lines

    try:
        try:
            return read_whole(run.storage, part.key, whole)
        except CheckpointCorruptError:
            return run.storage.get_bytes(part.key).split(b"\n")
    except FileNotFoundError:  # merged meanwhile: the next listing has the object that replaced it
        return None


def _numbered(part: Part, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    first = part.last - part.count + 1
    return zip(range(first, part.last + 1), lines, strict=False)


def _decode(line: bytes, number: int, where: str) -> Entry:
    body = unseal(line, where, _WHAT)
    try:
        entry = from_json(body.get("entry"))
    except ValueError as exc:  # a tag that `to_json` does not write
        raise MalformedRecordError(f"{where} is not {_WHAT}: {exc}") from exc
    if body.get("number") != number or not isinstance(entry, dict):
        raise MalformedRecordError(f"{where} is not {_WHAT} number {number}")
    return entry


def _without_overtaken(found: dict[int, tuple[int, Entry]]) -> dict[int, Entry]:
    """Return the entries without those that an attempt wrote after a newer one had begun."""
    first = _first_numbers(found)
    return {
        number: entry
        for number, (attempt, entry) in sorted(found.items())
        if not any(newer > attempt and began <= number for newer, began in first.items())
    }


def _first_numbers(found: dict[int, tuple[int, Entry]]) -> dict[int, int]:
    """Return the number of the first entry of each attempt."""
    first: dict[int, int] = {}
    for number, (attempt, _) in sorted(found.items()):
        first.setdefault(attempt, number)
    return first


def _merged_last(parts: Iterable[Part], found: dict[int, tuple[int, Entry]]) -> Iterator[int]:
    """Yield the number of the last entry of each object that was merged, by its name, before a newer attempt had begun."""
    first = _first_numbers(found)
    for part in parts:
        if part.count > 1:
            yield min([part.last, *(began - 1 for newer, began in first.items() if newer > part.attempt)])


def _find_lost(run: Run, count: int, numbers: Sequence[int], unreadable: Mapping[int, str]) -> LostEntries | None:
    """Return which of the first `count` entries are not among the sorted `numbers`; a name may claim a billion of them."""
    if len(numbers) == count:
        return None
    first = next((number for number, known in enumerate(numbers) if known != number), len(numbers))
    reason = unreadable.get(first, "it is missing")
    line = f"entry {first} of the journal of sweep {run.name!r} in {run.storage.url} cannot be read: {reason}"
    return LostEntries(count - len(numbers), line)
