"""Failures that fit on a screen: what Prefect logs and raises, without frames that say nothing to a user."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.exceptions import PrefectHTTPStatusError
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.tracebacks import has_user_frames, is_defect, is_from_here, shorten, user_traceback

from .cluster_runner import use_threads
from .leading import set_terminated_state

P = ParamSpec("P")
R = TypeVar("R")
_RETRY = "Task run failed with %s: %r - Retry %s/%s"
_HOOK = set_terminated_state.__name__
_VALIDATION = tuple(f"Parameter validation failed for flow {name!r}" for name in ("train", "sweep", "evaluate", "prune"))
# What is no event for the person who looks at a training; Prefect itself logs all states but Completed as errors.
_LEVELS = (
    ("train_rank", "Cancelled", logging.INFO),
    ("train_node", "Cancelled", logging.INFO),
    ("train_workers", "Crashed", logging.INFO),
    ("train_workers", "Completed", logging.DEBUG),  # the flow run says the same, and what came of it
    ("prune_checkpoints", "Completed", logging.DEBUG),
)
_TOO_LARGE = re.compile(r"parameters must be less than ([\d,]+) bytes when serialized \(got ([\d,]+) bytes\)")


class ShortTracebacks(logging.Filter):
    """Shortens the records in which Prefect logs an exception that has passed this package; others stay as they are.

    The log of the failed rank has its traceback, so it is not repeated. Of any other exception the frames of the user remain.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is of use, and shorten it."""
        if record.exc_info and (error := record.exc_info[1]) is not None and is_from_here(error):
            record.exc_info = None
            record.exc_text = None if isinstance(error.__cause__ or error, RankFailedError) else _frames(error)
        if str(record.msg).startswith(_VALIDATION):
            return False  # the engine's record and the exception say the same, without all parameters
        if str(record.msg).startswith(_RETRY) and record.args and getattr(record, "task_name", "") == "train_workers":
            return False  # it counts retries up to a million; the training logs its own budget
        if _is_of_termination(record):
            return False  # the training logs why it was terminated, and what is safe
        for task, state, level in _LEVELS:
            if getattr(record, "task_name", "") == task and str(record.msg).startswith(f"Finished in state {state}"):
                record.levelno, record.levelname = level, logging.getLevelName(level)
                return logging.getLogger(record.name).isEnabledFor(level)
        return True


_SHORT_TRACEBACKS = ShortTracebacks()


def shorten_logs() -> None:
    """Attach the filter to Prefect's loggers of flows, flow runs and task runs, once in a process."""
    for name in ("prefect.flows", "prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_SHORT_TRACEBACKS)  # adding it again has no effect


class ShortTracebackFlow(Flow[P, R]):
    """A flow whose exceptions show its caller's frames, and none of Prefect's or this package's."""

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Call the flow; see `prefect.Flow`."""
            shorten_logs()
            try:
                with large_parameters_explained():
                    return super().__call__(*args, **kwargs)
            except Exception as exc:
                if is_defect(exc):
                    raise
                shorten(exc)
                raise exc from exc.__cause__
            except KeyboardInterrupt as exc:
                shorten(exc)
                raise exc from None

        def with_options(self, **options: Any) -> "ShortTracebackFlow[P, R]":
            """Return a copy with other options; see `prefect.Flow`. A task runner of Ray or Dask names the ranks' cluster."""
            return short_tracebacks(super().with_options(**use_threads(options)))


@contextmanager
def large_parameters_explained() -> Iterator[None]:
    """Replace the refusal of parameters that are too large for Prefect, which repeats all of them, by one sentence.

    Raises:
        ValueError: With both sizes, and what to do.

    """
    try:
        yield
    except (PrefectHTTPStatusError, RuntimeError) as exc:  # RuntimeError: of a deployment
        sizes = _TOO_LARGE.search(str(exc))
        if sizes is None:
            raise
        raise ValueError(
            f"the parameters have {sizes[2]} bytes, and Prefect's server takes less than {sizes[1]}: put data of the config "
            "into a file or the storage, and its path into the config"
        ) from None


def short_tracebacks(flow: Flow[P, R]) -> Flow[P, R]:
    """Return `flow` as a ShortTracebackFlow; Prefect's decorator stays visible to its tools, which read it as text."""
    flow.__class__ = ShortTracebackFlow
    return flow


def _is_of_termination(record: logging.LogRecord) -> bool:
    """Return whether `record` is about a training that is terminated, or about the hook that names the reason in its state."""
    text = str(record.msg)
    if getattr(record, "flow_name", "") != "train":
        return False
    return text.startswith("Crash detected! Execution was ") or (f"hook '{_HOOK}'" in text.replace("Hook", "hook"))


def _frames(error: BaseException) -> str | None:
    """Return the user's traceback, or None if no frame of it is the user's: Prefect's message has the exception."""
    return user_traceback(error).rstrip() if is_defect(error) or has_user_frames(error) else None
