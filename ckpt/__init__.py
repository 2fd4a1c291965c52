"""Checkpoints of a distributed training: report, store, commit, retain. Imports neither prefect nor torch."""

from prefect_torch.ckpt.reporting.api import checkpoint_directory, get_checkpoint, get_context, log_metrics, report
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.retention import Plan, RetentionPolicy
from prefect_torch.ckpt.state.random_state import RandomState
from prefect_torch.ckpt.state.rank_local import RankLocal
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Storage, StorageSpec, Transfer

from .checkpoint import Checkpoint
from .checkpoint_store import CheckpointStore
from .context import TrainContext
from .errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CommitFailedError,
    FencedError,
    MalformedRecordError,
    PeerGoneError,
    RankLocalStateError,
    ReportMismatchError,
    ReportWithdrawnError,
    RunBusyError,
    StateMismatchError,
    StorageError,
    StorageFullError,
    UnsupportedFormatError,
)

__all__ = [
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CommitFailedError",
    "FencedError",
    "FileEntry",
    "MalformedRecordError",
    "Manifest",
    "ObjectInfo",
    "PeerGoneError",
    "Plan",
    "RandomState",
    "RankLocal",
    "RankLocalStateError",
    "ReportMismatchError",
    "ReportWithdrawnError",
    "RetentionPolicy",
    "RunBusyError",
    "StateMismatchError",
    "Storage",
    "StorageError",
    "StorageFullError",
    "StorageSpec",
    "TrainContext",
    "Transfer",
    "UnsupportedFormatError",
    "checkpoint_directory",
    "get_checkpoint",
    "get_context",
    "log_metrics",
    "report",
]
