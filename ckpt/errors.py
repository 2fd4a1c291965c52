"""The errors of checkpoints, grouped by what their handler does.

CheckpointError
+- CheckpointNotFoundError (FileNotFoundError)   start fresh, or fix the name
+- CheckpointCorruptError                        use an older one
|  +- MalformedRecordError                       another program wrote it; move it away, or leave it
+- UnsupportedFormatError                        a newer version wrote it; upgrade
+- CommitFailedError                             the previous one is still the latest; retry the attempt
|  +- PeerGoneError                              another rank failed first; its own error has the reason
|  +- ReportWithdrawnError                       another rank could not report; its own error has the reason
|  +- StorageFullError                           free space, then report again
+- FencedError                                   a newer attempt owns the run; stop
+- ReportMismatchError (ValueError)              ranks disagree; fix the training code; final
+- StateMismatchError (ValueError)              the state to load differs; fix the training code, or load less
|  +- RankLocalStateError                        another number of ranks stored it; define how to redistribute it
+- StorageError                                  transient and the retries are used up; retry later
+- RunBusyError                                  the run is alive elsewhere

Every error takes a single message, so every error pickles.
"""

import errno
import os
from json import JSONDecodeError

# What Prefect's client raises for the page of a proxy in the place of an answer, with status 200: it may answer later.
PAGE_OF_PROXY = (JSONDecodeError, UnicodeDecodeError)


class CheckpointError(Exception):
    """The base of all errors that this package raises about checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist, or it was pruned: start fresh, or fix the name."""


class CheckpointCorruptError(CheckpointError):
    """The stored data differ from the committed ones: use an older checkpoint."""


class MalformedRecordError(CheckpointCorruptError):
    """The object under a record's key was not written by this package: it is not changed, and left out of results."""


class UnsupportedFormatError(CheckpointError):
    """A newer version of this package wrote the data: upgrade; none of it is changed or deleted."""


class CommitFailedError(CheckpointError):
    """A reported checkpoint was not committed: the previous one is still the latest.

    Attributes:
        ranks: The ranks that could not store their parts, on every rank; none for any other reason.

    """

    ranks: tuple[int, ...] = ()


class PeerGoneError(CommitFailedError):
    """Another rank failed or died, so no operation that needs all ranks can complete: look at that rank's error."""


class ReportWithdrawnError(CommitFailedError):
    """Another rank could not take part in a report, so no rank reported: look at that rank's error."""


class StorageFullError(CommitFailedError):
    """The storage has no space left for a checkpoint: free some; the earlier checkpoints are intact."""


class FencedError(CheckpointError):
    """A newer attempt owns the run: this one must stop."""


class ReportMismatchError(CheckpointError, ValueError):
    """The ranks' reports differ in content or in number: fix the training code."""


class StateMismatchError(CheckpointError, ValueError):
    """The state to load into differs from the stored one: fix the training code, or load less of it."""


class RankLocalStateError(StateMismatchError):
    """The values that differ between ranks were stored by another number of ranks: define how to redistribute them."""


class StorageError(CheckpointError):
    """The storage did not answer within the retries: try again later."""


class RunBusyError(CheckpointError):
    """The run is in progress elsewhere: wait, stop it, use another name, or take it over."""


def is_of_full_disk(error: BaseException) -> bool:
    """Return whether the operating system refused a write because a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def full_storage(reason: str, where: str) -> OSError:
    """Return the error of a full disk for a server that gave `reason`."""
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {reason}", where)
