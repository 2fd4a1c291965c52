"""One run's records as every module reads them: its location, its listings, its manifests."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_torch.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    MalformedRecordError,
    StorageError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint, evaluation_of, read_listing, with_evaluations
from prefect_torch.ckpt.runs.layout import Layout, check_run_name, stem
from prefect_torch.ckpt.runs.manifest import Manifest, ManifestMemory, attempt_of, is_id
from prefect_torch.ckpt.runs.records.small_records import SmallRecords, location_of
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.opening import StorageLike, is_open, open_storage, parse_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy, Storage, StorageSpec
from prefect_torch.ckpt.storage.records import with_digest
from prefect_torch.ckpt.storage.retry import retries_ended_by
from prefect_torch.ckpt.storage.sizes import find_size

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_METADATA_DIGEST = "prefect-torch.digest"  # a key beside the user's own
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """A run in its storage, as the modules of this package read it; users work with `CheckpointStore`.

    Attributes:
        storage: The storage of the run.
        layout: The run's keys.
        spec: The specification with which another process opens the storage.
        memory: Manifests that need not be read again to list them; None to read every manifest each time.

    """

    storage: Storage
    layout: Layout
    spec: StorageSpec
    memory: ManifestMemory | None = None

    @classmethod
    def open(cls, storage: StorageLike, run: str, *, retry: RetryPolicy | None = None) -> "Self":
        """Open the run `run` in `storage`; costs no request, and the run need not exist yet.

        Args:
            storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.
            run: The run's name.
            retry: The retry policy of the storage, unless it is open; None gives up after two minutes.

        Raises:
            ValueError: If the name or the storage is invalid.

        """
        if is_open(storage):
            return cls(storage, Layout(check_run_name(run)), StorageSpec(storage.url))
        spec = parse_storage(storage)
        if retry is not None:
            spec = replace(spec, retry=retry)
        return cls(open_storage(spec), Layout(check_run_name(run)), spec)

    def __reduce__(self) -> "tuple[Any, tuple[StorageSpec, str]]":
        """Pickle the run's location; another process opens its own connection."""
        return type(self).open, (self.spec, self.name)

    def beside(self, run: str) -> "Self":
        """Return another run in this storage, read over the same connections and with the same login; it need not exist yet.

        Raises:
            ValueError: If the name is invalid.

        """
        return replace(self, layout=Layout(check_run_name(run)), memory=None)

    @property
    def records(self) -> SmallRecords:
        """The small records of the storage, by their keys."""
        return SmallRecords(self.storage)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.layout.run

    @property
    def path(self) -> str:
        """The run's location: a local path or a URL."""
        return self._location_of(self.name)

    def path_of(self, checkpoint_id: str) -> str:
        """Return a checkpoint's location: a local path or a URL, as `Checkpoint` takes it."""
        return self._location_of(self.layout.data(checkpoint_id)).rstrip("/")

    def ids(self, *, after: str | None = None) -> Iterator[str]:
        """Yield the ids of committed checkpoints, oldest first; one request per thousand."""
        return (listed.id for listed in self.listed(since=after) if listed.id != after)

    def listed(self, *, since: str | None = None) -> list[ListedCheckpoint]:
        """Return committed checkpoints with the names of their evaluations, oldest first; one request per thousand objects.

        Args:
            since: Begin with this id; None begins with the oldest.

        """
        if since is None:
            return read_listing(self.layout, self.storage.list(self.layout.manifests))
        before_it = f"{self.layout.manifests}{since[:-1]}"  # the prefix of its evaluations is named like the id
        listed = read_listing(self.layout, self.storage.list(self.layout.manifests, after=before_it))
        return [it for it in listed if it.id >= since]

    def exists(self, checkpoint_id: str) -> bool:
        """Return whether `checkpoint_id` is committed; one small request for the manifest, right even while listings lag."""
        return find_size(self.storage, self.layout.manifest(checkpoint_id)) is not None

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below `prefix`, each once and sorted, in whatever order the storage lists them.

        A name that is no key, which only another program can have given, is left out: every request for it would fail.
        """
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes, as listed, of what is below `prefix`, by the keys that `keys` returns, in any order."""
        return {info.key: info.bytes for info in self.storage.list(prefix) if is_key(info.key)}

    def newest_first(self) -> Iterator[ListedCheckpoint]:
        """Yield committed checkpoints, newest first; with a usable hint the first costs two requests at any count."""
        hint = self._hint()
        if hint is not None:  # at any value of the hint, a newer checkpoint sorts after it
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
        keys = self.keys(self.layout.evaluations(checkpoint_id))
        names = [found[1] for key in keys if (found := evaluation_of(self.layout, key)) is not None]
        return with_evaluations(self.storage, self.layout, manifest, names)

    def read(self, listed: ListedCheckpoint) -> Manifest:
        """Return the manifest of a listed checkpoint, with attached metrics, by a small read for each object.

        Raises:
            CheckpointNotFoundError: If it was pruned after the listing.
            CheckpointCorruptError: If the manifest is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        manifest = None if self.memory is None else self.memory.recall(listed.id)
        if manifest is None:
            manifest = self.committed(listed.id)
            if self.memory is not None:
                self.memory.remember(manifest)
        return with_evaluations(self.storage, self.layout, manifest, listed.evaluations)

    def read_or_leave_out(self, listed: ListedCheckpoint) -> Manifest | None:
        """Return the manifest as `read` does; None, with a warning, if it is damaged or a newer version committed it."""
        if self.memory is not None and self.memory.is_left_out(listed.id):
            return None
        try:
            return self.read(listed)
        except (CheckpointCorruptError, UnsupportedFormatError) as exc:
            self.leave_out(listed.id, exc)
            return None

    def leave_out(self, checkpoint_id: str, why: Exception) -> None:
        """Warn of a checkpoint whose manifest cannot be read, and remember it as unreadable."""
        _logger.warning("checkpoint %s of run %r is left out: %s", checkpoint_id, self.name, why)
        if self.memory is not None:
            self.memory.leave_out(checkpoint_id)

    def is_served(self) -> bool:
        """Return whether the storage, without retries, lists the run's attempts and gives its first object, if there is one."""
        once = threading.Event()
        once.set()
        with suppress(StorageError, OSError), retries_ended_by(once):
            next(self.storage.list(self.layout.attempts), None)
            with suppress(FileNotFoundError):
                self.storage.get_bytes(self.layout.run_info)
            return True
        return False

    def committed(self, checkpoint_id: str) -> Manifest:
        """Return the manifest of `checkpoint_id` as it was committed, without attached metrics; one small read.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.
            CheckpointCorruptError: If the manifest is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        key = self.layout.manifest(checkpoint_id)
        try:
            manifest = read_whole(self.storage, key, lambda data: Manifest.decode(data, self._location_of(key)))
        except FileNotFoundError as exc:
            raise self._not_found(checkpoint_id) from exc
        if manifest.id != checkpoint_id:
            raise MalformedRecordError(f"{self._location_of(key)} describes {manifest.id}")
        return manifest

    def check_exists(self, checkpoint_id: str) -> None:
        """Raise CheckpointNotFoundError unless `checkpoint_id` is committed; reads no content.

        Raises:
            CheckpointNotFoundError: If it was never committed, or was pruned.

        """
        if not self.exists(checkpoint_id):
            raise self._not_found(checkpoint_id)

    def _not_found(self, checkpoint_id: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"run {self.name!r} in {self.storage.url} has no checkpoint {checkpoint_id}: it was pruned or never committed"
        )

    def find_newest(self, take: Callable[[ListedCheckpoint], T | None], *, oldest_attempt: int = 0) -> T | None:
        """Return the first result of `take` that is not None, newest checkpoint first, even if others are pruned meanwhile.

        When a listed checkpoint turns out to be pruned, a newer one may have been committed just before. The search then starts
        again, as often as newly pruned checkpoints are found.

        Args:
            take: Called with each; raises CheckpointNotFoundError for a pruned one.
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

    def pinned(self) -> frozenset[str]:
        """Return the ids of the pinned checkpoints."""
        return pinned_among(self.keys(self.layout.pins))

    def metadata(self, manifest: Manifest) -> dict[str, Any]:
        """Return the user's metadata: the value set last, or the committed one; with a warning, if the former is damaged."""
        key = self.layout.metadata(manifest.id)
        changed = self.records.get_verified(key, "the metadata of a checkpoint", _METADATA_DIGEST)
        return dict(manifest.metadata) if changed is None else changed

    def put_metadata(self, checkpoint_id: str, metadata: Mapping[str, Any]) -> None:
        """Store the user's metadata beside a committed checkpoint, with a digest.

        Raises:
            CheckpointNotFoundError: If the checkpoint was pruned, possibly meanwhile.
            ValueError: If it has the digest's own key.

        """
        if _METADATA_DIGEST in metadata:
            raise ValueError(f"metadata must not have the key {_METADATA_DIGEST!r}, which is reserved for its digest")
        self.check_exists(checkpoint_id)
        key = self.layout.metadata(checkpoint_id)
        self.records.put_json(key, with_digest(metadata, _METADATA_DIGEST))
        self.check_still_exists(checkpoint_id, key)

    def check_still_exists(self, checkpoint_id: str, key: str) -> None:
        """Delete the object at `key`, stored beside a checkpoint, if that was pruned meanwhile: no other process knows of it.

        Raises:
            CheckpointNotFoundError: If the checkpoint was pruned.

        """
        if not self.exists(checkpoint_id):
            self.storage.delete([key])
            raise self._not_found(checkpoint_id)

    def hint_latest(self, checkpoint_id: str) -> None:
        """Record `checkpoint_id` as a recent one, so that finding the latest costs no full listing."""
        self.records.put_json(self.layout.latest, {"id": checkpoint_id})

    def _location_of(self, key: str) -> str:
        return location_of(self.storage, key)

    def _hint(self) -> str | None:
        try:
            hint = (self.records.get_json(self.layout.latest) or {}).get("id")
        except PermissionError as exc:  # a link that leads out of the storage, or another user's file
            _logger.warning("left out: %s", exc)
            return None
        return hint if isinstance(hint, str) and is_id(hint) else None


def pinned_among(keys: Iterable[str]) -> frozenset[str]:
    """Return the ids of the checkpoints whose pins are among `keys`."""
    return frozenset(filter(is_id, map(stem, keys)))
