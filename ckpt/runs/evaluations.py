"""Metrics attached to a checkpoint after its commit: an object for each evaluation, beside the manifest.

The manifest never changes. An object has one name and is written whole, so two evaluators never lose each other's work. An
interrupted evaluator leaves the old object, the new one, or a damaged one, which is left out as if it did not exist; only
retention does not treat its score as missing.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prefect_torch.ckpt.errors import CheckpointCorruptError, MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.runs.layout import Layout, stem
from prefect_torch.ckpt.runs.manifest import Manifest, is_id
from prefect_torch.ckpt.runs.metrics import Metrics, find_score, to_json
from prefect_torch.ckpt.runs.records.fields import decode
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.local_files.names import find_other_spelling
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Storage
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, seal, unseal
from prefect_torch.ckpt.text import utc_now

_WHAT = "an evaluation"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A committed checkpoint in a listing.

    Attributes:
        id: Its id.
        evaluations: The names of the evaluations attached to it, damaged or not.
        bytes: The size of its manifest; None if the listing does not contain it.

    """

    id: str
    evaluations: tuple[str, ...] = ()
    bytes: int | None = field(default=None, compare=False)


def check_evaluation_name(name: str) -> str:
    """Return `name` if it can be a key of metrics and a file's name on every backend.

    Raises:
        ValueError: If it is not 1 to 100 letters, digits, ".", "_" or "-" that begin with a letter or digit, or looks like a
            checkpoint's id.

    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or is_id(stem(name)):
        raise ValueError(
            f"evaluation name {name!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or a digit"
        )
    return name


def check_free(manifest: Manifest, name: str) -> None:
    """Raise ValueError if the training itself reported a metric `name` or "name/...", which would hide that of the evaluation.

    Raises:
        ValueError: If it did.

    """
    reported = next((metric for metric in manifest.reported if f"{metric}/".startswith(f"{name}/")), None)
    if reported is not None:
        raise ValueError(
            f"the training reported a metric {reported!r} with checkpoint {manifest.id}, and reported metrics are never "
            "replaced: give the evaluation another name"
        )


def check_spelling(storage: Storage, key: str) -> None:
    """Raise if the evaluation at `key` would replace another one, since case is ignored there.

    Raises:
        ValueError: If it would.

    """
    place = storage.local_path(key)
    if place is not None and (other := find_other_spelling(place)) is not None:
        raise ValueError(
            f"evaluation {place.stem!r} would replace {other.stem!r}, since case is ignored in {other.parent}: give it another "
            "name"
        )


def encode_evaluation(checkpoint_id: str, name: str, metrics: Metrics) -> bytes:
    """Return the stored form of an evaluation."""
    body = {
        "format": FORMAT_VERSION,
        "checkpoint": checkpoint_id,
        "name": name,
        "metrics": to_json(metrics),
        "evaluated_at": utc_now(),
    }
    return seal(body)


def with_evaluations(storage: Storage, layout: Layout, manifest: Manifest, names: Iterable[str]) -> Manifest:
    """Return `manifest` with the evaluations attached under `names` among its metrics; costs a small read each."""
    found = {name: metrics for name in names if (metrics := _read(storage, layout, manifest, name)) is not None}
    if not found:
        return manifest
    return replace(manifest, metrics={**manifest.metrics, **found}, evaluations=tuple(sorted(found)))


def read_listing(layout: Layout, infos: Iterable[ObjectInfo]) -> list[ListedCheckpoint]:
    """Return the committed checkpoints in a listing of `layout.manifests`, oldest first, each with its evaluations."""
    committed: dict[str, int] = {}
    evaluations: dict[str, set[str]] = defaultdict(set)
    for info in infos:  # servers differ in whether a manifest is listed before its evaluations, after them, or elsewhere
        if (checkpoint_id := manifest_id(layout, info.key)) is not None:
            committed[checkpoint_id] = info.bytes
        elif (evaluation := evaluation_of(layout, info.key)) is not None:
            checkpoint_id, name = evaluation
            evaluations[checkpoint_id].add(name)
    attached = {it: tuple(sorted(names)) for it, names in evaluations.items()}
    return [ListedCheckpoint(it, attached.get(it, ()), committed[it]) for it in sorted(committed)]


def manifest_id(layout: Layout, key: str) -> str | None:
    """Return the id of the checkpoint with its manifest at `key`; None if `key` is no manifest's."""
    checkpoint_id = key[len(layout.manifests) : -len(".json")]
    return checkpoint_id if is_id(checkpoint_id) and key == layout.manifest(checkpoint_id) else None


