"""Run `prefect` or `prefect-torch` with 1 s instead of the 30 before Prefect kills: hurried_execute.py NAME ARGUMENTS."""

import sys

from prefect.runner._process_manager import ProcessManager

ProcessManager.kill.__defaults__ = (1.0,)

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "prefect":
        from prefect.cli import app as main
    else:
        from prefect_torch.deployments.command_line.program import main
    main()
