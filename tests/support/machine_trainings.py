"""Training functions for ranks on several machines."""

import itertools
import os
import socket
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from prefect_torch.ckpt.reporting import api, commit
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts
from prefect_torch.tasks.gang.engines.agent_process import AGENT

_lines, _commits = itertools.count(), itertools.count()


def tell_places(config: dict) -> list:
    """Return what each rank was told of its place, and two sums over the ranks: the second by a group of the user's own.

    Before, report a file of each rank.
    """
    context = get_context()
    assert not context.should_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank{context.world_rank}").write_text("its own")
        report({}, Checkpoint.from_directory(folder))
    node = api._session._peers._node
    mine = torch.tensor([float(context.world_rank)])
    dist.all_reduce(mine)
    told = {
        "host": socket.gethostname(),
        "variables": dict(os.environ),
        "context": [context.node_rank, context.local_rank, context.local_world_size],
        "sum": mine.item(),
        "nodes": None if node is None else node.num_nodes,
    }
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    again = torch.tensor([float(context.world_rank)])
    dist.all_reduce(again)
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {**told, "sum of my own group": again.item()})
    return everybody


class Momentum:
    """Gradient descent with momentum. An optimizer of torch's imports its compiler in every rank, for a second of a core."""

    def __init__(self, parameters) -> None:
        self._parameters = list(parameters)
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, velocity in zip(self._parameters, self._velocities, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * velocity)
            parameter.grad = None

    def state_dict(self) -> dict:
        return {"velocities": self._velocities}

    def load_state_dict(self, state: dict) -> None:
        self._velocities = state["velocities"]


def make_state() -> dict:
    """Return a small model whose every bit counts, and what else belongs to its state before the first epoch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return {"model": model, "optimizer": Momentum(model.parameters()), "extra": {"epoch": -1}}


def weights_of(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def train_exactly(config: dict) -> dict:
    """Train that model; in some epochs of some attempts, wait for what happens outside.

    `config["waits"]` has, by attempt and epoch, such as "1-2", the file in `config["told"]` that all ranks wait for after
    rank 0 has written one of that name, unless they are told to checkpoint before.
    """
    torch.set_num_threads(1)
    context, told = get_context(), Path(config["told"])
    state = make_state()
    if checkpoint := get_checkpoint():
        checkpoint.load_state(state)
    begun = state["extra"]["epoch"] + 1
    if "fenced" in config and (context.world_rank, context.attempt) == (0, 1):
        commit.check_fence = partial(tell_of_fence, told, config["fenced"], commit.check_fence)
    for epoch in range(begun, config["epochs"]):
        train_epoch(state["model"], state["optimizer"], epoch)
        state["extra"]["epoch"] = epoch
        moment = f"{context.attempt}-{epoch}"
        if moment in config.get("waits", {}):
            if context.world_rank == 0:
                (told / moment).write_text(socket.gethostname())
            wait_together(told / config["waits"][moment])
        report({"epoch": epoch}, state=state, upload="sync")
        if context.ends_soon():
            break
    told_of = {"begun": begun, "attempt": context.attempt, "world size": context.world_size}
    return {**told_of, "weights": weights_of(state["model"])}


def wait_together(awaited: Path) -> None:
    """Return on all ranks at the same time, when the file exists or a checkpoint is wanted."""
    is_there = torch.zeros(1)
    while not is_there and not get_context().should_checkpoint():
        print(f"waiting for {awaited.name}, line {next(_lines)}")
        time.sleep(0.05)
        is_there[0] = awaited.exists()
        dist.all_reduce(is_there)


def train_epoch(model, optimizer, epoch: int) -> None:
    """Train on the same samples with any number of ranks: what each computes is summed in double precision."""
    random = torch.Generator().manual_seed(epoch)
    inputs, targets = torch.randn(12, 8, generator=random), torch.randn(12, 1, generator=random)
    context = get_context()
    mine = slice(context.world_rank, None, context.world_size)
    ((model(inputs[mine]) - targets[mine]) ** 2).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def tell_of_fence(told: Path, epoch: int, check_fence, run, claim: str) -> None:
    """Check the fence of the commit of `epoch` only after another attempt has begun, and write down what that said."""
    if next(_commits) == epoch:
        (told / "commits").touch()
        wait_for(lambda: len(list(list_attempts(run))) > 1, "another attempt")
    try:
        check_fence(run, claim)
    except BaseException as exc:
        (told / "fence").write_text(type(exc).__name__)
        raise


def wait_for(condition, what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come to pass: {what}"
        time.sleep(0.05)


def complete_on_a_terminated_machine(config: dict) -> str:
    """Have rank 0 send SIGTERM to the agent of this machine; both ranks return once the leader knows of it."""
    if get_context().world_rank == 0:
        own_agent().terminate()
        while not api._session._rounds._is_terminating():  # `should_checkpoint` would be told to end
            time.sleep(0.01)
    dist.barrier()
    return "complete"


def lose_the_machine(config: dict) -> None:
    """In the first attempts, have this machine taken away before anything is committed."""
    if get_context().attempt <= config["attempts"]:
        own_agent().terminate()
        threading.Event().wait()


def own_agent() -> psutil.Process:
    return next(it for it in psutil.Process().parents() if AGENT in it.cmdline())


def fail_beside_a_rank_that_waits(config: dict) -> int:
    """In the first attempt, rank 0 raises once rank 1, which has written the file `config["waits"]`, waits for ever."""
    if get_context().attempt == 1:
        if get_context().world_rank == 1:
            Path(config["waits"]).touch()
            threading.Event().wait()
        wait_for(Path(config["waits"]).exists, "rank 1 waits")
        raise RuntimeError("rank 0 has failed")
    return get_context().attempt
