"""Training functions for the tests; no Prefect in sight, so that ranks start fast."""

import atexit
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, log_metrics, report
from prefect_torch.ckpt.reporting.api import grace_s
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import Transfer
from prefect_torch.tasks.rank.program import orderly_end


def start_epoch() -> int:
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return json.loads((Path(directory) / "state.json").read_text())["epoch"] + 1


def report_epoch(epoch: int, **metrics) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rank = get_context().world_rank
        name = "state.json" if rank == 0 else f"rank-{rank}.json"
        (Path(directory) / name).write_text(json.dumps({"epoch": epoch}))
        report({"epoch": epoch, **metrics}, Checkpoint.from_directory(directory))


def train_epochs(config: dict) -> dict:
    """Report `epochs` checkpoints; in the first attempt, rank `rank` comes to its end in epoch `at` by `how`."""
    context = get_context()
    begun = start_epoch()
    for epoch in range(begun, config["epochs"]):
        place = (epoch, context.world_rank)
        if config.get("how") and place == (config["at"], config["rank"]) and context.attempt <= config.get("times", 1):
            come_to_an_end(config["how"])
        time.sleep(config.get("pause_s", 0))
        dist.all_reduce(torch.ones(1))  # as a training would: whoever is left waits here
        report_epoch(epoch, loss=1 / (epoch + 1))
    return {"begun": begun, "attempt": context.attempt}


def end_in_each_way(config: dict) -> dict:
    """Report two checkpoints in each attempt; then rank 1 comes to its end by what `hows` has for the attempt, if anything."""
    context = get_context()
    begun = start_epoch()
    for epoch in (begun, begun + 1):
        dist.all_reduce(torch.ones(1))
        report_epoch(epoch)
    if context.attempt <= len(config["hows"]):
        if context.world_rank == 1:
            come_to_an_end(config["hows"][context.attempt - 1])
        dist.all_reduce(torch.ones(1))  # rank 0 waits here
    return {"begun": begun, "attempt": context.attempt}


def report_a_name() -> None:
    report({"name": "high"})


def come_to_an_end(how: str) -> None:
    if how == "raise":
        raise ValueError("boom from the training")
    if how == "exit":
        sys.exit(3)
    while how == "hang":
        log_metrics({"temperature": 60})  # as a monitor does, whatever the training does
        time.sleep(0.5)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)  # which a rank outlasts
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(7)


def lose_a_rank_that_nobody_needs(config: dict) -> str:
    """In the first attempt, rank 1 is killed while the others do something else."""
    context = get_context()
    if context.attempt == 1:
        if context.world_rank == 1:
            come_to_an_end("kill")
        time.sleep(600)
    return "trained"


def tell_environment(config: dict) -> dict:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    context = get_context()
    print(f"hello from rank {context.world_rank}")
    mine = {name: os.environ[name] for name in [*names, *config.get("more", [])]}
    assert not set(config.get("none_of", [])) & set(os.environ)
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    seen = {"backend": dist.get_backend(), "prefect": "prefect" in sys.modules, "grace_s": grace_s()}
    return {"environments": everybody, **seen}


def count_ranks_of_an_accelerator(config: dict) -> int:
    from accelerate import Accelerator  # noqa: PLC0415 - seconds, for this function only

    return Accelerator().num_processes


def report_only_metrics(config: dict) -> None:
    started = time.monotonic()
    for value in range(config["reports"]):
        report({"value": value, "nested": {"half": value / 2}})
    report({"seconds": time.monotonic() - started})


def make_a_mistake(config: dict) -> None:
    """Fail on rank 1 in a way that no restart mends within seconds."""
    how, rank = config["how"], get_context().world_rank
    if how == "full disk":
        LocalStorage.put_file = fill_disk
    if how == "gpu memory" and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if how == "missing folder":
        report({}, Checkpoint.from_directory("/nowhere") if rank == 1 else None)
    if how == "another model":
        model = torch.nn.Linear(2, config["size"])
        if checkpoint := get_checkpoint():
            checkpoint.load_state({"model": model})
        report({}, state={"model": model})
    else:
        report_epoch(0)


def fill_disk(storage: LocalStorage, key: str, path: Path) -> Transfer:
    raise OSError(errno.ENOSPC, "No space left on device")


