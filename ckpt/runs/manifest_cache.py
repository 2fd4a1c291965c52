"""A cache of the manifests that a process has read; manifests never change, so prunes after every commit read each once."""

from collections.abc import Collection
from typing import Any

from .manifest import Manifest

_MOST_FILES = 500_000  # about 150 MB, for a hundred thousand checkpoints; beyond that, manifests are read each time


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
