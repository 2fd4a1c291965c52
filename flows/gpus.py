"""Whether this machine has the GPUs that ranks are to have."""

from prefect_torch.tasks import ScalingConfig


def require_gpus(scaling: ScalingConfig) -> None:
    """Return only if there is a GPU for each rank that is to have one.

    Raises:
        ValueError: If there are fewer.

    """
    if not scaling.use_gpu:
        return
    import torch  # noqa: PLC0415 - only ranks on GPUs need it in the flow's process

    available = torch.cuda.device_count()
    if available < scaling.num_workers:
        raise ValueError(
            f"num_workers={scaling.num_workers} with use_gpu=True needs as many GPUs, and this machine has {available}; "
            "lower num_workers or give use_gpu=False"
        )
