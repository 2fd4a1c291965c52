"""The checkpoints of one run as readers see them."""

import builtins
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from .confirmed_reads import confirm_damage
from .errors import CheckpointCorruptError, CheckpointNotFoundError, MalformedRecordError, UnsupportedFormatError
from .evaluations import ListedCheckpoint, attach, evaluation_of, read_listing, with_evaluations
from .layout import Layout, check_run_name, stem
from .manifest import Manifest, attempt_of, is_id
from .manifest_memory import ManifestMemory
from .opening import StorageLike, is_open, open_storage, parse_storage
from .parallel_reads import read_all
from .records import decode, parse
from .retention import Order, Plan, RetentionPolicy, check_count, rank_best
from .storage import RetryPolicy, Storage, StorageSpec

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

VerifyLevel: TypeAlias = Literal["none", "size", "digest"]
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The committed checkpoints of one run; a checkpoint exists if and only if its manifest does.

    Attributes:
        storage: Where the run lies.
        layout: The run's keys.
        spec: How another process opens the storage.
        memory: Manifests that need not be read again to list them; None to read every one each time.

    """

    storage: Storage
    layout: Layout
    spec: StorageSpec
    memory: ManifestMemory | None = None

    @classmethod
    def open(cls, storage: StorageLike, run: str, *, retry: RetryPolicy | None = None) -> "CheckpointStore":
        """Open the run `run` in `storage`; costs no request, and the run need not exist yet.

        Args:
            storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.
            run: The run's name.
            retry: How patient to be with the storage, unless it is open; two minutes if None.

        Raises:
            ValueError: If the name or the storage cannot be one.

        """
        if is_open(storage):
            return cls(storage, Layout(check_run_name(run)), StorageSpec(storage.url))
        spec = parse_storage(storage)
        if retry is not None:
            spec = replace(spec, retry=retry)
        return cls(open_storage(spec), Layout(check_run_name(run)), spec)

    def __reduce__(self) -> "tuple[Any, tuple[StorageSpec, str]]":
        """Pickle as where it is; another process opens its own connection."""
        return CheckpointStore.open, (self.spec, self.run)

    @property
    def run(self) -> str:
        """The run's name."""
        return self.layout.run

    @property
    def path(self) -> str:
        """Where the run lies: a local path or a URL."""
        return self._place_of(self.run)

    def path_of(self, checkpoint_id: str) -> str:
        """Return where a checkpoint lies: a local path or a URL, as `Checkpoint` takes it."""
        return self._place_of(self.layout.data(checkpoint_id)).rstrip("/")

    def ids(self, *, after: str | None = None) -> Iterator[str]:
        """Yield the ids of committed checkpoints, oldest first; one request per thousand."""
        return (listed.id for listed in self.listed(since=after) if listed.id != after)

    def listed(self, *, since: str | None = None) -> builtins.list[ListedCheckpoint]:
        """Return committed checkpoints with the names of their evaluations, oldest first; one request per thousand objects.

        Args:
            since: Begin with this id; None begins with the oldest.

        """
        if since is None:
            return read_listing(self.layout, self.storage.list(self.layout.manifests))
        before_it = f"{self.layout.manifests}{since[:-1]}"  # the folder of its evaluations is named like the id
        listed = read_listing(self.layout, self.storage.list(self.layout.manifests, after=before_it))
        return [it for it in listed if it.id >= since]

    def exists(self, checkpoint_id: str) -> bool:
        """Ask for the manifest itself whether `checkpoint_id` is committed; one small request, right where a listing lags."""
        try:
            self.storage.size(self.layout.manifest(checkpoint_id))
        except FileNotFoundError:
            return False
        return True

    def keys(self, prefix: str) -> builtins.list[str]:
        """Return the keys below `prefix`, each once and sorted, in whatever order the storage lists them."""
        return sorted({info.key for info in self.storage.list(prefix)})

    def newest_first(self) -> Iterator[ListedCheckpoint]:
        """Yield committed checkpoints, newest first; the first costs two requests at any count while the hint is any good."""
        hint = self._hint()
        if hint is not None:  # whatever it names, what is newer sorts after it
            newer = self.listed(since=hint)
            yield from reversed(newer)
            if (not newer or newer[0].id != hint) and self.exists(hint):  # the listing is behind the hint
                yield ListedCheckpoint(hint)
        yield from (it for it in reversed(self.listed()) if hint is None or it.id < hint)

    def get(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of `checkpoint_id`, with attached metrics; a listing, and a small read for each object.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.
            CheckpointCorruptError: If the manifest is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        manifest = self.committed(checkpoint_id)
        found = (evaluation_of(self.layout, key) for key in self.keys(self.layout.evaluations(checkpoint_id)))
        return with_evaluations(self, manifest, [evaluation[1] for evaluation in found if evaluation is not None])

    def read(self, listed: ListedCheckpoint) -> Manifest:
        """Return the manifest of a listed checkpoint, with attached metrics, by a small read for each object.

        Raises:
            CheckpointNotFoundError: If it was pruned since.
            CheckpointCorruptError: If the manifest is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        manifest = None if self.memory is None else self.memory.recall(listed.id)
        if manifest is None:
            manifest = self.committed(listed.id)
            if self.memory is not None:
                self.memory.remember(manifest)
        return with_evaluations(self, manifest, listed.evaluations)

    def committed(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of `checkpoint_id` as it was committed, without attached metrics; one small read.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.
            CheckpointCorruptError: If the manifest is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        return confirm_damage(self.storage, lambda storage: self._read_manifest(checkpoint_id, storage))

    def check_exists(self, checkpoint_id: str) -> None:
        """Return only if `checkpoint_id` is committed; asks for no content.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.

        """
        if not self.exists(checkpoint_id):
            raise self._not_found(checkpoint_id)

    def _not_found(self, checkpoint_id: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"run {self.run!r} in {self.storage.url} has no checkpoint {checkpoint_id}: it was pruned or never committed"
        )

    def _read_manifest(self, checkpoint_id: str, storage: Storage) -> Manifest:
        key = self.layout.manifest(checkpoint_id)
        try:
            data = storage.get_bytes(key)
        except FileNotFoundError as exc:
            raise self._not_found(checkpoint_id) from exc
        manifest = Manifest.decode(data, self._place_of(key))
        if manifest.id != checkpoint_id:
            raise MalformedRecordError(f"{self._place_of(key)} describes {manifest.id}")
        return manifest

    def list(self) -> list[Manifest]:
        """Return every committed checkpoint, oldest first; costs a listing, and a small read each and for each evaluation.

        Up to 32 reads are under way at once.
        What is damaged, or a newer version committed, is left out with a warning.
        """
        return self.readable(self.listed())

    def readable(self, listed: Iterable[ListedCheckpoint]) -> builtins.list[Manifest]:
        """Return the manifests of listed checkpoints, with attached metrics; what cannot be read is left out with a warning."""
        return [manifest for manifest in read_all(listed, self._readable) if manifest is not None]

    def latest(self) -> Manifest | None:
        """Return the newest readable checkpoint, or None; at most three requests while the hint is any good.

        Metrics that were attached to it cost a small read each besides. Looks again where one that was listed has been pruned
        meanwhile, so it is None only of a run that has no readable checkpoint.
        """
        return self.find_newest(self._read_or_leave_out)

    def find_newest(self, take: Callable[[ListedCheckpoint], T | None], *, oldest_attempt: int = 0) -> T | None:
        """Return the first that `take` does not answer with None, newest first, though others are pruned meanwhile.

        Where one that was listed turns out to be pruned, a newer one may have been committed just before: it looks again, as
        often as there are new ones that have gone.

        Args:
            take: Called with each; raises CheckpointNotFoundError for one that has gone.
            oldest_attempt: The first attempt whose checkpoints count.

        """
        gone: set[str] = set()
        while True:
            num_gone = len(gone)
            for listed in takewhile(lambda it: attempt_of(it.id) >= oldest_attempt, self.newest_first()):
                if listed.id in gone:
                    continue
                try:
                    taken = take(listed)
                except CheckpointNotFoundError:
                    gone.add(listed.id)
                    break
                if taken is not None:
                    return taken
            if len(gone) == num_gone:
                return None

    def best(self, k: int = 1, attribute: str | None = None, order: Order = "max") -> builtins.list[Manifest]:
        """Return the `k` best checkpoints, best first; the newest ones without an attribute.

        Args:
            k: How many at most.
            attribute: A metric's name, or an "a/b" path into nested metrics, such as "eval/accuracy" of an evaluation.
            order: Whether a high ("max") or a low ("min") value is good.

        Raises:
            ValueError: If `k` is less than 1, or `order` is neither.

        """
        check_count("k", k)
        return rank_best(self.list(), attribute, order)[:k]

    def checkpoint(self, manifest: Manifest) -> "Checkpoint":
        """Return a handle to read the checkpoint with."""
        from .checkpoint import Checkpoint  # noqa: PLC0415 - a handle made from a URL opens a store

        return Checkpoint.committed(self, manifest)

    def verify(self, manifest: Manifest, level: VerifyLevel = "digest") -> None:
        """Return only if what is stored is what was committed.

        Args:
            manifest: The checkpoint.
            level: "size" compares sizes by one listing, "digest" reads every byte besides, "none" does nothing.

        Raises:
            CheckpointCorruptError: Naming the first file that is missing, short, long or changed.

        """
        from .verification import verify  # noqa: PLC0415 - keeps temporary files out of the reading path

        verify(self, manifest, level)

    def prune(
        self, policy: RetentionPolicy, *, dry_run: bool = False, in_use: tuple[str, ...] = (), up_to: str | None = None
    ) -> Plan[Manifest]:
        """Delete what `policy` does not keep, manifest first; the newest and pinned checkpoints always stay.

        Args:
            policy: What is worth keeping.
            dry_run: Only decide.
            in_use: Ids that must stay because a training restores from them.
            up_to: What is newer than this id stays; None for no such limit.

        Raises:
            StorageError: If some deletion failed; the others were done, and the next prune tries again.

        """
        from .pruning import prune  # noqa: PLC0415 - deleting is apart from reading

        return prune(self, policy, dry_run=dry_run, in_use=in_use, up_to=up_to)

    def attach_metrics(self, checkpoint_id: str, metrics: Mapping[str, object], name: str = "eval") -> None:
        """Add metrics to a committed checkpoint; durable when this returns, and seen by every later `list`, `latest` and `get`.

        They appear as `Manifest.metrics[name]` beside what the training reported, of which nothing changes. What was attached
        under the same name before is replaced; other names stay, whoever attaches at the same time. Costs three requests.

        Args:
            checkpoint_id: The checkpoint.
            metrics: What `report` takes.
            name: What to call the evaluation; "eval" with `{"accuracy": 0.9}` ranks as "eval/accuracy".

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or it was pruned meanwhile.
            ValueError: If the training itself reported a metric called `name`, or name or metrics cannot be what they should.

        """
        attach(self, checkpoint_id, metrics, name)

    def pin(self, checkpoint_id: str) -> None:
        """Keep `checkpoint_id` until it is unpinned, whatever the retention policy says and whoever prunes right now.

        Costs three requests; where a prune is under way, two more and a small read.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or a prune is deleting it at this moment.
            CheckpointCorruptError: If its manifest is damaged.

        """
        from .pinning import pin  # noqa: PLC0415 - as in prune

        pin(self, checkpoint_id)

    def unpin(self, checkpoint_id: str) -> None:
        """Leave `checkpoint_id` to the retention policy again; harmless when it was not pinned."""
        from .pinning import unpin  # noqa: PLC0415 - as in prune

        unpin(self, checkpoint_id)

    def restore(self, checkpoint_id: str) -> Manifest:
        """Bring a quarantined checkpoint back into the run, and return its manifest; reads every byte of it first.

        Its manifest is put last, so a crash leaves it in quarantine or back in the run. A retention policy may drop it then
        like any other; pin it to keep it.

        Raises:
            CheckpointNotFoundError: If it is not in quarantine.
            CheckpointCorruptError: If it is damaged indeed, naming what is; it stays in quarantine.

        """
        from .quarantining import restore  # noqa: PLC0415 - as in prune

        return restore(self, checkpoint_id)

    def pinned(self) -> frozenset[str]:
        """Return the ids that are pinned."""
        return frozenset(map(stem, self.keys(self.layout.pins)))

    def metadata(self, manifest: Manifest) -> dict[str, Any]:
        """Return the user's metadata: what was set last, else what was committed."""
        changed = self.get_json(self.layout.metadata(manifest.id))
        return dict(manifest.metadata) if changed is None else changed

    def get_json(self, key: str) -> dict[str, Any] | None:
        """Return a small JSON object; None where there is none, or with a warning where it is something else."""
        return self._read_small(key, "a JSON object", lambda found: found)

    def get_record(self, kind: type[T], key: str, what: str) -> T | None:
        """Return the small record at `key`; None where there is none, or with a warning where it is something else.

        Args:
            kind: Its dataclass; see `records.decode`.
            key: Where it is.
            what: What it is, with its article, for the warning.

        Raises:
            UnsupportedFormatError: If a newer version wrote it.

        """
        return self._read_small(key, what, lambda found: decode(kind, found, self._place_of(key), what))

    def leave_out_newer(self, read: Callable[[], T | None]) -> T | None:
        """Return what `read` returns; None, with a warning, if a newer version wrote it."""
        try:
            return read()
        except UnsupportedFormatError as exc:
            _logger.warning("left out: %s", exc)
            return None

    def _read_small(self, key: str, what: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        try:
            return confirm_damage(self.storage, lambda it: read(parse(it.get_bytes(key), self._place_of(key), what)))
        except FileNotFoundError:
            return None
        except MalformedRecordError as exc:
            _logger.warning("left out: %s", exc)
            return None

    def put_json(self, key: str, value: dict[str, Any]) -> None:
        """Store a small JSON object."""
        self.storage.put_bytes(key, json.dumps(value, sort_keys=True).encode())

    def hint_latest(self, checkpoint_id: str) -> None:
        """Remember `checkpoint_id` as a recent one, so that finding the latest costs no full listing."""
        self.put_json(self.layout.latest, {"id": checkpoint_id})

    def _place_of(self, key: str) -> str:
        return f"{self.storage.url.rstrip('/')}/{key}"

    def _hint(self) -> str | None:
        hint = (self.get_json(self.layout.latest) or {}).get("id")
        return hint if isinstance(hint, str) and is_id(hint) else None

    def _readable(self, listed: ListedCheckpoint) -> Manifest | None:
        try:
            return self._read_or_leave_out(listed)
        except CheckpointNotFoundError:  # pruned since it was listed
            return None

    def _read_or_leave_out(self, listed: ListedCheckpoint) -> Manifest | None:
        if self.memory is not None and self.memory.is_left_out(listed.id):
            return None
        try:
            return self.read(listed)
        except (CheckpointCorruptError, UnsupportedFormatError) as exc:
            _logger.warning("checkpoint %s of run %r is left out: %s", listed.id, self.run, exc)
            if self.memory is not None:
                self.memory.leave_out(listed.id)
            return None
