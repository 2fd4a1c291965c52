"""The Prefect block with the location of checkpoints."""

from prefect_torch.ckpt.storage.blocks import CheckpointStorage

__all__ = ["CheckpointStorage"]
