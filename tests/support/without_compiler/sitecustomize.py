"""Has the fork servers of ranks never import torch's compiler, as where a fork would not be safe with it."""

import sys

if "prefect_torch.tasks.rank.starting.fork_server" in sys.argv:
    sys.argv.append("without-compiler")
