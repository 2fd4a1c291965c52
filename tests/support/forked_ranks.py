"""Ranks as real processes, forked from one that has imported what they need: torch and its like take each process seconds."""

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any
from unittest import mock

from forked_programs import Popen
from rank_processes import led_attempt

# accelerate imports it where it is installed.
_ALSO = dict.fromkeys(("accelerate_loops", "transformers_models"), ("deepspeed",))


def launch(module: str, arguments: tuple[Any, ...], world_size: int, root: Path) -> list[int | None]:
    """Run one attempt and return the ranks' exit codes: each calls main() of `module` with `arguments` and its place."""
    with led_attempt(world_size, root) as place:
        forking = _forking_with(module)
        ranks = [forking.Process(target=_run, args=(module, *arguments, str(rank), *place)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(150)
        return [rank.exitcode for rank in ranks]


def _run(module: str, *arguments: Any) -> None:
    importlib.import_module(module).main(*arguments)


def _forking_with(module: str) -> Any:
    """Return what forks processes from one that has imported `module`, torch's compiler and `_ALSO`, and has no threads."""
    # An optimizer imports the compiler.
    context, imported = multiprocessing.get_context("forkserver"), ["torch._dynamo", module, *_ALSO.get(module, ())]
    if forkserver._forkserver._preload_modules != imported:
        forkserver._forkserver._stop()  # one that runs imports nothing more
        context.set_forkserver_preload(imported)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with mock.patch.object(util, "spawnv_passfds", _start_forked):
        forkserver.ensure_running()
    return context


def _start_forked(_: str, command: list[str], descriptors: Sequence[int]) -> int:
    """Start a process of `multiprocessing` as a forked program, and return its number."""
    process = Popen(command, pass_fds=tuple(descriptors))
    process.returncode = 0  # it is multiprocessing that waits for it
    return process.pid
