"""The program of one rank, or of the driver of a way that starts its ranks itself: python rank.py PLAN."""

import importlib
import os
import sys
import warnings
from datetime import timedelta

from plan import WORLD_SIZE, Plan
from ways import WAYS


def join_group(plan):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(plan.rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(plan.rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan.group_port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))


def main():
    warnings.simplefilter("ignore")
    plan = Plan.decode(sys.argv[1])
    module = importlib.import_module(f"ways.{WAYS[plan.way].module}")
    if WAYS[plan.way].starts_ranks:
        module.drive(plan)
        return
    if not WAYS[plan.way].joins_group:
        join_group(plan)
    module.run(plan)
    sys.stdout.flush()
    os._exit(0)  # torch's stagers leave threads and processes that would be waited for


if __name__ == "__main__":
    main()
