"""What can go wrong with a checkpoint, sorted by what the handler does.

CheckpointError
+- CheckpointNotFoundError (FileNotFoundError)   start fresh, or fix the name
+- CheckpointCorruptError                        use an older one
|  +- MalformedRecordError                       another program wrote it; move it away, or leave it
+- UnsupportedFormatError                        a newer version wrote it; upgrade
+- CommitFailedError                             the previous one is still the latest; retry the attempt
|  +- PeerGoneError                              another rank failed first; its own error says why
|  +- ReportWithdrawnError                       another rank could not report; its own error says why
|  +- StorageFullError                           free space, then report again
+- FencedError                                   a newer attempt owns the run; stop
+- ReportMismatchError (ValueError)              ranks disagree; fix the training code; final
+- StateMismatchError (ValueError)              the state to load is another one; fix the training code, or load less
|  +- RankLocalStateError                        another number of ranks stored it; say how to share it out
+- StorageError                                  transient and the retries are used up; retry later
+- RunBusyError                                  the run is alive elsewhere

Every one takes a single message, so every one pickles.
"""


class CheckpointError(Exception):
    """Anything this package raises about checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint, or it was pruned: start fresh, or fix the name."""


class CheckpointCorruptError(CheckpointError):
    """What is stored is not what was committed: use an older checkpoint."""


class MalformedRecordError(CheckpointCorruptError):
    """What lies where a record belongs was not written by this package: it is left alone, and left out."""


class UnsupportedFormatError(CheckpointError):
    """A newer version of this package wrote it: upgrade; nothing of it is changed or deleted."""


class CommitFailedError(CheckpointError):
    """A reported checkpoint was not committed: the previous one is still the latest."""


class PeerGoneError(CommitFailedError):
    """Another rank failed or died, so nothing that needs all ranks can complete: look at that rank's error."""


class ReportWithdrawnError(CommitFailedError):
    """Another rank could not take part in a report, so no rank reported: look at that rank's error."""


class StorageFullError(CommitFailedError):
    """The storage has no space left for a checkpoint: free some; the checkpoints before are still good."""


class FencedError(CheckpointError):
    """A newer attempt owns the run: this one must stop."""


class ReportMismatchError(CheckpointError, ValueError):
    """Ranks disagree about what or how often they report: the training code must be fixed."""


class StateMismatchError(CheckpointError, ValueError):
    """The state to load into is not the one that was stored: fix the training code, or load less of it."""


class RankLocalStateError(StateMismatchError):
    """What each rank had on its own was stored by another number of ranks: say how to share it out."""


class StorageError(CheckpointError):
    """The storage did not answer within the retries: try again later."""


class RunBusyError(CheckpointError):
    """The run is alive elsewhere: wait, stop it, use another name, or take it over."""
