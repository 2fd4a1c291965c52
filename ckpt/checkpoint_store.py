"""The checkpoints of one run, and the runs of a storage."""

import builtins
import logging
import reprlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.errors import CheckpointNotFoundError
from prefect_torch.ckpt.runs.deletion.marks import is_marked
from prefect_torch.ckpt.runs.evaluations import check_evaluation_name, check_free, check_spelling, encode_evaluation
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.layout import Layout, is_run_name, stem
from prefect_torch.ckpt.runs.manifest import Manifest, is_id
from prefect_torch.ckpt.runs.metrics import clean_metrics
from prefect_torch.ckpt.runs.retention import Order, Plan, RetentionPolicy, check_count, sort_by_score
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel
from prefect_torch.ckpt.storage.opening import StorageLike, open_storage
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.text import utc_now

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointStore(Run):
    """The committed checkpoints of one run; a checkpoint exists if and only if its manifest does.

    Attributes:
        storage: The storage of the run.
        layout: The run's keys.
        spec: The specification with which another process opens the storage.
        memory: Manifests that need not be read again to list them; None to read every manifest each time.

    """

    @property
    def run(self) -> str:
        """The run's name."""
        return self.name

    def list(self) -> list[Manifest]:
        """Return every committed checkpoint, oldest first; costs a listing, and a small read per checkpoint and evaluation.

        Up to 32 reads run concurrently. If a training keeps many checkpoints, they are read from an index, some thousands
        per request.
        A checkpoint that is damaged, that a newer version committed, or whose manifest alone the storage refuses, is left out
        with a warning.
        """
        return list_manifests(self)[1]

    def latest(self) -> Manifest | None:
        """Return the newest readable checkpoint, or None; costs at most three requests while the hint is valid.

        Each evaluation attached to it costs one more small read. The search is repeated when a listed checkpoint has been
        pruned meanwhile, so None means that the run has no readable checkpoint.
        """
        return self.find_newest(self.read_or_leave_out)

    def best(self, k: int = 1, attribute: str | None = None, order: Order = "max") -> builtins.list[Manifest]:
        """Return the `k` best checkpoints, best first; the newest ones without an attribute, or if none has a number there.

        Args:
            k: How many at most.
            attribute: A metric's name, or an "a/b" path into nested metrics, such as "eval/accuracy" of an evaluation.
            order: Whether a high ("max") or a low ("min") value is good.

        Raises:
            ValueError: If `k` is less than 1, or `order` is neither.

        """
        check_count("k", k)
        return sort_by_score(self.list(), attribute, order)[:k]

    def checkpoint(self, manifest: Manifest) -> "Checkpoint":
        """Return a handle to read the checkpoint with.

        Raises:
            TypeError: If `manifest` is not a Manifest; `get` returns the manifest of an id.

        """
        if not isinstance(manifest, Manifest):
            raise TypeError(f"{reprlib.repr(manifest)} is no manifest: store.get(id) returns the manifest of an id")
        return Checkpoint.committed(self, manifest)

    def verify(self, manifest: Manifest, level: VerifyLevel = "digest") -> None:
        """Raise unless the stored files are those that were committed.

        Args:
            manifest: The checkpoint.
            level: "size" compares sizes by one listing, "digest" also reads every byte, "none" does nothing.

        Raises:
            CheckpointCorruptError: Naming the first file that is missing, short, long or changed.
            CheckpointNotFoundError: If the checkpoint is being pruned.
            ValueError: If there is no such level.
            TypeError: If `manifest` is not a Manifest; `get` returns the manifest of an id.

        """
        self.checkpoint(manifest).verify(level)

    def prune(
        self, policy: RetentionPolicy, *, dry_run: bool = False, in_use: tuple[str, ...] = (), up_to: str | None = None
    ) -> Plan[Manifest]:
        """Delete the checkpoints that `policy` does not keep, manifest first; the newest and pinned ones always stay.

        While the run is trained, the checkpoint that its ranks restored stays, too; until it has completed, so do those whose
        reports are not in the metric history yet. That costs a listing and two small reads, and for such a run a listing and
        a read of the metric history.

        Returns the plan: the manifests of the deleted checkpoints, and the reasons why each other checkpoint is kept, by id.

        Args:
            policy: The retention policy.
            dry_run: Delete nothing; the plan has the manifests of the checkpoints that would be deleted.
            in_use: Ids that must stay in addition.
            up_to: Checkpoints newer than this id stay in addition; None for no such limit.

        Raises:
            ValueError: If no checkpoint has the policy's metric, so that arbitrary ones would be deleted; not if it is the
                metric of the run's own policy.
            StorageError: If a deletion failed. The other deletions were done, unless the storage no longer answers; the next
                prune tries again.
            UnsupportedFormatError: If a newer version trains the run.

        """
        from prefect_torch.ckpt.runs.attempts.status import read_status  # noqa: PLC0415 - loaded only for a deletion
        from prefect_torch.ckpt.runs.deletion.limits import prune_limits  # noqa: PLC0415 - loaded only for a deletion
        from prefect_torch.ckpt.runs.deletion.pruning import prune  # noqa: PLC0415 - loaded only for a deletion

        return prune(self, policy, prune_limits(self, read_status(self)).narrowed(in_use, up_to), dry_run=dry_run)

    def attach_metrics(self, checkpoint_id: str, metrics: Mapping[str, object], name: str = "eval") -> None:
        """Add metrics to a committed checkpoint; durable when this returns, and seen by every later `list`, `latest` and `get`.

        They appear as `Manifest.metrics[name]` beside the reported metrics, which do not change. Metrics attached under the
        same name before are replaced; other names stay, also when other processes attach concurrently. Costs three requests.

        Args:
            checkpoint_id: The checkpoint.
            metrics: Metrics as `report` takes them.
            name: The name of the evaluation. `best` finds the metric "accuracy" of "eval" as "eval/accuracy".

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or it was pruned meanwhile.
            ValueError: If the training itself reported a metric called `name`, or "name/...", or the name or the metrics are
                invalid, or the name differs from another one in case alone, and the filesystem ignores case.

        """
        check_evaluation_name(name)
        cleaned = clean_metrics(metrics)
        check_free(self.committed(checkpoint_id), name)
        key = self.layout.evaluation(checkpoint_id, name)
        check_spelling(self.storage, key)
        self.storage.put_bytes(key, encode_evaluation(checkpoint_id, name, cleaned))
        self.check_still_exists(checkpoint_id, key)

    def pin(self, checkpoint_id: str, token: str | None = None) -> None:
        """Keep `checkpoint_id` until it is unpinned, despite any retention policy and any concurrent prune.

        Costs five requests, and one more small read while a prune is under way.

        Args:
            checkpoint_id: The checkpoint.
            token: Eight hexadecimal digits by which `unpin` removes this pin alone; None draws them at random.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or a prune is deleting it at this moment.
            CheckpointCorruptError: If its manifest is damaged.
            StorageError: If listings do not show whether a prune is under way.

        """
        if not is_id(checkpoint_id):
            raise CheckpointNotFoundError(f"run {self.name!r} in {self.storage.url} has no checkpoint {checkpoint_id[:100]!r}")
        key = self.layout.pin(checkpoint_id, token or secrets.token_hex(4))  # unique: withdrawing this pin removes no other
        self.records.put_json(key, {"pinned_at": utc_now()})
        try:
            self._check_stays(checkpoint_id)
        except BaseException:
            self.storage.delete([key])
            raise

    def _check_stays(self, checkpoint_id: str) -> None:
        if is_marked(self, checkpoint_id):
            raise CheckpointNotFoundError(
                f"checkpoint {checkpoint_id} of run {self.name!r} in {self.storage.url} is being pruned at this moment: pin "
                "another one, or this one again if it is still there in a minute"
            )
        self.committed(checkpoint_id)  # last: a prune that has already removed its mark has deleted the manifest

    def unpin(self, checkpoint_id: str, token: str | None = None) -> None:
        """Leave `checkpoint_id` to the retention policy again; harmless when it was not pinned.

        Args:
            checkpoint_id: The checkpoint.
            token: The token of the pin to remove; None removes all.

        """
        if token is not None:
            self.storage.delete([self.layout.pin(checkpoint_id, token)])
            return
        self.storage.delete([key for key in self.keys(self.layout.pins) if stem(key) == checkpoint_id])

    def restore(self, checkpoint_id: str) -> Manifest:
        """Restore a quarantined checkpoint to the run and return its manifest; every byte of its files is read first.

        Its manifest is put last, so a crash leaves it in quarantine or restored. A retention policy may then delete it like
        any other checkpoint; pin it to keep it.

        Args:
            checkpoint_id: The checkpoint.

        Raises:
            CheckpointNotFoundError: If it is not in quarantine.
            CheckpointCorruptError: If it is damaged, naming the file; it stays in quarantine.

        """
        from prefect_torch.ckpt.runs.quarantine import restore  # noqa: PLC0415 - loaded only for a restore

        return restore(self, checkpoint_id)


def list_runs(storage: StorageLike) -> Iterator[str]:
    """Yield the names of the runs in `storage`, sorted, without the trials of sweeps; denied ones are left out, and logged.

    Costs one listing, and one request per run, whatever its number of checkpoints, 32 in parallel.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.

    """
    opened = open_storage(storage)
    folders = [folder for folder in sorted(set(opened.folders(""))) if is_run_name(folder)]
    are_runs = read_all(folders, partial(_is_run, opened))
    yield from compress(folders, are_runs)


def _is_run(storage: Storage, folder: str) -> bool:
    try:
        storage.size(Layout(folder).run_info)
    except FileNotFoundError:  # another program's directory
        return False
    except PermissionError as exc:
        _logger.warning("left out: %s", exc)
        return False
    return True


Checkpoint.open_run = CheckpointStore.open  # a handle made from a URL also has a store
