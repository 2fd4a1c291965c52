"""Deletions that fail: they do not keep the others, until the storage does not answer."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect_torch.ckpt.errors import StorageError

_MOST_IN_A_ROW = 3  # failures of a storage that has not answered within its retries, two minutes each


class Failures:
    """The deletions that failed.

    Attributes:
        noted: What each was to delete, and its error, in order.

    """

    def __init__(self) -> None:
        self.noted: list[tuple[str, Exception]] = []
        self._num_in_a_row = 0

    @contextmanager
    def note(self, what: str) -> Iterator[None]:
        """Note the error of the block, which deletes `what`, and go on after the block.

        Raises:
            StorageError: The noted error, if the storage has not answered three blocks in a row.

        """
        try:
            yield
        except (StorageError, OSError) as exc:
            self.noted.append((what, exc))
            self._num_in_a_row = self._num_in_a_row + 1 if isinstance(exc, StorageError) else 0
            if self._num_in_a_row == _MOST_IN_A_ROW:
                raise
        else:
            self._num_in_a_row = 0
