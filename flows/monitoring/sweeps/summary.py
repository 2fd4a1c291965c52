"""Texts about a sweep in Prefect's list of runs and in the log, and the observer that shows it."""

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.monitoring.messages import describe_location, portable_storage, tag_of
from prefect_torch.flows.monitoring.temporary_storage import warn_of_temporary_storage
from prefect_torch.flows.monitoring.text import show_number
from prefect_torch.flows.sweeps.definition import Definition
from prefect_torch.flows.sweeps.journal.history import History, score_of
from prefect_torch.flows.sweeps.schedulers.scheduling import WITH_RUNGS
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.prefect_api.flow_run import current_flow_run
from prefect_torch.tasks.run_logs import get_run_logger

from .observer import SweepObserver
from .page import SweepContext
from .trial_table import TrialTable
from .view import SweepView


def show_sweep(run: Run, definition: Definition, search: Search, given: RunConfig) -> SweepObserver:
    """Return the observer of a sweep that begins in this flow run, and log where its trials are; one request.

    Args:
        run: The sweep.
        definition: The space and the metrics of the sweep.
        search: The search, which has the trials.
        given: The storage as its caller gave it.

    """
    this = current_flow_run()
    with get_client(sync_client=True) as client:
        client.update_flow_run(this.id, tags={*this.tags, tag_of(run.name)})
    get_run_logger().info("%s", describe_location(f"trials of sweep {run.name!r}", run, given))
    warn_of_temporary_storage(run, given)
    has_rungs = search.search_config.scheduler in WITH_RUNGS
    context = SweepContext(portable_storage(given, run.spec), search.num_trials, has_rungs)
    table = TrialTable.at_terminal(search.num_trials, has_rungs=has_rungs)
    view = SweepView(run, definition)
    return SweepObserver(view, lambda: dict(search.trials), context, UUID(flow_run.id), table)


def summarize_sweep(definition: Definition, trials: History) -> str:
    """Return a sweep in one line, such as "32 trials, val_loss 0.0013 (best of trial 7), 2 failed"."""
    parts = [show_count(len(trials), "trial")]
    metric, mode = definition.metrics[0], definition.modes[0]
    scored = [(score, it) for it in trials.values() if (score := score_of(it, metric, mode)) is not None]
    if scored:
        score, trial = min(scored, key=lambda it: (it[0], it[1].number))
        parts.append(f"{metric} {show_number(score if mode == 'min' else -score)} (best of trial {trial.number})")
    elif any(trial.state != "failed" for trial in trials.values()):
        parts.append(f"no best one: {metric} was never a number")
    failed = sum(trial.state == "failed" for trial in trials.values())
    return ", ".join([*parts, *([f"{failed} failed"] if failed else [])])
