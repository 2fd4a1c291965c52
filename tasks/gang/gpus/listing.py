"""The list of a machine's GPUs, made by torch in a process of its own."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from prefect_torch.tasks.gang.processes.fork_servers import python_command

from .driver_programs import ask_driver

_LONGEST_LISTING_S = 600.0
TRY_DRIVER = (
    "their driver may hang, so try nvidia-smi (rocm-smi, xpu-smi), and restart the machine if it does not answer either"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a slice of one (MIG).

    Attributes:
        uuid: Its UUID, with its PCI address for ROCm; the same in every process of the machine.
        name: Its name, such as "NVIDIA H100 80GB HBM3".
        variable: The variable that chooses among GPUs of its type.
        choice: Its name in that variable.

    """

    uuid: str
    name: str
    variable: str
    choice: str


def list_gpus(wait: Callable[[float], None] = lambda _: None) -> list[Gpu]:
    """Return the GPUs that this process may use, in the order of torch's numbers.

    Costs the seconds of an import of torch, in another process: this one gets no context on a GPU, and may still fork.

    Args:
        wait: Called once a second meanwhile, with the seconds so far.

    Raises:
        RuntimeError: If torch cannot list them, or has not done so after ten minutes.

    """
    try:
        listed = ask_driver(python_command("prefect_torch.tasks.rank.resources.device", "print_gpus"), _LONGEST_LISTING_S, wait)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"torch has not listed the GPUs of this machine after {_LONGEST_LISTING_S:g} s: {TRY_DRIVER}"
        ) from None
    if listed.returncode != 0:
        raise RuntimeError(
            f"torch cannot list the GPUs of this machine, which `prefect-torch doctor` checks:\n{listed.stderr[-4000:]}"
        )
    found = json.loads(listed.stdout.splitlines()[-1])
    variable = _variable(found["type"], is_rocm=found["is_rocm"])
    visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    choices = visible or [str(index) for index in range(len(found["gpus"]))]
    return [
        # The UUID that CUDA gives for a slice may be that of its GPU.
        Gpu(choice if choice.startswith("MIG-") else gpu["uuid"], gpu["name"], variable, choice)
        for gpu, choice in zip(found["gpus"], choices, strict=False)  # a driver ignores what is behind an invalid name
    ]


def _variable(gpu_type: str | None, *, is_rocm: bool) -> str:
    if gpu_type == "xpu":
        return "ZE_AFFINITY_MASK"
    if is_rocm and "HIP_VISIBLE_DEVICES" in os.environ:  # has precedence there
        return "HIP_VISIBLE_DEVICES"
    return "CUDA_VISIBLE_DEVICES" if gpu_type is None else f"{gpu_type.upper()}_VISIBLE_DEVICES"
