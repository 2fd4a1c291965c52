"""The flow `sweep`: many trainings, searched, each a run of its own, to be called, scheduled and triggered."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome, claim_key
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.calls.cluster_runner import with_cluster_of_runner
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.calls.parameters import check_stored
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.flows.sweeps.beginning import Beginning, begin
from prefect_torch.flows.sweeps.definition import Definition, define, find_definition, store_definition
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.history import TrialRecord, history_of
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.optuna_study.samplers import require_optuna
from prefect_torch.flows.sweeps.optuna_study.study import check_search
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested
from prefect_torch.flows.sweeps.trial_storage import pin_source
from prefect_torch.flows.trials.deployed_trials import DeployedTrials, check_deployment
from prefect_torch.flows.trials.local_trials import LocalTrials
from prefect_torch.flows.trials.sweep_leader import SweepLeader
from prefect_torch.flows.trials.trial_runs import Training, TrialRuns
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.gang.engines.cluster_block import load_cluster
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.gang.termination import TERMINATIONS, Termination, TerminationSwitch
from prefect_torch.tasks.options.run_form import WithoutNull, none_if_empty, shown_as
from prefect_torch.tasks.options.storage import configured_storage
from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_running_servers
from prefect_torch.tasks.prefect_api.final_state import completed
from prefect_torch.tasks.prefect_api.outage import outlast_api_outages
from prefect_torch.tasks.rank.tracebacks import first_line
from prefect_torch.tasks.rank.user_code.function import pack_function
from prefect_torch.tasks.rank.user_code.function_reference import reference_to
from prefect_torch.tasks.training.leadership import Claimant, claim_run
from prefect_torch.tasks.training.outcomes import outcome_of_termination, record_outcome
from pydantic import BeforeValidator
from pydantic.json_schema import SkipJsonSchema

from .arguments import gpus_for, restarted_by_this
from .interruptions import cancellable, spared_from_suspension
from .monitoring.events.sweep_events import SweepEvents
from .monitoring.messages import flow_run_name
from .monitoring.pages.runs_page import refresh_runs_page
from .monitoring.sweeps.summary import show_sweep, summarize_sweep
from .run_names import name_of_flow_run
from .sweep_result import SweepResult

_CONTINUED = "trials that ran go on when the sweep is started again"


@short_tracebacks
@flow(name="sweep", flow_run_name=flow_run_name, task_runner=ONE_THREAD_PER_RANK, persist_result=False)
def sweep(
    train_fn: Annotated[
        str | SkipJsonSchema[Callable[..., Any]],
        shown_as(
            "Training function",
            "The function that every rank of every trial runs: 'module:function' or 'path/to/file.py:function'.",
            pattern="^.+:[A-Za-z_][A-Za-z0-9_]*$",
        ),
    ],
    space: Annotated[
        dict[str, Any],
        shown_as(
            "Space",
            'The parameters to search, as JSON: {"lr": {"kind": "loguniform", "low": 0.0001, "high": 0.1}}. Kinds: uniform, '
            "loguniform, randint, choice, grid.",
        ),
    ],
    config: Annotated[
        dict[str, Any] | None,
        WithoutNull(),
        shown_as("Config", "The config that all trials share, as JSON.", default={}),
    ] = None,
    search: Annotated[
        SearchConfig | None, WithoutNull(), shown_as("Search", "The metric, the number of trials, and the search method.")
    ] = None,
    scaling: Annotated[
        ScalingConfig | None, WithoutNull(), shown_as("Scaling", "The number of ranks of each trial, and their devices.")
    ] = None,
    run: Annotated[
        RunConfig | None, WithoutNull(), shown_as("Run", "The sweep's name, the location of its records, and how it starts.")
    ] = None,
    checkpoint: Annotated[
        CheckpointConfig | None,
        WithoutNull(),
        shown_as("Checkpoints", "Which checkpoints each trial keeps in addition to its latest."),
    ] = None,
    failure: Annotated[FailureConfig | None, WithoutNull(), shown_as("Failures", "How often each trial is restarted.")] = None,
    trials_on: Annotated[
        str | None,
        WithoutNull(),
        BeforeValidator(none_if_empty),
        shown_as(
            "Trials on",
            "The deployment of the flow train that runs the trials, such as train/gpu. When empty, they run in this process.",
            default="",
        ),
    ] = None,
) -> SweepResult:
    """Search a space by trials, each of which is a training of its own.

    The function is any training function; it needs only `report` and `get_checkpoint`. A failed trial does not affect others.
    A killed sweep continues when it is started again with the same name: ended trials stay as they are, and trials that ran
    resume from their checkpoints. The result can be read at any time: `SweepResult.from_storage(storage, name)`.

    Args:
        train_fn: The function that every rank runs, or its location ("module:function", "path/to/file.py:function").
        space: The space to search: a config in which some values are domains, such as `loguniform(1e-4, 1e-1)`.
        config: The config that all trials share.
        search: The metric, the number of trials, and the search method. Required. `max_t` completes trials with any scheduler.
        scaling: The ranks of each trial. One rank without a GPU if None.
        run: The sweep's name, the location of its records, and how it starts; a trial's run is "<name>/trial-0007-<8 hex>".
        checkpoint: Which checkpoints each trial keeps. All if None.
        failure: How often each trial is restarted.
        trials_on: The deployment of the flow `train` that runs each trial as a flow run, such as "train/gpu", on the machines
            of its work pool, with the job variables that the deployment has. If None, trials run in this process, and their
            ranks are task runs.

    Raises:
        ValueError: If an argument is invalid; nothing was started.
        ImportError: If Optuna is not installed.
        SweepFailedError: If too many trials, or all, have failed, or Prefect's API refuses the flow run of a trial.
        RunBusyError: If another flow run that is alive leads this sweep.
        JournalDamagedError: If the sweep's journal is damaged.
        CancelledRun: If its flow run is cancelled in Prefect, and no flow run that calls it.

    """
    shorten_logs()
    tie_running_servers()
    with outlast_api_outages(TerminationSwitch.is_thrown):
        return _run(_checked(train_fn, space, config, search, scaling, run, checkpoint, failure, trials_on))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A sweep as its caller gives it, checked.

    Attributes:
        run: Its run, which holds its records.
        definition: Its definition.
        search_config: How it searches.
        space: The space that it searches.
        training: The training of every trial.
        function: The training function's name, or its location if trials run in a deployment.
        trials_on: The deployment that runs the trials; None for this process.

    """

    run: CheckpointStore
    definition: Definition
    search_config: SearchConfig
    space: Nested
    training: Training
    function: str
    trials_on: str | None


