"""The Prefect block that says where checkpoints go."""

from prefect_torch.ckpt.storage.blocks import CheckpointStorage

__all__ = ["CheckpointStorage"]
