"""The Prefect block that says where checkpoints go."""

from .storage.blocks import CheckpointStorage

__all__ = ["CheckpointStorage"]
