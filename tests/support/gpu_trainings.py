"""Training functions for pretended GPUs."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import get_context, report
from prefect_torch.tasks import get_device

AT_IMPORT = torch.get_device_module().current_device()


def hold_gpu(config: dict) -> dict:
    """Return which GPU this rank has, once both were held, or after a minute; FileExistsError if another one holds it."""
    held = Path(config["folder"], os.environ["FAKEGPU_VISIBLE_DEVICES"])
    held.touch(exist_ok=False)
    held.with_suffix(".once").touch()
    until_s = time.monotonic() + 60
    while len(list(held.parent.glob("*.once"))) < 2 and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(0.3)  # in which another one would meet it
    held.unlink()
    return {"loss": config["x"], "gpu": int(held.name)}


def tell_gpu(config: dict) -> dict:
    """Return which GPU each rank has, on rank 0; before, kill the rank of the first attempt, or wait for a file, if told so."""
    context = get_context()
    report({}, state={"number": 1}, upload="sync")
    if path := config.get("running"):
        Path(path).touch()
    if config.get("fail") and context.attempt == 1:
        raise ValueError("once")
    while (path := config.get("until")) and not Path(path).exists():
        time.sleep(0.05)
    mine = {
        "device": str(get_device()),
        "at_import": AT_IMPORT,
        "visible": os.environ["FAKEGPU_VISIBLE_DEVICES"],
        "backend": dist.get_backend(),
        "interface": os.environ["NCCL_SOCKET_IFNAME"],
        "timeout_s": dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }
    everybody: list = [None] * context.world_size
    dist.all_gather_object(everybody, mine)
    return {"ranks": everybody}


def run_out_of_memory(config: dict) -> None:
    """Run out of memory in the first attempt, when others hold it, or the driver no longer answers."""
    if path := config.get("breaks"):
        Path(path).write_text("unknown error")
    if get_context().attempt == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")


def break_gpu(config: dict) -> str:
    """Fail on the first of the GPUs of the machine; return the GPUs of the attempt."""
    visible = os.environ["FAKEGPU_VISIBLE_DEVICES"]
    if visible.split(",")[get_context().local_rank] == "0":
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    return visible


def evaluate_on_gpu() -> dict:
    return {"gpu": os.environ["FAKEGPU_VISIBLE_DEVICES"]}
