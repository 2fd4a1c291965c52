"""The log of this package's flows: Prefect's records of them, shortened, at the right level, and none that repeats another."""

import logging
import re
from contextvars import ContextVar

from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect_torch.ckpt.text import without_login
from prefect_torch.flows.leading import set_terminated_state
from prefect_torch.flows.monitoring.terminal import HiddenAtTerminal, filter_terminals, outlive_terminals
from prefect_torch.tasks.prefect_api.final_state import is_of_state
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.tracebacks import first_line, has_user_frames, is_defect, is_from_here, is_ours, user_traceback

_RETRY = "Task run failed with %s: %r - Retry %s/%s"
_HOOK = set_terminated_state.__name__
_RAISED = "Encountered exception during execution"
_TASK_RAISED = "Task run failed with exception"
_FAILED = "Finished in state Failed"
_LOGGED_WITH_LOCATION = ("Beginning flow run", "Finished in state Completed")  # see monitoring.messages.LocationObserver
_ABORTED = "Finished in state Crashed('Execution was aborted"
_INVALID = "Validation of flow parameters failed with error: Flow run received invalid parameters"
_VALIDATION = "Parameter validation failed for flow "
is_called: ContextVar[bool] = ContextVar("is_called", default=False)  # within a call of a flow of this package
is_validating: ContextVar[bool] = ContextVar("is_validating", default=False)  # the parameters of a flow of this package
# Of this package, the newest flow run's id in this thread, and its flow: Prefect leaves its context before its last records.
_newest: ContextVar[tuple[str, str] | None] = ContextVar("newest_flow_run", default=None)
# States that are no news for a reader of a training's log; Prefect itself logs all states but Completed as errors.
_LEVELS = (
    ("train_rank", "Completed", logging.DEBUG),
    ("train_node", "Completed", logging.DEBUG),
    ("train_rank", "Failed", logging.INFO),  # the attempt's record has its message, but the log of the rank has nothing else
    ("train_node", "Failed", logging.INFO),
    ("train_rank", "Cancelled", logging.DEBUG),  # the consequence of what the attempt's record says
    ("train_node", "Cancelled", logging.DEBUG),
    ("train_workers", "Crashed", logging.INFO),
    ("train_workers", "Completed", logging.DEBUG),  # the flow run says the same, and the result
    ("train_workers", "Failed", logging.DEBUG),  # the flow run says the same
    ("prune_checkpoints", "Completed", logging.DEBUG),
)
_RANK_TASKS = ("train_rank", "train_node")
_LATER_LINES = re.compile(r"(?<!\\)\\n.*(?=['\"]\)$)")  # of the message's repr; the log of the attempt has them
_UNRECORDED = "Prefect's API did not record the final state of this flow run"
_LOST = "Prefect's API does not know this flow run any more: it was deleted, or the server has another database now"


