"""Ranks as real processes, forked from one that has imported what they need: torch and its like take each process seconds."""

import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

from conftest import free_port
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.attempts import Owner, claim_attempt
from prefect_torch.tasks.rendezvous import Rendezvous
from rank_processes import RUN


def launch(module: str, arguments: tuple[Any, ...], world_size: int, root: Path) -> list[int | None]:
    """Run one attempt and return the ranks' exit codes: each calls main() of `module` with `arguments` and its place."""
    attempt = claim_attempt(CheckpointStore.open(root, RUN), Owner.current(), world_size=world_size).number
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    place = [str(it) for it in (world_size, root, attempt, rendezvous.address.port, free_port())]
    forking = _forking_with(module)
    ranks = [forking.Process(target=_run, args=(module, *arguments, str(rank), *place)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(150)
    del served
    return [rank.exitcode for rank in ranks]


def _run(module: str, *arguments: Any) -> None:
    importlib.import_module(module).main(*arguments)


def _forking_with(module: str) -> Any:
    """Return what forks processes from one that has imported `module`, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    return context
