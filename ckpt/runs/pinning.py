"""Pins, which protect a checkpoint from every policy. A pin that returned holds, even against a concurrent prune."""

import secrets

from prefect_torch.ckpt.errors import CheckpointNotFoundError
from prefect_torch.ckpt.text import utc_now

from .deletion_marks import is_marked
from .layout import stem
from .manifest import is_id
from .run import Run


def pin(run: Run, checkpoint_id: str) -> None:
    """Keep `checkpoint_id`; see `CheckpointStore.pin`.

    Each call has a key of its own, so that a pin that gives way to a prune removes no other pin.
    """
    if not is_id(checkpoint_id):
        raise CheckpointNotFoundError(f"run {run.name!r} in {run.storage.url} has no checkpoint {checkpoint_id[:100]!r}")
    key = run.layout.pin(checkpoint_id, secrets.token_hex(4))
    run.put_json(key, {"pinned_at": utc_now()})
    try:
        _check_stays(run, checkpoint_id, key)
    except BaseException:
        run.storage.delete([key])
        raise


def _check_stays(run: Run, checkpoint_id: str, key: str) -> None:
    if is_marked(run, checkpoint_id, witness=key):
        raise CheckpointNotFoundError(
            f"checkpoint {checkpoint_id} of run {run.name!r} in {run.storage.url} is being pruned at this moment: pin "
            "another one, or this one again if it is still there in a minute"
        )
    run.committed(checkpoint_id)  # last: a prune that has removed its mark before has deleted the manifest


def unpin(run: Run, checkpoint_id: str) -> None:
    """Remove all pins of `checkpoint_id`; do nothing if there are none."""
    pins = run.storage.list(run.layout.pins)
    run.storage.delete([info.key for info in pins if stem(info.key) == checkpoint_id])
