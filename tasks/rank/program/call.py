"""The call of the training function in a rank, with its value or its error as a RankResult."""

import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from prefect_torch.ckpt.reporting.api import get_checkpoint, start_session
from prefect_torch.ckpt.reporting.session import RankSession
from prefect_torch.ckpt.runs.metrics import Metrics, clean_metrics
from prefect_torch.ckpt.text import clip, encodable, name_of
from prefect_torch.tasks.rank.errors import RankFailureKind
from prefect_torch.tasks.rank.failures import CONSEQUENCES, of_exception
from prefect_torch.tasks.rank.resources.available_memory import available_bytes
from prefect_torch.tasks.rank.resources.device import is_memory_held_by_others
from prefect_torch.tasks.rank.resources.oom_kills import OomKills
from prefect_torch.tasks.rank.spec import RankResult, RankSpec
from prefect_torch.tasks.rank.tracebacks import message_line, user_traceback
from prefect_torch.tasks.rank.user_code.function_reference import (
    TrainFunction,
    needs_no_argument,
    takes_checkpoint,
    takes_config,
)

from .cpu_pickle import dump_on_cpu

_MOST_TEXT = 100_000  # characters of a traceback


def call_in_session(function: TrainFunction, config: dict[str, Any] | None, session: RankSession, spec: RankSpec) -> RankResult:
    """Return what the function returns within `session`, or how it failed; the other ranks are notified of a failure.

    Args:
        function: The training function.
        config: Its argument, if it takes one.
        session: The rank's part in reports; its background commits are durable when this returns a value.
        spec: The rank.

    """
    start_session(session)
    if session.takes_reports:
        _watch_steps(spec.local_world_size)
    oom_kills = OomKills()
    try:
        try:
            with _this_process_only():
                value = _call(function, config, evaluates=spec.evaluates)
                if spec.evaluates and spec.rank == 0:
                    value = _as_metrics(value, spec)
        except SystemExit as exc:
            if exc.code not in (None, 0):
                raise
            value = None
        session.finish()
    except BaseException as exc:  # noqa: BLE001 - returned to the leader, which raises it again
        _explain_second_group(exc)
        is_gpu_shared = spec.use_gpu and of_exception(exc) == "out_of_memory" and is_memory_held_by_others()
        is_oom_killed = bool(oom_kills.happened())
        kind = of_exception(exc, rank=spec.rank, oom_killed=is_oom_killed, is_gpu_shared=is_gpu_shared)
        session.fail(_one_line(exc), spec.flush_s, is_consequence=kind in CONSEQUENCES)
        return failure_of(exc, kind)
    finally:
        start_session(None)
    return RankResult(return_value=_dump_value(value) if spec.rank == 0 else None)


def _watch_steps(num_ranks: int) -> None:
    """Have memory touched after the first steps for the first report of a state, at most this rank's share of the free one."""
    from prefect_torch.ckpt.state.expected_size import watch_steps  # noqa: PLC0415 - torch is imported by now

    watch_steps(lambda: available_bytes() // num_ranks)


def _call(function: TrainFunction, config: dict[str, Any] | None, *, evaluates: bool) -> Any:
    if evaluates and takes_checkpoint(function):
        return function(get_checkpoint(), **_by_name(function, config or {}))
    if not config and needs_no_argument(function):
        return function()  # its first parameter, which may be anything, keeps its default
    if takes_config(function):
        return function({} if config is None else config)
    if config:
        raise TypeError(
            f"config is given but {name_of(function)}() takes no argument: leave config out, or let the function take it"
        )
    return function()


def _by_name(function: TrainFunction, config: dict[str, Any]) -> dict[str, Any]:
    """Return the items of the config if the function takes them by name, after the checkpoint; TypeError if it does not."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, **config)
    except TypeError as exc:
        called = f"{name_of(function)}{signature}"
        raise TypeError(
            f"{called} gets the checkpoint, and each item of the config as an argument of its name: {exc}"
        ) from None
    return config


def _explain_second_group(exc: BaseException) -> None:
    """Add the remedy to torch's refusal of a second process group; its traceback stays that of the user's call."""
    if isinstance(exc, ValueError) and "default process group twice" in str(exc):
        exc.args = (f"{exc} The process group is ready when the function is called: leave init_process_group() out",)


def _as_metrics(value: object, spec: RankSpec) -> Metrics:
    if not isinstance(value, Mapping):
        raise TypeError(f"{spec.function.name} returned a {type(value).__name__} on rank 0: return a dict of metrics")
    return clean_metrics(value)


@contextmanager
def _this_process_only() -> Iterator[None]:
    """Exit a process that the body forked when it leaves the body: the session belongs to its parent."""
    pid = os.getpid()
    returncode = 1
    try:
        yield
        returncode = 0
    except SystemExit as exc:
        returncode = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if os.getpid() != pid and not isinstance(exc.code, int | None):
            print(exc.code, file=sys.stderr)  # noqa: T201 - as Python does
        raise
    except Exception:
        if os.getpid() != pid:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != pid:
            flush_output()
            os._exit(returncode & 0xFF)


def flush_output() -> None:
    """Flush what the function has printed, if its streams can: it may have closed them, or put anything in their place."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def failure_of(exc: BaseException, kind: RankFailureKind) -> RankResult:
    """Return the result of a rank that an error has ended: the text, and the error itself where it can be rebuilt."""
    text = encodable(clip(user_traceback(exc), _MOST_TEXT))
    return RankResult(kind=kind, error=_one_line(exc), traceback=text, exception=_dump_error(exc))


def _dump_error(exc: BaseException) -> bytes | None:
    """Return an exception, pickled; None if it cannot be rebuilt, or Prefect could not show it: its text is sent anyway."""
    try:
        pickled = dump_on_cpu(exc)
        rebuilt = pickle.loads(pickled)  # noqa: S301 - many exceptions pickle but do not unpickle
        # Prefect cannot store a state whose text holds a lone surrogate or a NUL, nor one of many megabytes.
        is_shown = all(encodable(text) == text and len(text) <= _MOST_TEXT for text in (str(rebuilt), repr(rebuilt)))
    except Exception:  # noqa: BLE001 - the exception determines the type
        return None
    return pickled if is_shown else None


def _one_line(exc: BaseException) -> str:
    return encodable(clip(message_line(exc)))


def _dump_value(value: Any) -> bytes | None:
    """Return a return value, pickled; a dict without the items that cannot be pickled, so that its metrics are kept."""
    try:
        return dump_on_cpu(value)
    except Exception as exc:  # noqa: BLE001 - a finished training must not fail for its return value
        held = {name: item for name, item in value.items() if _pickles((name, item))} if isinstance(value, dict) else {}
        lost = (
            f"{', '.join(str(name) for name in value if name not in held)} of the return value" if held else "the return value"
        )
        with suppress(Exception):  # the stream may be closed or replaced
            print(f"{lost} is dropped, since it cannot be pickled: {exc}", file=sys.stderr)  # noqa: T201 - the rank's log
        return dump_on_cpu(held) if held else None


def _pickles(value: Any) -> bool:
    try:
        dump_on_cpu(value)
    except Exception:  # noqa: BLE001 - the value determines the type
        return False
    return True
