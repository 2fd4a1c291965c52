"""The flow that evaluates checkpoints, of a finished run or during its training."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, TypeAlias

from prefect import flow
from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.runs.attempts.begun import check_begun
from prefect_torch.ckpt.runs.evaluations import check_evaluation_name
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.text import as_command, show_count
from prefect_torch.flows.calls.cluster_runner import with_cluster_of_runner
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.tasks import RankFailedError, ScalingConfig, evaluate_checkpoint
from prefect_torch.tasks.evaluation_task import EvaluationJob
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK
from prefect_torch.tasks.gang.gpus.allocation import GpusBusyError
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.gang.termination import Termination, TerminationSwitch
from prefect_torch.tasks.options.config import Directory, LogLevel, LogRanks
from prefect_torch.tasks.options.run_form import PathObject, WithoutNull, none_if_empty, shown_as
from prefect_torch.tasks.options.storage import StorageChoice, configured_storage
from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_running_servers
from prefect_torch.tasks.prefect_api.final_state import completed
from prefect_torch.tasks.prefect_api.outage import outlast_api_outages
from prefect_torch.tasks.prefect_api.tags import tags_beyond_caller
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.rank.user_code.function import pack_function
from prefect_torch.tasks.run_logs import get_run_logger, library_logs_in_run
from prefect_torch.tasks.training.liveness import is_being_trained
from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema

from .arguments import committed_checkpoint, gpus_for, machines_for
from .interruptions import suspendable
from .monitoring.messages import evaluation_flow_run_name
from .monitoring.text import show_first_number

_Given: TypeAlias = str | PathObject | SkipJsonSchema[Checkpoint]
_MOST_LOOKS = 5  # at a checkpoint whose manifest cannot be read: the storage may have refused it only once


@short_tracebacks
@flow(
    name="evaluate",
    flow_run_name=evaluation_flow_run_name,
    description="Evaluates checkpoints of a run on several ranks, during its training or after it, and attaches the metrics.",
    task_runner=ONE_THREAD_PER_RANK,
    persist_result=False,
)
def evaluate(
    eval_fn: Annotated[
        str | SkipJsonSchema[Callable[..., Any]],
        shown_as(
            "Evaluation function",
            "The function that every rank runs: 'module:function' or 'path/to/file.py:function'. On rank 0 it "
            "returns a dict of metrics.",
            pattern="^.+:[A-Za-z_][A-Za-z0-9_]*$",
        ),
    ],
    storage: Annotated[
        StorageChoice,
        shown_as(
            "Storage",
            "The location of the run: a local path, a URL such as s3://bucket/prefix, 'block-type-slug/block-name', or a saved "
            "block. A checkpoint in it that is given by its path or URL is read with its credentials.",
        ),
    ] = "./checkpoints",
    run: Annotated[
        str | None,
        WithoutNull(),
        BeforeValidator(none_if_empty),
        shown_as(
            "Run", "The run's name in the storage. Not needed if each checkpoint is given by its path or URL.", default=""
        ),
    ] = None,
    checkpoints: Annotated[
        Annotated[list[_Given], Field(title="These")]
        | Annotated[_Given, Field(title="This one")]
        | Annotated[None, Field(title="All without this evaluation")],
        shown_as("Checkpoints", "Which checkpoints to evaluate: ids in the run, 'run/id', paths or URLs."),
    ] = None,
    config: Annotated[
        dict[str, Any] | None,
        WithoutNull(),
        shown_as("Config", "The function's argument, if it takes one, as JSON.", default={}),
    ] = None,
    scaling: Annotated[
        ScalingConfig | None, WithoutNull(), shown_as("Scaling", "How many ranks evaluate together, and on what.")
    ] = None,
    name: Annotated[
        str,
        shown_as(
            "Name",
            "The evaluation's name. With 'eval', the score of its metric accuracy is 'eval/accuracy'.",
            pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        ),
    ] = "eval",
    watch: Annotated[bool, shown_as("Watch", "Evaluate each new checkpoint until the training of the run has ended.")] = False,
    poll_s: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False),
        shown_as("Poll interval (seconds)", "How often to look for new checkpoints while watching."),
    ] = 10.0,
    working_dir: Annotated[
        Directory | None,
        WithoutNull(),
        BeforeValidator(none_if_empty),
        shown_as(
            "Working directory",
            "A directory of the flow's machine that comes along to all machines, of up to 100 MiB: ranks run in a copy of it, "
            "and import from it. When empty, ranks use the flow's own, where that exists.",
            default="",
        ),
    ] = None,
    log_ranks: Annotated[
        LogRanks,
        shown_as(
            "Log ranks",
            "Whose lines go to Prefect's log: those of all ranks, of rank 0, or of each machine's first rank. The last lines "
            "of a rank that fails do in any case.",
        ),
    ] = "all",
    log_level: Annotated[
        Annotated[LogLevel, Field(title="From this level on")] | Annotated[None, Field(title="All lines")],
        shown_as(
            "Log level",
            "Only lines of at least this level go to Prefect's log: lines that begin with one, as loggers write them; others "
            "count as INFO, and tracebacks as ERROR.",
        ),
    ] = None,
) -> dict[str, Metrics]:
    """Evaluate checkpoints on several ranks, attach the metrics to them, and return these by checkpoint id.

    Inside the function `get_checkpoint()` returns the checkpoint, `get_context()` the rank's context, and the process group is
    initialized. The metrics that rank 0 returns are attached as `Manifest.metrics[name]` and replace those attached under that
    name before. A function whose first argument is called `checkpoint`, as Ray Train's validate, gets the checkpoint and the
    items of the config by name. The flow may run during the run's training, which it does not affect. A checkpoint that is
    pruned meanwhile is skipped. A failed evaluation fails the flow after the other checkpoints are evaluated, or immediately if
    each of these would fail in the same way: the function cannot be imported, GPUs stay in use, or machines are missing.

    Args:
        eval_fn: The function that every rank runs, or its location ("module:function", "path/to/file.py:function").
        storage: The location of the run. A checkpoint in it that is given by its path or URL is read with its credentials, any
            other one with those of the machine.
        run: The run's name; None if each checkpoint is given with its run.
        checkpoints: Checkpoints, ids in the run, "run/id", paths or URLs, or one of them; None for all without this evaluation.
        config: The function's argument, if it takes one; for a function that takes the checkpoint, its other arguments by name.
        scaling: The number of ranks and their devices. One rank without a GPU if None.
        name: The evaluation's name; `CheckpointConfig(checkpoint_score_attribute="eval/accuracy")` scores by its metric.
        watch: Whether to evaluate each new checkpoint until the flow run that trains the run has ended; a restart by an
            automation is another flow run.
        poll_s: How often to look for new checkpoints, in seconds.
        working_dir: A directory whose copy comes along to all machines, as `RunConfig.working_dir`; the flow's own if None.
        log_ranks: Whose lines go to Prefect's log; the last lines of a rank that fails do in any case.
        log_level: The lowest level of the lines that go to Prefect's log; all lines if None. If some do not go there, all are
            stored beside the run, for `prefect-torch logs --evaluation`.

    Raises:
        Exception: The first failure: the function's own exception, from a RankFailedError with the rank's traceback, or the
            RankFailedError of a process that died.
        ValueError: If an argument is invalid, the run is a sweep, or the training itself reported a metric called `name`, or
            "name/...".
        FileNotFoundError: If there is no such run, or no attempt of it has begun.
        GpusBusyError: If the GPUs that the ranks need stay in use for longer than `wait_for_gpus_s`.
        NotEnoughMachinesError: If too few ranks fit on the cluster.
        StorageNotSeenError: If a rank's machine sees another storage than this process, such as its own directory.
        CancelledRun: If its flow run is cancelled in Prefect, and no flow run that calls it.

    """
    shorten_logs()
    tie_running_servers()
    scaling = with_cluster_of_runner(scaling or ScalingConfig())
    gpus, machines = gpus_for(scaling), machines_for(scaling)
    spec = configured_storage(storage)
    packed = None if working_dir is None else pack_directory(working_dir, spec.url, check_evaluation_name(name))
    function = pack_function(eval_fn, config, working_dir, evaluates=True)
    job = EvaluationJob(function, check_evaluation_name(name), scaling, packed, log_ranks, log_level)
    termination = Termination(grace_s=0.0)
    pause = partial(termination.outlast, partial(termination.sleep, poll_s))
    chosen = _choose(spec, run, checkpoints, name, pause if watch else None)
    with outlast_api_outages(TerminationSwitch.is_thrown), termination.limit_retries(), suspendable(termination):
        evaluate_one = partial(evaluate_checkpoint, job, gpus=gpus, machines=machines, termination=termination)
        with tags_beyond_caller():
            evaluated = _evaluate_all(evaluate_one, chosen)
    return completed(_summarize(evaluated), evaluated)


def _choose(
    storage: StorageSpec,
    run: str | None,
    checkpoints: list[_Given] | _Given | None,
    name: str,
    pause: Callable[[], None] | None,
) -> Iterable[CheckpointRef]:
    if checkpoints is not None:
        if pause is not None:
            raise ValueError("watch=True evaluates every new checkpoint: give either watch or checkpoints, not both")
        given = checkpoints if isinstance(checkpoints, list) else [checkpoints]
        return [committed_checkpoint(checkpoint, storage, run) for checkpoint in given]
    if run is None:
        raise ValueError("give run, the name of the run to evaluate, or checkpoints")
    store = CheckpointStore.open(storage, run)
    check_begun(store)
    if is_sweep(store):
        listing = as_command("best", store.storage.url, run)
        raise ValueError(f"run {run!r} in {store.storage.url} is a sweep: give one of its trials, as {listing} names them")
    return _new_checkpoints(store, name, pause)


def _new_checkpoints(store: CheckpointStore, name: str, pause: Callable[[], None] | None) -> Iterator[CheckpointRef]:
    looks: dict[str, int] = {}
    has_looked = is_away = False
    while True:
        try:
            may_come = pause is not None and is_being_trained(store)  # checked first, so that the last ones are found below
            with library_logs_in_run():
                new = _unevaluated(store, name, looks)
        except StorageError as exc:
            if pause is None or not has_looked:
                raise
            if not is_away:  # the training waits for it, too
                get_run_logger().warning("%s; new checkpoints are looked for again once it answers", exc)
            is_away = True
            pause()
            continue
        has_looked, is_away = True, False
        yield from new
        if pause is None or not (may_come or new):
            return
        if not new:
            pause()


def _unevaluated(store: CheckpointStore, name: str, looks: dict[str, int]) -> list[CheckpointRef]:
    """Return the checkpoints that have no evaluation `name`, oldest first, unless they were returned or left out before.

    Costs a listing, and a small read for each object of a new checkpoint. One that cannot be read five times is left out.

    Args:
        store: The run.
        name: The evaluation.
        looks: How often to look at a checkpoint yet, by its id, if that was looked at before.

    """
    listed = [it for it in store.listed() if looks.setdefault(it.id, _MOST_LOOKS) > 0]
    new = read_manifests(store, listed)
    looks.update({it.id: looks[it.id] - 1 for it in listed})
    looks.update({manifest.id: 0 for manifest in new})
    return [CheckpointRef(store.spec, store.run, manifest.id) for manifest in new if name not in manifest.evaluations]


def _evaluate_all(
    evaluate_one: Callable[[CheckpointRef], Metrics | None], checkpoints: Iterable[CheckpointRef]
) -> dict[str, Metrics]:
    evaluated: dict[str, Metrics] = {}
    failure: Exception | None = None
    for checkpoint in checkpoints:
        try:
            metrics = evaluate_one(checkpoint)
        except Exception as exc:
            if _is_final(exc):
                raise
            get_run_logger().warning("checkpoint %s could not be evaluated: %r", checkpoint.checkpoint_id, exc)
            failure = failure or exc
        else:
            if metrics is not None:
                evaluated[checkpoint.checkpoint_id] = metrics
    if failure is not None:
        raise failure
    return evaluated


def _summarize(evaluated: dict[str, Metrics]) -> str:
    """Return an evaluation in one line, such as "3 checkpoints, accuracy 0.94 of the last": its first metric."""
    last = show_first_number(next(reversed(evaluated.values()), {}))
    which = " of the last" if len(evaluated) > 1 else ""
    return ", ".join([show_count(len(evaluated), "checkpoint"), *(f"{shown}{which}" for shown in last)])


def _is_final(error: Exception) -> bool:
    """Return whether every other checkpoint would fail in the same way, as with a function that cannot be imported."""
    if isinstance(error, (GpusBusyError, NotEnoughMachinesError)):
        return True
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    return isinstance(failed, RankFailedError) and failed.kind == "final"
