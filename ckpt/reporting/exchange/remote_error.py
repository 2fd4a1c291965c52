"""An error that one rank found and every rank must raise, in a form that travels as JSON."""

import json
from dataclasses import asdict, dataclass, field

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
        ranks: The ranks that could not store their parts of a checkpoint, if that is the error.

    """

    kind: str
    message: str
    ranks: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Return the error that other ranks must raise for `error`: itself, or a CommitFailedError that names it."""
        if isinstance(error, (CommitFailedError, FencedError, ReportMismatchError)):
            return cls(type(error).__name__, clip(str(error)), list(getattr(error, "ranks", ())))
        if is_of_full_disk(error):
            return cls(StorageFullError.__name__, clip(str(error)))
        return cls(CommitFailedError.__name__, clip(f"{type(error).__name__}: {error}"))

    def exception(self) -> CheckpointError:
        """Return the exception to raise."""
        error: CheckpointError = getattr(errors, self.kind)(self.message)
        if isinstance(error, CommitFailedError):
            error.ranks = tuple(self.ranks)
        return error

    def encode(self) -> bytes:
        """Return JSON, an object with the key "error"."""
        return json.dumps({"error": asdict(self)}).encode()


def raise_error(message: bytes) -> None:
    """Raise the error that a message holds, as `RemoteError.encode` returned it; return if it is another JSON object.

    Raises:
        CheckpointError: The error.

    """
    decoded = json.loads(message)
    if "error" in decoded:
        raise RemoteError(**decoded["error"]).exception()
