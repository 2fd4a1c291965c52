"""Run `prefect` or `prefect-torch` that kill after 1 s instead of 30 or 600: hurried_execute.py NAME ARGUMENTS."""

import sys

from prefect.runner._process_manager import ProcessManager

ProcessManager.kill.__defaults__ = (1.0,)

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "prefect":
        from prefect.cli import app as main
    else:
        from prefect_torch.deployments.command_line import execution
        from prefect_torch.deployments.command_line.program import main

        execution._LONGEST_END_S = 1.0
    main()
