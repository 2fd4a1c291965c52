"""Checkpoints that are written without a session."""

from datetime import datetime, timezone

from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, new_id

DIGEST = "0" * 32
NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


def commit(store, step, loss=0.0, attempt=1):
    manifest = Manifest(new_id(attempt, step), step, attempt, {"loss": loss}, (FileEntry("m", 1, DIGEST, 0),), 1, None, NOW)
    store.storage.put_bytes(store.layout.data(manifest.id, "m"), b"x")
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
    return manifest
