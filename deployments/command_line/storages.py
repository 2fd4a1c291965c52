"""From what a person writes for a storage to the storage."""

from dataclasses import replace
from pathlib import Path

from prefect_torch.ckpt import Storage, StorageError
from prefect_torch.ckpt.opening import is_block_slug, open_storage, parse_storage
from prefect_torch.ckpt.storage import RetryPolicy

_RETRY = RetryPolicy(deadline_s=20.0)  # a person waits at a terminal; a training retries for two minutes


def open_existing_storage(text: str) -> Storage:
    """Open the storage that `text` means, which must be there.

    Raises:
        ValueError: If it means none.
        FileNotFoundError: If it is a folder that does not exist.

    """
    storage = open_named_storage(text)
    if "://" not in storage.url and not Path(storage.url).is_dir():
        raise FileNotFoundError(f"there is no folder {storage.url}; give the storage that a training was given")
    return storage


def open_named_storage(text: str) -> Storage:
    """Open the storage that `text` means, which a training may yet have to make; only a block's name imports prefect.

    Raises:
        ValueError: If it means none.
        StorageError: If its block cannot be loaded.

    """
    try:
        spec = parse_storage(text)
    except ValueError:
        raise
    except Exception as exc:
        if not is_block_slug(text):
            raise
        raise StorageError(f"the block {text} could not be loaded: {exc}; is PREFECT_API_URL the server that has it?") from exc
    return open_storage(replace(spec, retry=_RETRY))
