"""Advice for a storage in which nothing can be created."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from prefect_torch.ckpt.errors import CheckpointError
from prefect_torch.ckpt.text import as_command

_UNUSABLE = (PermissionError, FileNotFoundError, NotADirectoryError)


@contextmanager
def unusable_storage_explained(given: object, url: str) -> Iterator[None]:
    """Add to an operating system's error the command that shows the cause.

    Args:
        given: The storage as the user gave it.
        url: Its path or URL.

    Raises:
        OSError: The body's error, of the same type, with that command.

    """
    try:
        yield
    except OSError as exc:
        if isinstance(exc, CheckpointError) or not (isinstance(exc, _UNUSABLE) or exc.errno == errno.EROFS):
            raise
        storage = given if isinstance(given, str) else url
        check = as_command("doctor", storage)
        raise type(exc)(f"{exc}; `{check}` tries each step that a training needs") from exc
