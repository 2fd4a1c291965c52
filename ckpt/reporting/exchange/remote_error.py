"""An error that one rank found and every rank must raise, in a form that travels as JSON."""

from dataclasses import dataclass

from prefect_torch.ckpt import errors
from prefect_torch.ckpt.errors import (
    CheckpointError,
    CommitFailedError,
    FencedError,
    ReportMismatchError,
    StorageFullError,
    is_of_full_disk,
)
from prefect_torch.ckpt.text import clip


@dataclass(frozen=True, slots=True)
class RemoteError:
    """A CheckpointError in transit to other ranks.

    Attributes:
        kind: The name of its class in `errors`.
        message: Its text.

    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Return the error that other ranks must raise for `error`: itself, or a CommitFailedError that names it."""
        if isinstance(error, (CommitFailedError, FencedError, ReportMismatchError)):
            return cls(type(error).__name__, clip(str(error)))
        if is_of_full_disk(error):
            return cls(StorageFullError.__name__, clip(str(error)))
        return cls(CommitFailedError.__name__, clip(f"{type(error).__name__}: {error}"))

    def exception(self) -> CheckpointError:
        """Return the exception to raise."""
        error: CheckpointError = getattr(errors, self.kind)(self.message)
        return error