def committed_id(layout: Layout, key: str) -> str | None:
    """Return the checkpoint that the object at `key` commits, by any version; None if it commits none.

    An object that this version cannot list, "<id>.json" of another format or "<id>" with another ending, is no garbage.
    """
    checkpoint_id = stem(key)
    return (
        checkpoint_id if is_id(checkpoint_id) and key.startswith(layout.manifest(checkpoint_id).removesuffix("json")) else None
    )


def evaluation_of(layout: Layout, key: str) -> tuple[str, str] | None:
    """Return the checkpoint's id and the name of the evaluation at `key`; None if `key` is no evaluation's."""
    checkpoint_id = key.removeprefix(layout.manifests).partition("/")[0]
    name = key.removeprefix(layout.evaluations(checkpoint_id)).removesuffix(".json")
    is_evaluation = is_id(checkpoint_id) and _NAME.fullmatch(name) and key == layout.evaluation(checkpoint_id, name)
    return (checkpoint_id, name) if is_evaluation else None  # else another program's file


def hides_score(storage: Storage, layout: Layout, manifest: Manifest, names: Iterable[str], attribute: str | None) -> bool:
    """Return whether an evaluation that could not be read may have rated the checkpoint, so that its score is unknown.

    This holds for any evaluation of a newer version. It holds for one that is damaged, with a warning, or not yet written
    whole, if the missing score belongs to it.

    Args:
        storage: The storage.
        layout: The keys of the run.
        manifest: The checkpoint, with the metrics of the evaluations that could be read.
        names: The names of those that could not.
        attribute: The score by which checkpoints are sorted, or None.

    """
    attribute = attribute or ""
    name, slash, _ = attribute.partition("/")
    is_missing = bool(slash) and find_score(manifest.metrics, attribute) is None
    return any(_hides_score(storage, layout, manifest.id, it, has_score=is_missing and it == name) for it in names)


def _hides_score(storage: Storage, layout: Layout, checkpoint_id: str, name: str, *, has_score: bool) -> bool:
    try:
        _load(storage, layout, checkpoint_id, name)
    except UnsupportedFormatError:
        return True
    except FileNotFoundError:
        return False
    except CheckpointCorruptError as exc:
        if has_score:
            _logger.warning(
                "checkpoint %s of run %r stays, whatever its score: evaluate it again as %r, or delete that evaluation: %s",
                checkpoint_id,
                layout.run,
                name,
                exc,
            )
    return has_score  # also of one that is whole by now: it was read while it was written


def _read(storage: Storage, layout: Layout, manifest: Manifest, name: str) -> Metrics | None:
    """Return the metrics attached under `name`; None, with a warning, if unreadable, which does not affect the checkpoint."""
    key = layout.evaluation(manifest.id, name)
    try:
        metrics = _load(storage, layout, manifest.id, name)
        if name in manifest.reported:  # it would replace that; beside a "name/...", its other metrics hold
            check_free(manifest, name)
    except FileNotFoundError:  # deleted after the listing
        return None
    except (ValueError, CheckpointCorruptError, UnsupportedFormatError) as exc:
        _logger.warning("%s/%s is left out, as if the checkpoint were not evaluated: %s", storage.url, key, exc)
        return None
    return metrics


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The stored fields of an evaluation that are read back."""

    checkpoint: str
    name: str
    metrics: Metrics


def _load(storage: Storage, layout: Layout, checkpoint_id: str, name: str) -> Metrics:
    key = layout.evaluation(checkpoint_id, name)
    where = f"{storage.url}/{key}"

    def read(data: bytes) -> Metrics:
        found = decode(_Evaluation, unseal(data, where, _WHAT), where, _WHAT)
        if (found.checkpoint, found.name) != (checkpoint_id, name):
            raise MalformedRecordError(f"it is evaluation {found.name[:100]!r} of checkpoint {found.checkpoint[:100]!r}")
        return found.metrics

    return read_whole(storage, key, read)
