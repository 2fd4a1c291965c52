"""The rank of a training function, its world and its run, and where that function runs: in a fork, or compiled."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_GETTERS_OF_RAY = {  # getters that only Ray's context has, and what to write instead
    "get_metadata": "give it in the config of the training",
    "get_storage": "give the storage's path or URL in the config of the training, if it reads there",
    "get_trial_": "a trial of a sweep is a run of its own: write get_context().run_name",
}


def never() -> bool:
    """Return False, as a callback for an event that never happens."""
    return False


_never = never  # as pickles of version 0.1 name it


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let `torch.compile` of a caller leave out `function`, with all that it calls; imports nothing of torch.

    Compiled, the first report takes half a minute, and the steps after it have no gradients. Whether a caller is compiled is
    unknown here: the compiler may have left out the frame of the call, and then compiles the functions below it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # imported where anything is compiled
        chosen: Callable[P, R] = function if disable is None else disable(function)
        return chosen(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class TrainContext:
    """A rank's place in its training.

    Attributes:
        world_rank: This rank, from 0 to `world_size` - 1.
        local_rank: The rank's number on this machine; also its device's number.
        node_rank: This machine's number.
        world_size: The number of ranks.
        local_world_size: The number of ranks on this machine.
        run_name: The run's name in its storage.
        attempt: Counted from 1 over the life of the run; grows with every restart.

    """

    world_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    run_name: str
    attempt: int
    _should_checkpoint: Callable[[], bool] = field(default=never, repr=False, compare=False)
    _stop_requested: Callable[[], bool] = field(default=never, repr=False, compare=False)

    def get_world_rank(self) -> int:
        """Return `world_rank`; this getter and those below serve functions written for Ray Train."""
        return self.world_rank

    def get_local_rank(self) -> int:
        """Return `local_rank`."""
        return self.local_rank

    def get_node_rank(self) -> int:
        """Return `node_rank`."""
        return self.node_rank

    def get_world_size(self) -> int:
        """Return `world_size`."""
        return self.world_size

    def get_local_world_size(self) -> int:
        """Return `local_world_size`."""
        return self.local_world_size

    def get_experiment_name(self) -> str:
        """Return `run_name`."""
        return self.run_name

    @uncompiled
    def should_checkpoint(self) -> bool:
        """Return whether to report a checkpoint now; the n-th call returns the same on every rank.

        Call it equally often on all ranks. True when termination of the training is requested (a preemption, a cancel, a
        suspension, an urgent flow run that it yields to), so that a checkpoint saves work; when it is to continue with more
        ranks (`ScalingConfig.regrow_after_s`); and with `CheckpointConfig.target_overhead` whenever one more checkpoint stays
        within it. On ranks other than 0 a call waits for rank 0's call and costs a message, a fraction of a millisecond; when
        calls come more often than every half second, one message serves at most 16 of them.

        Raises:
            CheckpointError: If rank 0 has left the training.
            RuntimeError: In a process that the rank has forked.

        """
        return self._should_checkpoint()

    def ends_soon(self) -> bool:
        """Return whether the last `should_checkpoint` was true because the attempt is to end; the same on every rank.

        A loop may then report once more and return, instead of being terminated in the middle. Costs nothing.
        """
        return self._stop_requested()

    if not TYPE_CHECKING:  # hidden from type checkers, which then report unknown attributes

        def __getattr__(self, name: str) -> object:
            """Raise AttributeError; for a getter of Ray's, the message names the replacement."""
            of_ray = next((written for begin, written in _GETTERS_OF_RAY.items() if name.startswith(begin)), None)
            hint = "" if of_ray is None else f", which is Ray's: {of_ray}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


_current: TrainContext | None = None
_pid = 0  # of the process that set `_current`


def set_context(context: TrainContext | None) -> None:
    """Set the context of this process; None outside of a training function."""
    global _current, _pid  # a process is one rank: user code reads them from any of its threads
    _current, _pid = context, os.getpid()


def refuse_in_fork(name: str) -> None:
    """Raise in a process that this rank has forked, which has neither the rank's threads nor connections of its own.

    Args:
        name: The function that was called there.

    Raises:
        RuntimeError: If a rank has forked this process.

    """
    if _current is not None and os.getpid() != _pid:
        raise RuntimeError(
            f"{name}() was called in a process that rank {_current.world_rank} has forked, such as a "
            "multiprocessing.Process: hand the values to the rank itself, and call it there"
        )


def context_or_none() -> TrainContext | None:
    """Return this rank's context; None outside of a training function."""
    return _current


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; outside of a training, rank 0 of 1."""
    return (0, 1) if _current is None else (_current.world_rank, _current.world_size)
