"""Metrics that somebody attaches to a checkpoint after its commit: an object for each evaluation, beside the manifest.

The manifest never changes. An object has one name and is written whole, so two evaluators never lose each other's work, and
one that is interrupted leaves the old object, the new one, or a damaged one, which is left out as if it were not there.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .clock import utc_now
from .errors import CheckpointNotFoundError
from .layout import Layout, stem
from .manifest import Manifest, is_id, seal
from .metrics import Metrics, clean_metrics, from_json, to_json
from .storage import ObjectInfo

if TYPE_CHECKING:
    from .store import CheckpointStore

_FORMAT_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A committed checkpoint as a listing tells it.

    Attributes:
        id: Its id.
        evaluations: The names of what was attached to it, damaged or not.

    """

    id: str
    evaluations: tuple[str, ...] = ()


def check_evaluation_name(name: str) -> str:
    """Return `name`, which can be a key of metrics and a file's name on every backend.

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
    """Return only if the training itself reported no metric under `name`.

    Raises:
        ValueError: If it did.

    """
    if name in manifest.reported:
        raise ValueError(
            f"the training reported a metric {name!r} with checkpoint {manifest.id}, and reported metrics are never replaced: "
            "give the evaluation another name"
        )


def attach(store: "CheckpointStore", checkpoint_id: str, metrics: Mapping[str, object], name: str) -> None:
    """Store an evaluation; see `CheckpointStore.attach_metrics`."""
    check_evaluation_name(name)
    cleaned = clean_metrics(metrics)
    check_free(store.committed(checkpoint_id), name)
    key = store.layout.evaluation(checkpoint_id, name)
    body = {
        "format": _FORMAT_VERSION,
        "checkpoint": checkpoint_id,
        "name": name,
        "metrics": to_json(cleaned),
        "evaluated_at": utc_now(),
    }
    store.storage.put_bytes(key, seal(body))
    try:
        store.storage.size(store.layout.manifest(checkpoint_id))
    except FileNotFoundError as exc:  # pruned since it was read: nobody else knows of the object
        store.storage.delete([key])
        raise CheckpointNotFoundError(
            f"checkpoint {checkpoint_id} of run {store.run!r} in {store.storage.url} was pruned while it was evaluated"
        ) from exc


def with_evaluations(store: "CheckpointStore", manifest: Manifest, names: Iterable[str]) -> Manifest:
    """Return `manifest` with what was attached under `names` among its metrics; costs a small read each."""
    found = {name: metrics for name in names if (metrics := _read(store, manifest, name)) is not None}
    if not found:
        return manifest
    return replace(manifest, metrics={**manifest.metrics, **found}, evaluations=tuple(sorted(found)))


def read_listing(layout: Layout, infos: Iterable[ObjectInfo]) -> Iterator[ListedCheckpoint]:
    """Yield the committed checkpoints in a listing of `layout.manifests`, in its order, each with its evaluations."""
    listed: ListedCheckpoint | None = None
    for info in infos:  # a manifest comes right before its evaluations: "." sorts before "/"
        if (checkpoint_id := manifest_id(layout, info.key)) is not None:
            if listed is not None:
                yield listed
            listed = ListedCheckpoint(checkpoint_id)
        elif listed is not None and (name := _name_of(layout, listed.id, info.key)) is not None:
            listed = replace(listed, evaluations=(*listed.evaluations, name))
    if listed is not None:
        yield listed


def manifest_id(layout: Layout, key: str) -> str | None:
    """Return the checkpoint whose manifest `key` is; None if it is none."""
    checkpoint_id = stem(key)
    return checkpoint_id if is_id(checkpoint_id) and key == layout.manifest(checkpoint_id) else None


def evaluated_id(layout: Layout, key: str) -> str | None:
    """Return the checkpoint whose evaluation `key` is; None if it is none."""
    checkpoint_id = key.removeprefix(layout.manifests).partition("/")[0]
    return checkpoint_id if is_id(checkpoint_id) and _name_of(layout, checkpoint_id, key) is not None else None


def names_below(layout: Layout, checkpoint_id: str, infos: Iterable[ObjectInfo]) -> Iterator[str]:
    """Yield the names of a checkpoint's evaluations in a listing."""
    for info in infos:
        if (name := _name_of(layout, checkpoint_id, info.key)) is not None:
            yield name


def _name_of(layout: Layout, checkpoint_id: str, key: str) -> str | None:
    name = key.removeprefix(layout.evaluations(checkpoint_id)).removesuffix(".json")
    is_name = _NAME.fullmatch(name) is not None and key == layout.evaluation(checkpoint_id, name)
    return name if is_name else None  # else somebody else's file


def _read(store: "CheckpointStore", manifest: Manifest, name: str) -> Metrics | None:
    """Return what was attached under `name`; None, with a warning, where it is damaged: a checkpoint never suffers from it."""
    key = store.layout.evaluation(manifest.id, name)
    try:
        metrics = _decode(store.storage.get_bytes(key), manifest.id, name)
        check_free(manifest, name)
    except FileNotFoundError:  # deleted since it was listed
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        _logger.warning("%s/%s is left out, as if the checkpoint were not evaluated: %s", store.storage.url, key, exc)
        return None
    return metrics


def _decode(data: bytes, checkpoint_id: str, name: str) -> Metrics:
    body = json.loads(data)["body"]
    if data != seal(body):
        raise ValueError("it does not match its own digest, so it is damaged")
    if body["format"] != _FORMAT_VERSION:
        raise ValueError(f"it has format {body['format']!r} and this version reads {_FORMAT_VERSION}: upgrade prefect-torch")
    if (body["checkpoint"], body["name"]) != (checkpoint_id, name):
        raise ValueError(f"it is evaluation {body['name']!r} of checkpoint {body['checkpoint']}")
    return clean_metrics(from_json(body["metrics"]))  # type: ignore[arg-type]  # it refuses what is no dict
