"""Multi-GPU PyTorch training in Prefect flows: see `prefect_torch.flows`, `.tasks`, `.ckpt` and `.deployments`."""

import sys

from .moved_modules import MovedModules

__version__ = "0.1.0"

sys.meta_path.append(MovedModules())
