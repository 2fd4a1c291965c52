"""The checkpoints of one run as readers see them."""

import builtins
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .clock import utc_now
from .errors import CheckpointCorruptError, CheckpointNotFoundError
from .layout import Layout, check_run_name, stem
from .manifest import Manifest, is_id
from .opening import StorageLike, is_open, open_storage, parse_storage
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

    """

    storage: Storage
    layout: Layout
    spec: StorageSpec

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
        return f"{self.storage.url.rstrip('/')}/{self.run}"

    def ids(self, *, after: str | None = None) -> Iterator[str]:
        """Yield the ids of committed checkpoints, oldest first; one request per thousand."""
        after_key = None if after is None else self.layout.manifest(after)
        for info in self.storage.list(self.layout.manifests, after=after_key):
            if is_id(stem(info.key)):
                yield stem(info.key)

    def get(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of `checkpoint_id`.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.
            CheckpointCorruptError: If the manifest is damaged.

        """
        try:
            data = self.storage.get_bytes(self.layout.manifest(checkpoint_id))
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(
                f"run {self.run!r} in {self.storage.url} has no checkpoint {checkpoint_id}: it was pruned or never committed"
            ) from exc
        manifest = Manifest.decode(data, f"{self.path}/manifests/{checkpoint_id}.json")
        if manifest.id != checkpoint_id:
            raise CheckpointCorruptError(f"{self.path}/manifests/{checkpoint_id}.json describes {manifest.id}")
        return manifest

    def list(self) -> list[Manifest]:
        """Return every committed checkpoint, oldest first; costs a listing and a small read each.

        A damaged manifest is left out with a warning.
        """
        return [manifest for checkpoint_id in self.ids() if (manifest := self._readable(checkpoint_id)) is not None]

    def latest(self) -> Manifest | None:
        """Return the newest readable checkpoint, or None; at most three requests while the hint is any good."""
        hint = self._hint()
        if hint is not None:
            newer = list(self.ids(after=hint))
            for checkpoint_id in (*reversed(newer), hint):
                if (manifest := self._readable(checkpoint_id)) is not None:
                    return manifest
        for checkpoint_id in reversed(list(self.ids())):
            if (manifest := self._readable(checkpoint_id)) is not None:
                return manifest
        return None

    def best(self, k: int = 1, attribute: str | None = None, order: Order = "max") -> builtins.list[Manifest]:
        """Return the `k` best checkpoints, best first; the newest ones without an attribute.

        Args:
            k: How many at most.
            attribute: A metric's name, or an "a/b" path into nested metrics.
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

    def pin(self, checkpoint_id: str) -> None:
        """Keep `checkpoint_id` until it is unpinned, whatever the retention policy says.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.

        """
        self.get(checkpoint_id)
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
            _logger.warning("%s/%s is not JSON and is ignored", self.storage.url, key)
            return None
        return value if isinstance(value, dict) else None

    def put_json(self, key: str, value: dict[str, Any]) -> None:
        """Store a small JSON object."""
        self.storage.put_bytes(key, json.dumps(value, sort_keys=True).encode())

    def hint_latest(self, checkpoint_id: str) -> None:
        """Remember `checkpoint_id` as a recent one, so that finding the latest costs no full listing."""
        self.put_json(self.layout.latest, {"id": checkpoint_id})

    def _hint(self) -> str | None:
        hint = (self.get_json(self.layout.latest) or {}).get("id")
        return hint if isinstance(hint, str) and is_id(hint) else None

    def _readable(self, checkpoint_id: str) -> Manifest | None:
        try:
            return self.get(checkpoint_id)
        except CheckpointNotFoundError:  # pruned since it was listed
            return None
        except CheckpointCorruptError as exc:
            _logger.warning("checkpoint %s of run %r is left out: %s", checkpoint_id, self.run, exc)
            return None