class FlowLogFilter(logging.Filter):
    """Shortens, drops or changes the level of Prefect's log records of this package's flows; other records stay as they are.

    The log of the failed rank has its traceback, so it is not repeated. Any other exception keeps the user's frames. Where
    PREFECT_API_URL holds a login, no message has one: the errors of requests contain the whole URL, and all users see the log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the record, and return whether to keep it."""
        is_kept = self._shorten(record)
        if "@" in (PREFECT_API_URL.value() or "") and "@" in (text := _message(record)):
            record.msg, record.args = without_login(text), ()
        return is_kept

    def _shorten(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (error := record.exc_info[1]) is not None and is_from_here(error):
            record.exc_info = None
            record.exc_text = None if isinstance(error.__cause__ or error, RankFailedError) else _frames(error)
        if _is_of_lost_flow_run(record):
            record.exc_info, record.msg, record.args = None, _LOST, ()
            return True
        if (error := _error_of_state(record)) is not None:
            record.exc_info, record.msg, record.args = None, f"{_UNRECORDED}: {first_line(error)}", ()
            return True
        if _is_repetition(record) or _is_of_termination(record):
            return False
        if _is_of_flow(record) and str(record.msg).startswith(_FAILED):
            _set_level(record, logging.ERROR)
            record.msg = _LATER_LINES.sub("", str(record.msg))
        level = _level_of(record)
        if level is None:
            return True
        _set_level(record, level)
        return logging.getLogger(record.name).isEnabledFor(level)


def _is_repeated_at_terminal(record: logging.LogRecord) -> bool:
    """Return whether an exception, or another record, says the same to those who read the whole log.

    Such a record has the state of a failed rank; for the flow's caller, also that of a failed flow, of refused arguments, or of
    the attempts of a terminated training.
    """
    text = str(record.msg)
    if getattr(record, "task_name", "") in _RANK_TASKS and text.startswith(_FAILED):
        return True
    if is_called.get() and text.startswith(_ABORTED):
        return getattr(record, "task_name", "") == "train_workers"
    if not is_called.get() or not text.startswith(_FAILED):
        return False
    is_raised = _is_of_flow(record) and _kind_of(record) != "trial"  # the sweep goes on
    return is_raised or _INVALID in _message(record)


_FILTER = FlowLogFilter()
_HIDDEN_AT_TERMINAL = HiddenAtTerminal(_is_repeated_at_terminal)


def shorten_logs() -> None:
    """Attach the filter to Prefect's loggers of its engine, of flows and of their runs, once in a process.

    From then on, no flow ends because nobody reads its log lines any longer. The body of each flow of this package calls this,
    so that the last records of its flow run are known as well.
    """
    _newest.set(_current() or _newest.get())
    for name in ("prefect.engine", "prefect.flows", "prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_FILTER)  # adding it again has no effect
    filter_terminals(_HIDDEN_AT_TERMINAL)
    outlive_terminals()


def _is_repetition(record: logging.LogRecord) -> bool:
    """Return whether another record, or the exception that is raised, says the same."""
    text = str(record.msg)
    if text.startswith(_VALIDATION) and is_validating.get():
        return True  # the engine's record says it without all parameters
    if is_called.get() and _message(record).startswith(_INVALID):
        return True  # the record of the state and the exception say it
    if text.startswith(_RAISED) and _is_of_flow(record):
        # The record of the state has the error.
        return not record.exc_text and not record.exc_info
    if text.startswith(_TASK_RAISED) and _is_of_evaluation(record):
        return not record.exc_text and not record.exc_info  # the flow warns of the checkpoint, with the error
    # Prefect's record counts retries up to a million; the training logs its own budget.
    return text.startswith(_RETRY) and bool(record.args) and getattr(record, "task_name", "") == "train_workers"


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record; of one whose arguments do not fit, the format: logging itself tells of these."""
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - whatever the representation of an argument raises
        return str(record.msg)


def _level_of(record: logging.LogRecord) -> int | None:
    """Return the level of a record about a state that matters more, or less, than Prefect supposes; None for others."""
    text, task = str(record.msg), getattr(record, "task_name", None)
    if text.startswith(_FAILED) and _is_of_evaluation(record):
        return logging.DEBUG  # the flow warns of the checkpoint, with the error
    if _kind_of(record) == "train" and task is None and text.startswith(_LOGGED_WITH_LOCATION):
        return logging.DEBUG
    for name, state, level in _LEVELS:
        if task == name and text.startswith(f"Finished in state {state}"):
            return level
    return None


def _set_level(record: logging.LogRecord, level: int) -> None:
    record.levelno, record.levelname = level, logging.getLevelName(level)


def _is_of_lost_flow_run(record: logging.LogRecord) -> bool:
    """Return whether Prefect's API answered that there is no such flow run, when its final state was to be recorded."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, ObjectNotFound) and "/flow_runs/" in str(error.http_exc) and _is_of_flow(record)


def _error_of_state(record: logging.LogRecord) -> BaseException | None:
    """Return why the final state could not be recorded, such as an expired API key or an API that stayed away, or None."""
    error = record.exc_info[1] if record.exc_info else None
    return error if error is not None and is_of_state(error) and _is_of_flow(record) else None


def _is_of_flow(record: logging.LogRecord) -> bool:
    """Return whether `record` is of a flow run of this package, and of no task run."""
    return _kind_of(record) is not None and getattr(record, "task_name", None) is None


def _is_of_evaluation(record: logging.LogRecord) -> bool:
    """Return whether `record` is of the task of one checkpoint in `evaluate`; a flow of the user's own may call it, too."""
    return _kind_of(record) == "evaluate" and getattr(record, "task_name", None) == "evaluate_checkpoint"


def _kind_of(record: logging.LogRecord) -> str | None:
    """Return which flow of this package `record` is of, whatever its name; None of others, which may have the same name."""
    known = dict(it for it in (_newest.get(), _current()) if it is not None)
    return known.get(getattr(record, "flow_run_id", ""))


def _current() -> tuple[str, str] | None:
    """Return the id of the flow run of this context, and its flow; None if it is not of this package."""
    context = FlowRunContext.get()
    if context is None or context.flow is None or context.flow_run is None:
        return None
    function = context.flow.fn
    return (str(context.flow_run.id), function.__name__) if is_ours(str(getattr(function, "__module__", None))) else None


def _is_of_termination(record: logging.LogRecord) -> bool:
    """Return whether `record` is about a training that is terminated, or about the hook that names the reason in its state.

    The training logs why it was terminated, and what is safe.
    """
    text = str(record.msg)
    if f"hook '{_HOOK}'" in text.replace("Hook", "hook"):
        return True  # whatever flow the record names: with invalid parameters, it names none
    return _kind_of(record) in ("train", "trial") and text.startswith("Crash detected! Execution was ")


def _frames(error: BaseException) -> str | None:
    """Return the user's traceback, or None if no frame of it is the user's: Prefect's message has the exception."""
    return user_traceback(error).rstrip() if is_defect(error) or has_user_frames(error) else None
