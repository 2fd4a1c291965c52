"""Multi-GPU PyTorch training in Prefect flows: see `prefect_torch.flows`, `.tasks`, `.ckpt` and `.deployments`."""

__version__ = "0.1.0"
