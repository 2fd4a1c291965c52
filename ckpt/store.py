"""The checkpoints of one run as readers see them."""

import builtins
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .clock import utc_now
from .errors import CheckpointCorruptError, CheckpointNotFoundError
from .evaluations import ListedCheckpoint, attach, names_below, read_listing, with_evaluations
from .layout import Layout, check_run_name, stem
from .manifest import Manifest, is_id
from .manifest_memory import ManifestMemory
from .opening import StorageLike, is_open, open_storage, parse_storage
from .parallel_reads import read_all
from .retention import Order, Plan, RetentionPolicy, check_count, rank_best
from .storage import RetryPolicy, Storage, StorageSpec

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

VerifyLevel: TypeAlias = Literal["none", "size", "digest"]
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

    def listed(self, *, since: str | None = None) -> Iterator[ListedCheckpoint]:
        """Yield committed checkpoints with the names of their evaluations, oldest first; one request per thousand objects.

        Args:
            since: Begin with this id; None begins with the oldest.

        """
        before_it = None if since is None else f"{self.layout.manifests}{since}"
        return read_listing(self.layout, self.storage.list(self.layout.manifests, after=before_it))

    def newest_first(self) -> Iterator[ListedCheckpoint]:
        """Yield committed checkpoints, newest first; the first costs two requests at any count while the hint is any good."""
        hint = self._hint()
        if hint is not None:  # whatever it names, what is newer sorts after it
            yield from reversed(list(self.listed(since=hint)))
        yield from reversed([it for it in self.listed() if hint is None or it.id < hint])

    def get(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of `checkpoint_id`, with attached metrics; a listing, and a small read for each object.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.
            CheckpointCorruptError: If the manifest is damaged.

        """
        manifest = self.committed(checkpoint_id)
        found = self.storage.list(self.layout.evaluations(checkpoint_id))
        return with_evaluations(self, manifest, names_below(self.layout, checkpoint_id, found))

    def read(self, listed: ListedCheckpoint) -> Manifest:
        """Return the manifest of a listed checkpoint, with attached metrics, by a small read for each object.

        Raises:
            CheckpointNotFoundError: If it was pruned since.
            CheckpointCorruptError: If the manifest is damaged.

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

        """
        key = self.layout.manifest(checkpoint_id)
        try:
            data = self.storage.get_bytes(key)
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(
                f"run {self.run!r} in {self.storage.url} has no checkpoint {checkpoint_id}: it was pruned or never committed"
            ) from exc
        manifest = Manifest.decode(data, self._place_of(key))
        if manifest.id != checkpoint_id:
            raise CheckpointCorruptError(f"{self._place_of(key)} describes {manifest.id}")
        return manifest

    def list(self) -> list[Manifest]:
        """Return every committed checkpoint, oldest first; costs a listing, and a small read each and for each evaluation.

        Up to 32 reads are under way at once.
        A damaged manifest is left out with a warning.
        """
        return self.readable(self.listed())

    def readable(self, listed: Iterable[ListedCheckpoint]) -> builtins.list[Manifest]:
        """Return the manifests of listed checkpoints, with attached metrics; a damaged one is left out with a warning."""
        return [manifest for manifest in read_all(listed, self._readable) if manifest is not None]

    def latest(self) -> Manifest | None:
        """Return the newest readable checkpoint, or None; at most three requests while the hint is any good.

        Metrics that were attached to it cost a small read each besides.
        """
        return next((manifest for it in self.newest_first() if (manifest := self._readable(it)) is not None), None)

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
        """Keep `checkpoint_id` until it is unpinned, whatever the retention policy says.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.

        """
        self.committed(checkpoint_id)
        self.put_json(self.layout.pin(checkpoint_id), {"pinned_at": utc_now()})

    def unpin(self, checkpoint_id: str) -> None:
        """Leave `checkpoint_id` to the retention policy again; harmless when it was not pinned."""
        self.storage.delete([self.layout.pin(checkpoint_id)])

    def pinned(self) -> frozenset[str]:
        """Return the ids that are pinned."""
        return frozenset(stem(info.key) for info in self.storage.list(self.layout.pins))

    def metadata(self, manifest: Manifest) -> dict[str, Any]:
        """Return the user's metadata: what was set last, else what was committed."""
        changed = self.get_json(self.layout.metadata(manifest.id))
        return dict(manifest.metadata) if changed is None else changed

    def get_json(self, key: str) -> dict[str, Any] | None:
        """Return a small JSON object; None when it is missing or torn."""
        try:
            value = json.loads(self.storage.get_bytes(key))
        except FileNotFoundError:
            return None
        except ValueError:
            _logger.warning("%s is not JSON and is ignored", self._place_of(key))
            return None
        return value if isinstance(value, dict) else None

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
            return self.read(listed)
        except CheckpointNotFoundError:  # pruned since it was listed
            return None
        except CheckpointCorruptError as exc:
            _logger.warning("checkpoint %s of run %r is left out: %s", listed.id, self.run, exc)
            return None