def _checked(
    train_fn: str | Callable[..., Any],
    space: dict[str, Any],
    config: dict[str, Any] | None,
    search: SearchConfig | None,
    scaling: ScalingConfig | None,
    run: RunConfig | None,
    checkpoint: CheckpointConfig | None,
    failure: FailureConfig | None,
    trials_on: str | None,
) -> _Sweep:
    """Return the sweep that the arguments of `sweep` describe; see its errors."""
    require_optuna()
    if search is None:
        raise ValueError("search is missing: give SearchConfig(metric=..., mode=...)")
    parsed, run_config, failure = parse_space(space), run or RunConfig(), failure or FailureConfig()
    check_search(search, parsed)
    scaling = with_cluster_of_runner(scaling or ScalingConfig())
    training, function = _training(train_fn, config, scaling, run_config, checkpoint, failure, trials_on)
    led = CheckpointStore.open(training.storage, run_config.name or name_of_flow_run())
    if "/" in led.name:
        raise ValueError(f"run name {led.name!r} is that of a sweep's trial: give the sweep one without '/'")
    definition = define(function, space, training.config, search)
    if trials_on is not None:  # all options: a later trial may be the first that draws the one that Prefect's API cannot hold
        check_stored(definition.config)
        check_stored(definition.space, "space")
    return _Sweep(led, definition, search, parsed, training, function, trials_on)


def _run(sweep: _Sweep) -> SweepResult:
    """Claim the sweep, run its trials, and return its result."""
    run, run_config = sweep.run, sweep.training.run_config
    claimed = _claim(run, run_config, sweep.definition)
    termination = Termination(sweep.training.failure.grace_s)
    with termination.limit_retries(), _outcome_recorded(run, claimed, sweep.training, termination):
        has_seed, may_be_fresh = sweep.search_config.seed is not None, run_config.resume == "never"
        begun = begin(run, claimed, sweep.definition, has_seed=has_seed, may_be_fresh=may_be_fresh)
        trials = _lead(sweep, claimed, begun, termination)
    result = SweepResult.of(run, begun.definition, trials)
    return completed(summarize_sweep(begun.definition, trials), result)


