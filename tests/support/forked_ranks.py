"""Ranks as real processes, forked from one that has imported what they need: torch and its like take each process seconds."""

import importlib
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from rank_processes import led_attempt


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
    """Return what forks processes from one that has imported `module` and torch's compiler, and has no threads."""
    context, imported = multiprocessing.get_context("forkserver"), [module, "torch._dynamo"]  # an optimizer imports the latter
    if forkserver._forkserver._preload_modules != imported:
        forkserver._forkserver._stop()  # one that runs imports nothing more
        context.set_forkserver_preload(imported)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    return context
