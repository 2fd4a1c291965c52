"""Texts about a training in Prefect's list of runs and at the terminal: its name, the location of its checkpoints."""

from collections.abc import Iterator
from typing import Any

from prefect.blocks.core import Block
from prefect.context import FlowRunContext
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome
from prefect_torch.ckpt.runs.manifest import step_of
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.specs.location import is_block_slug
from prefect_torch.ckpt.text import as_command, encodable
from prefect_torch.flows.monitoring.restarted import Restart
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.prefect_api.flow_run import current_flow_run
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted, TrainingEvent

from .temporary_storage import warn_of_temporary_storage

_TAG = "run:"
_MEMORY = "memory://"


def flow_run_name() -> str:
    """Return the name of the flow run that begins: with the name of its training in front, if the user gave one.

    A training without a name gets one made from the flow run's name, which therefore stays as it is.
    """
    return _with_name(RunConfig.model_validate(_parameters().get("run") or {}).name)


def evaluation_flow_run_name() -> str:
    """Return the name of the flow run that begins: with the run and the name of its evaluation in front, if that is of one."""
    parameters = _parameters()
    run, name = parameters.get("run"), parameters.get("name")
    return _with_name(encodable(f"{run}-{name}") if run else None)  # neither is checked yet


def _with_name(given: str | None) -> str:
    this = current_flow_run()
    is_named = given is None or this.name == given or this.name.startswith(f"{given}-") or Restart.of(this) is not None
    return this.name if is_named else f"{given}-{this.name}"


def _parameters() -> dict[str, Any]:
    context = FlowRunContext.get()
    assert context is not None, "Prefect asks for the name within the flow run"
    return context.parameters or {}


def tag_of(run: str) -> str:
    """Return the tag by which the flow runs of a training are found."""
    return f"{_TAG}{run}"


def describe_location(what: str, run: Run, run_config: RunConfig) -> str:
    """Return where something is, and the command that shows it from this directory, unless its storage ends with its process.

    Args:
        what: The checkpoints of a training, or the trials of a sweep.
        run: The training or the sweep.
        run_config: Its storage as its caller gave it.

    """
    given = run_config.storage
    shown = given if isinstance(given, str) else portable_storage(run_config, run.spec)
    command = "" if shown.startswith(_MEMORY) else f"; see: {as_command('show', shown, run.name)}"
    return f"{what} are in {run.path}{command}"


def portable_storage(run_config: RunConfig, storage: StorageSpec) -> str:
    """Return the storage as commands and Python take it in any directory: its path, its URL, or the name of its block."""
    given = run_config.storage
    if not isinstance(given, Block):
        return str(given) if is_block_slug(str(given)) else storage.url
    name = given._block_document_name  # noqa: SLF001 - Prefect has no public name for it
    return storage.url if name is None else f"{given.get_block_type_slug()}/{name}"


class LocationObserver:
    """Logs what each attempt starts from, and where the checkpoints are: at the first start, and at an end without a result.

    Warns of an attempt that resumed and completed without a report, since its result is that of the training before.

    `log_completed` logs the location with a result. A training that cannot begin logs nothing but its error.

    Args:
        job: The training.

    Attributes:
        has_begun: Whether an attempt has begun.

    """

    def __init__(self, job: TrainJob) -> None:
        self.has_begun = False
        self._has_checkpoint = self._has_completed = self._has_reported = False
        self._resumed_from: str | None = None
        self._run, self._run_config = job.store, job.run_config
        self._text = describe_location(f"checkpoints of run {job.run!r}", self._run, job.run_config)

    def observe(self, event: TrainingEvent) -> None:
        """Log the start of an attempt, with the location if it is the first."""
        if isinstance(event, CommitEvent) or (isinstance(event, AttemptStarted) and event.resumed_from is not None):
            self._has_checkpoint = True
        if isinstance(event, AttemptStarted):
            get_run_logger().info("attempt %d: %s", event.attempt.number, "; ".join(self._of_start(event)))
            if not self.has_begun:
                warn_of_temporary_storage(self._run, self._run_config)
            self.has_begun, self._has_reported, self._resumed_from = True, False, event.resumed_from
        self._has_reported |= isinstance(event, ReportEvent)
        self._has_completed = isinstance(event, AttemptEnded) and event.outcome.is_done
        if isinstance(event, AttemptEnded):
            self._warn_of_old_result(event.outcome)

    def refresh(self, *, final: bool) -> None:
        """Log the location at an end without a result."""
        if final and self._has_checkpoint and not self._has_completed:
            get_run_logger().info("%s", self._text)

    def log_completed(self, summary: str) -> None:
        """Log the result in one line, and the location."""
        shown = encodable(summary)  # metrics may be named after files; for one such line, Prefect drops all that it has to send
        get_run_logger().info("%s", "; ".join([shown, self._text] if self._has_checkpoint else [shown]))

    def _warn_of_old_result(self, outcome: Outcome) -> None:
        if self._resumed_from is None or self._has_reported or outcome.ending != "completed":
            return
        get_run_logger().warning(
            "attempt %d resumed from step %d and completed without a report: if nothing was left to train, the result is that "
            "of the training before; another RunConfig.name begins a new run",
            outcome.attempt,
            step_of(_id_in(self._resumed_from)),
        )

    def _of_start(self, event: AttemptStarted) -> Iterator[str]:
        path = event.resumed_from
        checkpoint_id = "" if path is None else _id_in(path)
        yield f"resuming from {checkpoint_id}, step {step_of(checkpoint_id)}" if path else "starting from the beginning"
        if not self.has_begun:
            yield self._text


def _id_in(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