def _lead(sweep: _Sweep, claimed: Attempt, begun: Beginning, termination: Termination) -> Mapping[int, TrialRecord]:
    """Run the trials of a claimed sweep to their end, and return them."""
    run, config = sweep.run, sweep.search_config
    events = SweepEvents(run, config.metrics[0], config.modes[0], history_of(begun.events))
    with closing(events):
        search = Search(
            config,
            sweep.space,
            begun.definition.seed,
            RecordedTrials(begun.events, begun.journal.append, events.observe),
            run.name,
            partial(pin_source, run),
            keeps_left_runs=sweep.training.checkpoint.num_to_keep is None,
        )
        leader = SweepLeader(run, claim_key(run, claimed), search, are_deployed=sweep.trials_on is not None)
        leader.take_over(begun.former.values())
        training = _prepared(sweep.training, run, min(config.max_concurrent, search.num_trials))
        local = LocalTrials(training, search, run)
        trials: TrialRuns = local
        if sweep.trials_on is not None:
            trials = DeployedTrials(training, search, run, leader.check, sweep.trials_on, sweep.function)
        # A suspended sweep runs to its end: its trials could not distinguish a suspension from a failure.
        with (
            spared_from_suspension(),
            cancellable(termination, local.terminate_cancelled),
            show_sweep(run, begun.definition, search, training.run_config),
        ):
            search.lead(claimed.number, begun.definition.config, is_fresh=begun.is_fresh)
            if begun.is_fresh:
                store_definition(run, begun.definition)
            with _termination_recorded(run, claimed, training, termination):  # before the page: a worker may kill it soon
                termination.outlast(partial(leader.lead, trials, termination))
        leader.close()
    return search.trials


def _prepared(training: Training, run: Run, num_at_once: int) -> Training:
    """Return the training of trials, of which up to `num_at_once` run at a time; the copy of their directory is stored."""
    working_dir = None if training.working_dir is None else training.working_dir.stored_by(run)
    return replace(training, working_dir=working_dir, ranks_at_once=_ranks_at_once(training, num_at_once))


def _ranks_at_once(training: Training, num_trials: int) -> int:
    """Return how many ranks of up to `num_trials` trials compute on the CPUs of one machine at a time; on GPUs, one on each."""
    scaling = training.scaling
    if scaling.cluster is not None:
        return 1
    if not scaling.use_gpu:
        return num_trials * scaling.most_workers
    num_at_once = min(num_trials, len(training.gpus) // scaling.fewest_workers)
    return max(1, min(num_at_once * scaling.most_workers, len(training.gpus)))


def _training(
    train_fn: str | Callable[..., Any],
    config: dict[str, Any] | None,
    scaling: ScalingConfig,
    run: RunConfig,
    checkpoint: CheckpointConfig | None,
    failure: FailureConfig,
    trials_on: str | None,
) -> tuple[Training, str]:
    """Return the training that all trials share, and the function's name, or its location if trials run in a deployment."""
    storage = configured_storage(run.storage, run.storage_deadline_s, run.sync)
    working_dir, gpus = None, []
    if trials_on is None:
        gpus = gpus_for(scaling).check()  # listed once, for all trials
        if scaling.cluster is not None:  # likewise a block is loaded once
            scaling = scaling.model_copy(update={"cluster": load_cluster(scaling.cluster)})
        if run.working_dir is not None:  # once, so that all trials run the same code
            working_dir = pack_directory(run.working_dir, storage.url)
        function = pack_function(train_fn, {}, run.working_dir).name
    else:
        check_deployment(trials_on, run, storage)
        function = reference_to(train_fn)
    training = Training(
        lambda whole: pack_function(train_fn, whole, run.working_dir),
        storage,
        config or {},
        scaling,
        run,
        checkpoint or CheckpointConfig(),
        failure,
        working_dir,
        gpus,
    )
    return training, function


@contextmanager
def _outcome_recorded(led: Run, claimed: Attempt, training: Training, termination: Termination) -> Iterator[None]:
    """Record how the claimed attempt of a sweep ends."""
    flow_run_id, storage = claimed.owner.flow_run_id, training.storage
    try:
        with _termination_recorded(led, claimed, training, termination):  # before the trials, or after them
            yield
    except Exception as exc:
        record_outcome(led, claimed, Outcome(claimed.number, "failed", flow_run_id, "user", first_line(exc)))
        refresh_runs_page(storage)
        raise
    record_outcome(led, claimed, Outcome(claimed.number, "completed", flow_run_id))
    refresh_runs_page(storage)


@contextmanager
def _termination_recorded(led: Run, claimed: Attempt, training: Training, termination: Termination) -> Iterator[None]:
    """Record how the claimed attempt of a sweep ends if the body is terminated, once."""
    try:
        yield
    except TERMINATIONS as exc:
        if termination.outcome is None:
            if termination.cause is None:
                termination.request(exc)
            termination.outcome = outcome_of_termination(claimed, termination, training.failure.grace_s, _CONTINUED)
            termination.end_retries()
            record_outcome(led, claimed, termination.outcome)
        raise


def _claim(run: Run, run_config: RunConfig, given: Definition) -> Attempt:
    def check() -> None:
        known = None if run_config.resume == "never" else find_definition(run, given)  # a sweep that is refused stays as it is
        if known is None and run_config.resume == "must":
            raise CheckpointNotFoundError(
                f"there is no sweep {run.name!r} in {run.storage.url}, and resume='must' asks for one"
            )

    claimed, _ = claim_run(run, Claimant(Owner.current(flow_run.id), run_config, restarted_by_this(run_config)), check)
    return claimed
