"""Starts the ranks of a plan, each a process, and returns what they measured."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
from plan import WORLD_SIZE
from servers import free_port
from ways import WAYS

HERE = Path(__file__).parent
LONGEST_S = 300.0
_MARK = "STATE_BENCHMARK"


class GangError(Exception):
    """A rank ended without a result; says the last that it printed."""


def run(plan, environment):
    """Run the ranks of `plan` and return what each wrote.

    Raises:
        GangError: If one ended without a result, or not in time.

    """
    way = WAYS[plan.way]
    plan = replace(plan, group_port=free_port(), started_s=time.monotonic())
    with _leading(plan, environment) as told:
        plan = replace(plan, leader=told)
        plans = [plan] if way.starts_ranks else [plan.of_rank(rank) for rank in range(WORLD_SIZE)]
        _run_processes(plans, way, environment)
    results = [Path(plan.folder, f"{plan.phase}-{rank}.json") for rank in range(WORLD_SIZE)]
    if not all(result.exists() for result in results):
        logs = [log.read_text(errors="replace")[-2000:] for log in sorted(Path(plan.folder).glob("log-*"))]
        raise GangError("\n".join([*logs, f"no result after {time.monotonic() - plan.started_s:.0f} s"]))
    return [json.loads(result.read_text()) for result in results]


def _leading(plan, environment):
    if not WAYS[plan.way].is_ours:
        return nullcontext("")
    os.environ.update(environment)  # the leader of our ranks is this process
    from ways.ours import lead

    return lead(plan)


def _run_processes(plans, way, environment):
    mark = uuid.uuid4().hex
    told = {**os.environ, **environment, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", _MARK: mark, **_QUIET}
    processes = []
    try:
        for number, plan in enumerate(plans):
            with Path(plan.folder, f"log-{number}").open("wb") as log:
                command = [_python(way), str(HERE / "rank.py"), plan.encode()]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=told))
        deadline = time.monotonic() + LONGEST_S
        while running := [process for process in processes if process.poll() is None]:
            failed = any(process.returncode for process in processes)
            if failed or time.monotonic() > deadline:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(0.5)
    finally:
        _end_all(mark)
        for process in processes:
            process.wait()


_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def _python(way):
    if not way.needs_peers:
        return sys.executable
    from install import install

    return str(install())


def _end_all(mark):
    """Kill what carries `mark`: what the ranks started, too, in whichever session it is."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                process.send_signal(signal.SIGKILL)
