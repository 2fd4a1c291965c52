"""The working directory and the search path of a rank."""

import os
import sys
from pathlib import Path

from .function import PackedFunction


def enter_paths(function: PackedFunction, *, is_elsewhere: bool) -> None:
    """Take the working directory and the search path of the flow's process; on another machine, as far as they exist there.

    Another machine has its own environment of Python, which comes first there.
    """
    if not is_elsewhere:
        os.chdir(function.cwd)
        sys.path[:] = function.sys_path
        return
    if Path(function.cwd).is_dir():
        os.chdir(function.cwd)
    sys.path.extend(path for path in function.sys_path if path not in sys.path and Path(path).exists())