def hang_with_a_child(config: dict) -> None:
    """Start a child that would outlive us, tell the pids, and never come back."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    rank = get_context().world_rank
    Path(config["pids"], str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if config.get("raise_on") == rank:
        while len(list(Path(config["pids"]).iterdir())) < get_context().world_size:
            time.sleep(0.05)
        raise ValueError("the others hang")
    time.sleep(600)


def checkpoint_when_told(config: dict) -> None:
    """Train until told that the end is near, then report a last checkpoint."""
    Path(config["started"]).touch()
    while not get_context().should_checkpoint():
        time.sleep(0.05)
    report_epoch(41)


def fail_when_told(config: dict) -> None:
    """Fail on rank 0 when told that the end is near, where the others report a last checkpoint."""
    Path(config["started"]).touch()
    while not get_context().should_checkpoint():
        time.sleep(0.05)
    if get_context().world_rank == 0:
        raise ValueError("nothing to save")
    report_epoch(1)


def commit_on_and_on(config: dict) -> None:
    """Report a checkpoint, wait for a file, and report many more without asking whether the end is near."""
    report_epoch(0)
    while not Path(config["goes_on"]).exists():
        time.sleep(0.05)
    for epoch in range(1, 50):
        report_epoch(epoch)


def leave_once(config: dict) -> dict | None:
    """Report a checkpoint, and a last one when told that the end is near; once there is one, say which."""
    if (checkpoint := get_checkpoint()) is not None:
        return {"resumed": checkpoint.id}
    report_epoch(40)
    checkpoint_when_told(config)
    return None


def report_once_and_when_told(config: dict) -> None:
    """Report a checkpoint at once, and a last one when told that the end is near."""
    report_epoch(0)
    while not get_context().should_checkpoint():
        time.sleep(0.05)
    report_epoch(1)


class Interrupted(BaseException):
    """What no `except Exception` catches."""


ENDS = ("exception", "exit", "state", "states", "half")


def returned_end(how: str) -> object:
    """Return what Prefect would take for how a task run has ended, or a file's name that is no UTF-8."""
    from prefect.states import Completed, Failed  # noqa: PLC0415 - see above

    of_prefect = {"state": Completed(data=1), "states": [Failed()]}
    return {"exception": KeyError("x"), "exit": SystemExit(3), "half": "a\udcff", **of_prefect}[how]


class NoReprError(Exception):
    def __repr__(self) -> str:
        raise TypeError("no repr")


def end_oddly(config: dict) -> object:
    """Report once, and then end in a way that a supervisor might stumble over."""
    report({"done": True})
    how = config["how"]
    if how == "surrogate":
        raise ValueError("a lone \ud800 surrogate")
    if how == "no repr":
        raise NoReprError("from the training")
    if how == "enormous":  # more than a message between ranks, or a state of Prefect, takes
        raise ValueError("z" * 20_000_000)
    if how == "base exception":
        raise Interrupted("from the training")
    if how == "fork" and (leave_by_a_fork(3) or os.fork() == 0):
        return "the child's"
    if how == "closed":
        sys.stdout.close()
        sys.stderr = None
        if os.fork() == 0:
            return "the child's"
    if how == "endless":
        endless: list = []
        endless.append(endless)
        return endless
    if how == "unloadable":
        return Unloadable()
    return returned_end(how) if how in ENDS else how


def leave_by_a_fork(code: int) -> None:
    if (child := os.fork()) == 0:
        sys.exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def leave_something_to_do(config: dict) -> None:
    """Return before a thread has ended, and with something to do at the exit of the process."""

    def upload() -> None:
        time.sleep(0.3)
        Path(config["folder"], "thread").touch()

    threading.Thread(target=upload).start()
    atexit.register(Path(config["folder"], "atexit").touch)


def cannot_leave_its_group(config: dict) -> dict:
    """Report and return, as if a CUDA graph held collectives, or as if another rank were gone too early for NCCL."""
    attempt = get_context().attempt

    def destroy_process_group() -> None:
        Path(config["folder"], f"left-{attempt}").touch()
        if config["how"] == "raises":
            raise dist.DistBackendError("NCCL error: remote process exited")
        time.sleep(600)

    dist.destroy_process_group = destroy_process_group
    if config["how"] == "hangs":
        orderly_end.LONGEST_S = 3.0
    atexit.register(Path(config["folder"], "atexit").touch)
    report({"loss": 1.0}, state={"number": 1})
    return {"attempt": attempt}


class Unloadable:
    def __reduce__(self) -> tuple:
        return (Unloadable._refuse, ())

    @staticmethod
    def _refuse() -> None:
        raise RuntimeError("cannot be rebuilt")


def print_and_die(config: dict) -> None:
    """Print lines of two levels on each rank, one by a logger without handlers; then the last rank is killed."""
    rank = get_context().world_rank
    logging.getLogger("library").warning("of rank %d", rank)
    print(f"detail of rank {rank}")
    print(f"WARNING:train:of rank {rank}", flush=True)
    dist.barrier()
    if rank == get_context().world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


async def never_awaited(config: dict) -> None:
    raise AssertionError("nobody awaits it")
