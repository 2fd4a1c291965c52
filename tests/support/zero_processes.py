"""The training with DeepSpeed ZeRO that the documentation shows, as one of several ranks on CPUs."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # every initialize() asks for it, and it imports all of torch.compile
    from deepspeed.checkpoint import ds_to_universal
import pytest
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from prefect_torch.ckpt import Checkpoint
from rank_processes import joined

PAGE = Path(__file__).parents[2] / "docs/how-to/sharded-models.md"


def shown_training():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "import deepspeed" in block]
    module = {"__name__": "shown"}
    exec(compile(code, str(PAGE), "exec"), module)
    return module["train_fn"]


def convert(folder):
    """Do what the documentation says, in this process, which has imported everything already."""
    shown = PAGE.read_text().partition("$ python -m deepspeed.checkpoint.ds_to_universal")[2].partition("```")[0]
    print_each = "printf '%s\\n' " + shown.replace("./zero", folder)
    arguments = subprocess.run(print_each, shell=True, check=True, capture_output=True, text=True).stdout.splitlines()
    in_this_process = ["--num_extract_workers", "1", "--num_merge_workers", "1"]  # others would import it all again
    sys.argv = ["ds_to_universal", *arguments, *in_this_process]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def main(stage, folder, *place):
    """Train up to epoch 4; by another number of ranks from `folder`, where it is given, once it is converted."""
    warnings.simplefilter("ignore")  # DeepSpeed's own
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a faster gloo, which it would compile for a minute
    train_fn = shown_training()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,  # else it compiles one
        "zero_allow_untested_optimizer": True,
    }
    if folder is not None:
        convert(folder)
    with joined(*place) as session:
        if folder is not None:
            with pytest.raises(ZeRORuntimeException, match="used a DP world size of 2 but the current world size is 1"):
                train_fn({"epochs": 4, "deepspeed": settings})
            session.restored = Checkpoint.from_directory(folder)
            settings["checkpoint"] = {"load_universal": True}
        train_fn({"epochs": 4, "deepspeed": settings})
