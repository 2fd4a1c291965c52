"""Whole trainings: a real Prefect server, real processes, real process groups."""

import math
import os
import re
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from forked_programs import started_as_usual
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter, LogFilterFlowRunId, LogFilterTaskRunId
from prefect.client.schemas.sorting import FlowRunSort
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_servers import wait_until
from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    ReportMismatchError,
    RetentionPolicy,
    StateMismatchError,
    StorageError,
    StorageFullError,
    get_context,
    report,
)
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.attempts.attempt import read_outcomes
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.index.segments import FEW, read_index
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    RankFailedError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    train,
)
from prefect_torch.flows.monitoring.text import page_url
from prefect_torch.tasks.gang import gang_run, rank_groups
from prefect_torch.tasks.rank import rendezvous
from prefect_torch.tasks.training import leadership, recorder
from prefect_torch.tasks.training.retention_schedule import RetentionSchedule
from pydantic import ValidationError
from trainings import ENDS, returned_end

TWO = ScalingConfig(num_workers=2)
NO_RESTARTS = FailureConfig(max_infrastructure_failures=0)


def epochs(number, **config):
    return {"epochs": number, **config}


def test_a_task_runner_with_few_threads_starts_all_ranks(run):
    training = train.with_options(task_runner=ThreadPoolTaskRunner(max_workers=1))
    result = training("trainings:train_epochs", epochs(1), TWO, run, failure=NO_RESTARTS)
    assert result.return_value == {"begun": 0, "attempt": 1}


@pytest.mark.parametrize("runner", [ProcessPoolTaskRunner, ProcessPoolTaskRunner(max_workers=2)])
def test_a_task_runner_of_processes_is_refused(runner):
    with pytest.raises(ValueError, match=r"^task_runner=ProcessPoolTaskRunner\(...\): .*: leave the task runner out$"):
        train.with_options(task_runner=runner)


def test_a_training_gives_back_its_result(run):
    policy = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="max")
    result = train("trainings:train_epochs", epochs(5), TWO, run, policy)
    assert result.metrics == {"epoch": 4, "loss": 0.2}
    assert result.return_value == {"begun": 0, "attempt": 1}
    assert (result.attempts, result.error, result.completed, result.resumed_from) == (1, None, True, None)
    assert result.path == f"{run.storage}/run"
    assert result.checkpoint.metrics["epoch"] == 4
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 4]  # the last one is the latest
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 2, 3, 4]
    store = CheckpointStore.open(run.storage, "run")
    assert [manifest.metrics["epoch"] for manifest in store.list()] == [0, 1, 4]  # the best two, and the latest
    with result.checkpoint.as_directory() as directory:
        assert directory.startswith(run.storage)
    assert Result.from_storage(run.storage, "run").return_value == result.return_value


def test_a_training_that_keeps_many_checkpoints_indexes_their_manifests(run):
    train("trainings:train_epochs", epochs(FEW + 1), run=run)
    store = CheckpointStore.open(run.storage, "run")
    indexed = [entry.manifest for entry in read_index(store.storage, store.layout).values()]
    assert len(store.list()) == FEW + 1
    assert indexed == store.list()[: len(indexed)]
    assert len(indexed) >= FEW


def test_the_dataframe_distinguishes_reports_from_what_was_logged_between_them(tmp_path):
    run = Run.open(tmp_path, "run")
    history = HistoryWriter(run, claim_attempt(run, Owner.current(), world_size=1).number)
    for step, metrics, is_logged in [(0, {"loss": 2}, False), (0, {"lr": 0.1}, True), (1, {"loss": 1}, False)]:
        history.append(MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00", is_logged=is_logged))
    history.flush()
    frame = Result.from_storage(tmp_path, "run").metrics_dataframe
    assert list(frame["is_logged"]) == [False, True, False]
    assert list(frame[~frame["is_logged"]]["loss"]) == [2, 1]


def test_a_failed_rank_restarts_all_from_the_latest_checkpoint_however_it_has_ended(run, opened):
    hows = ["raise", "exit", "kill", "_exit"]
    failure = FailureConfig(max_failures=2, max_infrastructure_failures=2)
    result = train("trainings:end_in_each_way", {"hows": hows}, TWO, run, CheckpointConfig(num_to_keep=1), failure)
    assert opened == [run.storage] * 2, "by the leader for all attempts and prunes, and for the page of the storage's runs"
    assert result.return_value == {"begun": 8, "attempt": 5}
    assert result.attempts == 5
    assert "/000004-00000007-" in result.resumed_from
    frame = result.metrics_dataframe
    assert list(zip(frame["attempt"], frame["epoch"], strict=True)) == [(1 + epoch // 2, epoch) for epoch in range(10)]
    outcomes = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert [outcome.kind for outcome in outcomes] == ["user", "user", "infrastructure", "infrastructure", None]


def test_only_after_the_last_attempt_nothing_may_follow_that_would_look_for_garbage(run, monkeypatch):
    ends = []

    class Schedule(RetentionSchedule):
        def finish(self, recorded, *, may_go_on):
            ends.append(may_go_on)
            super().finish(recorded, may_go_on=may_go_on)

    monkeypatch.setattr(recorder, "RetentionSchedule", Schedule)
    train("trainings:end_in_each_way", {"hows": ["raise", "kill"]}, TWO, run, failure=FailureConfig(max_failures=1))
    assert ends == [True, True, False]


def test_a_rank_that_was_killed_is_the_cause_and_others_are_stopped_at_once(run, monkeypatch):
    """Of one that has raised it is not known yet: its error may be what another rank's has led to."""
    monkeypatch.setattr(gang_run, "_SETTLE_S", 600)
    assert train("trainings:lose_a_rank_that_nobody_needs", {}, TWO, run).return_value == "trained"


def test_without_restarts_left_the_last_error_is_raised_and_the_result_stays_readable(run, caplog):
    with pytest.raises(ValueError, match="boom from the training") as caught:
        train(
            "trainings:train_epochs",
            epochs(4, how="raise", rank=1, at=2, times=9),
            TWO,
            run,
            failure=FailureConfig(max_failures=2),
        )
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert "in come_to_an_end" in caught.value.__cause__.traceback  # the rank's own
    result = Result.from_storage(run.storage, "run")
    place = f"checkpoints of run 'run' are in {result.path}; see: prefect-torch show {run.storage} run"
    assert [record.message for record in caplog.records].count(place) == 1, "at the end"
    assert result.attempts == 3
    assert result.metrics == {"epoch": 1, "loss": 0.5}
    assert result.checkpoint.metrics["epoch"] == 1
    assert isinstance(result.error, TrainingFailedError)
    assert result.errors.keys() == {1}
    assert "boom from the training" in result.errors[1]


def test_each_rank_that_failed_by_itself_is_told(run):
    def fail_together():
        dist.barrier()
        rank = get_context().world_rank
        raise ValueError(f"the data of rank {rank}")

    with pytest.raises(ValueError, match="the data of rank"):
        train(fail_together, scaling=TWO, run=run)
    errors = Result.from_storage(run.storage, "run").errors
    assert errors.keys() == {0, 1}
    assert all(f"the data of rank {rank}" in error and "in fail_together" in error for rank, error in errors.items())


def test_a_lost_rank_uses_no_restart_of_the_users_where_torch_checks_each_collective(run, monkeypatch):
    """Then the survivors' errors have a form of their own."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def train_watched():
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        context = get_context()
        dist.barrier()
        if (context.world_rank, context.attempt) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    result = train(train_watched, scaling=TWO, run=run, failure=FailureConfig(max_failures=0))
    assert (result.attempts, result.errors) == (2, {})


def test_a_lost_rank_uses_no_restart_of_the_users_where_the_function_exits_because_of_the_lost_connection(run):
    def train_and_exit():
        context = get_context()
        dist.barrier()
        if (context.world_rank, context.attempt) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
        except RuntimeError:
            sys.exit(1)

    result = train(train_and_exit, scaling=TWO, run=run, failure=FailureConfig(max_failures=0))
    assert (result.attempts, result.errors) == (2, {})


def test_the_states_of_a_failure_have_one_line_and_its_exception_has_all(run):
    def fail():
        raise ValueError("the first line\nthe second\n  'the third'")

    whole = "the first line\nthe second\n  'the third'"
    with pytest.raises(ValueError, match="the second") as caught:
        train(fail, run=run, failure=FailureConfig(max_failures=1))
    assert str(caught.value) == whole
    assert not hasattr(caught.value, "__notes__")
    failed = train(fail, run=run, return_state=True)
    assert str(failed.result(raise_on_failure=False)) == whole
    line = "ValueError: the first line"
    assert_one_line(failed, line, attempt=3, of_rank=line)


def test_the_store_of_a_failed_attempt_ends_with_it_while_others_hold_the_exception(run):
    """A run of very many attempts else runs out of file descriptors: the traceback of a failure holds the leader's frames."""

    def fail():
        raise ValueError("each time")

    before = listening()
    with pytest.raises(ValueError, match="each time") as caught:
        train(fail, run=run, failure=FailureConfig(max_failures=1))
    assert caught.value.__traceback__ is not None
    assert listening() <= before


def listening():
    """Return the ports at which this process listens."""
    return {it.laddr.port for it in psutil.Process().net_connections() if it.status == psutil.CONN_LISTEN}


def test_an_exception_that_makes_its_own_text_of_lines_is_raised_as_it_is_and_its_states_have_one(run, caplog):
    def refuse():
        import pydantic  # noqa: PLC0415

        class Hyperparameters(pydantic.BaseModel):
            lr: float
            layers: int

        Hyperparameters(lr="fast", layers="many")

    with pytest.raises(ValidationError, match=r"(?s)2 validation errors.*layers\n") as caught:
        train(refuse, run=run, failure=FailureConfig(max_failures=1))
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert type(caught.value) is ValidationError
    assert [len(record.message.split("layers\n")) for record in caplog.records if "Traceback" in record.message] == [2, 2]
    failed = train(refuse, run=run, return_state=True)
    assert type(failed.result(raise_on_failure=False)) is ValidationError
    line = "ValidationError: 2 validation errors for Hyperparameters"
    assert_one_line(failed, line, attempt=3, of_rank=f"pydantic_core._pydantic_core.{line}")


def assert_one_line(failed, line, attempt, of_rank):
    """Wait for these messages: a busy server knows of a task run's state seconds after the flow run's."""
    expected = {
        "train": f"Flow run encountered an exception: {line}",
        "train-run": f"Task run encountered an exception {line}",
        "rank-0": f"rank 0 of attempt {attempt} failed: {of_rank}",
    }
    stored = partial(messages_of, failed.state_details.flow_run_id)
    wait_until(lambda: stored() == expected, stored)


def test_the_message_of_refused_arguments_has_one_line():
    refused = train("trainings:train_epochs", scaling={"num_workers": "many", "use_gpu": 7}, return_state=True)
    (message,) = messages_of(refused.state_details.flow_run_id).values()
    assert message.startswith("Validation of flow parameters failed with error: ParameterTypeError: Flow run received invalid")
    assert re.search(r"scaling.*num_workers: .*; scaling.*use_gpu: ", message)


def messages_of(flow_run_id):
    """Return the stored messages of a flow run of `train` and of its task runs, by name."""
    with get_client(sync_client=True) as client:
        task_runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run_id]}))
        return {
            "train": client.read_flow_run(flow_run_id).state.message,
            **{task_run.name: task_run.state and task_run.state.message for task_run in task_runs},
        }


def test_a_lost_process_does_not_count_as_the_users_failure(run):
    with pytest.raises(RankFailedError, match=r"rank 0 of attempt 2 failed: its process was killed by SIGKILL"):
        train(
            "trainings:train_epochs",
            epochs(3, how="kill", rank=0, at=1, times=9),
            TWO,
            run,
            failure=FailureConfig(max_failures=9, max_infrastructure_failures=1),
        )


def test_a_new_flow_run_of_the_same_name_continues_and_another_name_starts_fresh(run):
    train("trainings:train_epochs", epochs(2), run=run)
    assert train("trainings:train_epochs", epochs(4), run=run).return_value == {"begun": 2, "attempt": 2}
    nameless = train("trainings:train_epochs", epochs(1), run=run.model_copy(update={"name": None}))
    assert nameless.return_value == {"begun": 0, "attempt": 1}
    assert nameless.path != f"{run.storage}/run"


def test_a_start_reads_the_manifest_that_it_resumes_from_once_and_its_ranks_do_not(run, monkeypatch):
    """What is read again would be found changed, by whichever process."""
    policy = CheckpointConfig(num_to_keep=2)
    first = train("trainings:train_epochs", epochs(2), TWO, run, policy).checkpoint
    key = first.store.layout.manifest(first.id)
    read, readers = LocalStorage.get_bytes, []

    def read_once(self, asked):
        data = read(self, asked)
        if asked == key:
            readers.append(threading.current_thread())
            self.put_bytes(key, b"changed")
        return data

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "get_bytes", read_once)
        result = train("trainings:train_epochs", epochs(3), TWO, run, policy)
    assert result.return_value == {"begun": 2, "attempt": 2}
    assert result.resumed_from == first.path
    leader, *others = readers  # those who look on, and whoever asks for the result, read for themselves
    assert leader not in others


def test_resume_never_begins_anew_but_its_own_restarts_continue(run):
    train("trainings:train_epochs", epochs(3), run=run)
    result = train(
        "trainings:train_epochs",
        epochs(3, how="raise", rank=0, at=1, times=2),
        run=run.model_copy(update={"resume": "never"}),
        failure=FailureConfig(max_failures=1),
    )
    assert result.return_value == {"begun": 1, "attempt": 3}


def test_resume_must_begins_no_run_and_fails_where_a_run_has_no_checkpoint(run):
    must = run.model_copy(update={"resume": "must"})
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        train("trainings:train_epochs", epochs(1), run=must)
    assert list(list_runs(run.storage)) == []
    train("trainings:tell_environment", run=run)
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        train("trainings:train_epochs", epochs(1), run=must)
    assert "resume='must'" in str(Result.from_storage(run.storage, "run").error)


def test_another_runs_checkpoint_seeds_a_new_run_and_is_its_parent(run):
    seed = train("trainings:train_epochs", epochs(2), run=run).checkpoint
    other = run.model_copy(update={"name": "other"})
    result = train("trainings:train_epochs", epochs(3), run=other, resume_from=seed)
    assert result.return_value == {"begun": 2, "attempt": 1}
    assert (result.resumed_from, result.checkpoint.step) == (seed.path, 2)
    assert result.checkpoint.manifest.parent == seed.path
    again = train("trainings:train_epochs", epochs(4), run=other, resume_from=Path(seed.path))
    assert again.return_value == {"begun": 3, "attempt": 2}  # its own checkpoint comes first
    assert seed.store.pinned() == frozenset()  # as while it had none of its own


def test_a_damaged_latest_is_set_aside_and_the_one_before_is_used(run):
    latest = train("trainings:train_epochs", epochs(3), run=run).checkpoint
    with latest.as_directory() as directory, Path(directory, "state.json").open("r+") as file:
        file.write("X")
    state = train("trainings:train_epochs", epochs(3), run=run, return_state=True)
    assert state.result().return_value == {"begun": 2, "attempt": 2}
    wait_for_logs(
        state.state_details.flow_run_id,
        train_run=f"checkpoint {latest.id} of run 'run' is damaged and set aside: ",
    )


def test_a_training_that_compares_sizes_alone_restores_files_of_the_same_size(run):
    latest = train("trainings:train_epochs", epochs(2), run=run).checkpoint
    Path(latest.path, "state.json").write_text('{"epoch": 0}')  # it was 1
    again = train("trainings:train_epochs", epochs(3), run=run.model_copy(update={"verify": "size"}))
    assert again.return_value == {"begun": 1, "attempt": 2}


def test_when_all_are_damaged_it_does_not_start_from_zero(run):
    latest = train("trainings:train_epochs", epochs(1), run=run).checkpoint
    with latest.as_directory() as directory, Path(directory, "state.json").open("r+") as file:
        file.write("X")
    with pytest.raises(CheckpointCorruptError, match="no whole checkpoint left"):
        train("trainings:train_epochs", epochs(3), run=run)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The state of a training whose ranks are new processes and tell their environment."""
    run = RunConfig(name="run", storage=str(tmp_path_factory.mktemp("told") / "store"))
    with started_as_usual():
        return train("trainings:tell_environment", {}, TWO, run, failure=FailureConfig(grace_s=7), return_state=True)


def test_a_rank_knows_its_grace(told):
    assert told.result().return_value["grace_s"] == 7


def test_a_rank_has_torchruns_environment_a_process_group_and_no_prefect(told):
    returned = told.result().return_value
    assert (returned["backend"], returned["prefect"]) == ("gloo", False)
    for rank, told_by_rank in enumerate(returned["environments"]):
        environment = dict(told_by_rank)
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        del environment["MASTER_ADDR"], environment["MASTER_PORT"]
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
        }


def wait_for_logs(flow_run_id, **wanted):
    """Wait until the logs of the task runs of these names ("rank_0" for "rank-0") hold these words."""
    of_flow_run = FlowRunFilter(id={"any_": [flow_run_id]})

    def have_arrived(client, name, words):
        ids = [task_run.id for task_run in client.read_task_runs(flow_run_filter=of_flow_run) if task_run.name == name]
        logs = LogFilter(task_run_id=LogFilterTaskRunId(any_=ids))
        return any(words in log.message for log in client.read_logs(logs, limit=200))

    with get_client(sync_client=True) as client:
        for name, words in wanted.items():
            wait_until(partial(have_arrived, client, name.replace("_", "-"), words), f"{words!r} in the log of {name}")


def test_the_output_of_a_rank_is_in_its_own_task_runs_log(told):
    wait_for_logs(told.state_details.flow_run_id, rank_0="hello from rank 0", rank_1="hello from rank 1")


@pytest.mark.parametrize(("num_workers", "name"), [(2, "rank-1"), (3, "node-0: ranks 1-2")])
def test_a_failed_ranks_error_is_its_states_message(run, monkeypatch, num_workers, name):
    """Also where the ranks of a machine share a task run. Every task run of ranks is final in the end."""
    monkeypatch.setattr(rank_groups, "MOST_TASK_RUNS", 2)
    scaling = ScalingConfig(num_workers=num_workers)
    state = train(
        "trainings:train_epochs", epochs(1, how="raise", rank=1, at=0), scaling, run, failure=NO_RESTARTS, return_state=True
    )
    assert state.is_failed()
    with get_client(sync_client=True) as client:
        of_flow_run = FlowRunFilter(id={"any_": [state.state_details.flow_run_id]})
        states = {}

        def are_final():
            found = client.read_task_runs(flow_run_filter=of_flow_run, limit=100)
            states.update({task_run.name: task_run.state for task_run in found if task_run.state is not None})
            of_ranks = {each: state for each, state in states.items() if "rank" in each}
            return of_ranks.keys() == {"rank-0", name} and all(state.is_final() for state in of_ranks.values())

        wait_until(are_final, states)
    assert states[name].is_failed()
    assert "boom from the training" in states[name].message
    assert "\n" not in states[name].message


def test_metrics_without_checkpoints_are_kept_and_cost_milliseconds(run):
    result = train("trainings:report_only_metrics", {"reports": 1000}, TWO, run)
    assert len(result.history) == 1001
    assert list(result.metrics_dataframe["nested/half"][:3]) == [0, 0.5, 1]
    assert result.checkpoint is None
    assert result.metrics["seconds"] < 10


def test_a_rank_that_hangs_is_ended_with_its_children_when_another_fails(run, tmp_path):
    (tmp_path / "pids").mkdir()
    started = time.monotonic()
    with pytest.raises(ValueError, match="the others hang"):
        train("trainings:hang_with_a_child", {"pids": str(tmp_path / "pids"), "raise_on": 1}, TWO, run)
    assert time.monotonic() - started < 60
    pids = [int(pid) for file in (tmp_path / "pids").iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_function_of_this_process_travels_and_a_nan_score_comes_back_as_one(run):
    offset = 3

    def local(config):
        report({"value": config["base"] + offset, "loss": float("nan")})

    metrics = train(local, {"base": 1}, run=run).metrics
    assert (metrics.keys(), metrics["value"]) == ({"value", "loss"}, 4)
    assert math.isnan(metrics["loss"])


def test_ranks_that_disagree_fail_at_once_whatever_the_budget(run):
    def disagree():
        for _ in range(2 + get_context().world_rank):
            report({})

    with pytest.raises(ReportMismatchError, match="rank 0 returned after 2 reports"):
        train(disagree, None, TWO, run, failure=FailureConfig(max_failures=5))
    assert Result.from_storage(run.storage, "run").attempts == 1


@pytest.mark.parametrize(
    ("how", "error", "kind"),
    [
        ("missing folder", CheckpointNotFoundError, "user"),
        ("full disk", StorageFullError, "user"),
    ],
)
def test_what_a_restart_does_not_mend_is_not_restarted_unasked(run, how, error, kind):
    with pytest.raises(error):
        train("trainings:make_a_mistake", {"how": how}, TWO, run)
    assert [outcome.kind for outcome in read_outcomes(CheckpointStore.open(run.storage, "run"))] == [kind]


def test_another_model_under_an_old_name_is_refused_at_once_whatever_the_budget(run):
    train("trainings:make_a_mistake", {"how": "another model", "size": 2}, run=run)
    with pytest.raises(StateMismatchError, match=r"give the run another name, or resume='never'"):
        train("trainings:make_a_mistake", {"how": "another model", "size": 3}, TWO, run, failure=FailureConfig(max_failures=5))
    assert Result.from_storage(run.storage, "run").attempts == 2


def test_memory_that_ran_out_is_tried_again_where_that_is_asked(run):
    failure = FailureConfig(max_out_of_memory_failures=1)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        train("trainings:make_a_mistake", {"how": "gpu memory"}, TWO, run, failure=failure)
    outcomes = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert [outcome.kind for outcome in outcomes] == ["out_of_memory"] * 2


def test_a_claim_that_always_fails_ends_with_the_budget(run, monkeypatch):
    """Though no start tells of it."""
    claims = []

    def fail(store, owner, **_):
        claims.append(owner)
        if len(claims) > 9:
            pytest.fail("it goes on for ever")
        raise StorageError("no answer")

    monkeypatch.setattr(leadership, "claim_attempt", fail)
    with pytest.raises(StorageError, match="no answer"):
        train("trainings:train_epochs", epochs(1), run=run, failure=FailureConfig(max_infrastructure_failures=2))
    assert len(claims) == 3


def test_a_training_that_hangs_shows_its_stacks_and_starts_again_though_it_logs(run):
    result = train(
        "trainings:train_epochs", epochs(4, how="hang", rank=0, at=2), TWO, run, failure=FailureConfig(hang_timeout_s=10)
    )
    assert result.return_value["begun"] == 2
    store = CheckpointStore.open(run.storage, "run")
    first = read_outcomes(store)[0]
    assert (first.kind, first.errors) == ("infrastructure", {})
    assert "no report came for 10 s" in first.error
    wait_for_logs(first.flow_run_id, rank_0="in come_to_an_end", rank_1="in all_reduce")  # one waits for the other


def test_a_rank_that_somebody_ended_counts_as_preempted(run):
    failure = FailureConfig(max_infrastructure_failures=0, max_preemptions=1)
    result = train("trainings:train_epochs", epochs(3, how="terminate", rank=1, at=1), TWO, run, failure=failure)
    assert result.attempts == 2
    assert read_outcomes(CheckpointStore.open(run.storage, "run"))[0].kind == "preemption"


def test_a_rank_that_is_ended_before_it_has_committed_counts_as_lost(run):
    """What ends it so, a watchdog of memory say, would do so in each attempt, and preemptions have no limit."""
    failure = FailureConfig(max_infrastructure_failures=0)
    with pytest.raises(RankFailedError, match="killed by SIGTERM"):
        train("trainings:train_epochs", epochs(1, how="terminate", rank=0, at=0), run=run, failure=failure)


def test_a_score_that_never_appears_is_warned_of_once_and_keeps_the_latest(run, caplog):
    result = train(
        "trainings:train_epochs",
        epochs(4),
        run=run,
        checkpoint=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="acuracy"),
    )
    assert [record.message for record in caplog.records if "has no metric 'acuracy'" in record.message][1:] == []
    assert "has no metric 'acuracy'" in caplog.text
    assert result.checkpoint.metrics["epoch"] == 3
    assert len(CheckpointStore.open(run.storage, "run").list()) == 1


def test_a_score_that_is_a_text_ends_the_training_where_it_is_reported(run):
    by_name = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="name")
    with pytest.raises(ValueError, match="metric 'name' is 'high', a str, and checkpoint_score_attribute"):
        train("trainings:report_a_name", run=run, checkpoint=by_name)


@pytest.mark.parametrize(
    ("train_fn", "message"),
    [
        ("nosuchmodule:f", "there is no module 'nosuchmodule' .*: give 'path/to/file.py:function', or start in the"),
        ("nosuch.module:f", "cannot be found"),
        ("trainings:nosuch", "defines no 'nosuch'"),
        ("nosuch.py:f", "there is no file"),
        ("trainings", "give 'module:function'"),
        (":f", "give 'module:function'"),
    ],
)
def test_a_function_that_does_not_exist_is_named_before_anything_starts(run, tmp_path, train_fn, message):
    with pytest.raises(ValueError, match=message):
        train(train_fn, run=run)
    assert not (tmp_path / "store").exists()


def test_a_function_that_cannot_travel_is_named_before_anything_starts(run, tmp_path):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot travel"):
        train(lambda: lock, run=run)
    assert not (tmp_path / "store").exists()


def test_a_store_that_gets_no_thread_fails_the_training_in_seconds(run, monkeypatch):
    """Its ranks and their task runs wait for it already, and tried again for a minute and a half."""
    make_store = rendezvous._tcp_store

    def fail_to_serve(*arguments, is_master, **options):
        if not is_master:
            return make_store(*arguments, is_master=False, **options)
        time.sleep(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rendezvous, "_tcp_store", fail_to_serve)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        train(lambda: None, scaling=ScalingConfig(num_workers=2), run=run, failure=NO_RESTARTS)
    assert time.monotonic() - began_s < 40


def test_a_configuration_may_hold_what_is_no_json(run):
    """A dataclass itself ended the call, and an integer beyond 64 bits made each list of flow runs an error of the server."""
    config = {"kind": RetentionPolicy, "seed": 2**127, "file": "caf\udce9"}
    result = train(lambda config: config["kind"](num_to_keep=3).num_to_keep, config, run=run)
    assert result.return_value == 3
    with get_client(sync_client=True) as client:
        (newest,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    name = f"{RetentionPolicy.__module__}:RetentionPolicy"
    assert newest.parameters["config"] == {"kind": name, "seed": str(2**127), "file": "caf\\udce9"}


def test_a_metric_may_be_named_after_a_file_whose_name_is_no_text(run):
    """The final state, and all lines that were sent with the summary, were lost, and the training had failed."""

    def train_fn():
        report({"caf\udce9\0": 0.5}, step=0)

    assert train(train_fn, run=run).metrics["caf\udce9\0"] == 0.5
    summary = "1 step, caf\\udce9\\x00 0.5, 1 attempt"
    with get_client(sync_client=True) as client:
        (newest,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        assert (newest.state.is_completed(), newest.state.message) == (True, summary)
        logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[newest.id]))
        wait_until(lambda: summary in [log.message for log in client.read_logs(logs)], "the summary among the lines")


def test_a_warning_that_names_such_metrics_is_text_that_prefect_takes(run, caplog):
    def train_fn():
        report({"caf\udce9\0": 0.5}, state={"epoch": 0})

    train(train_fn, run=run, checkpoint=CheckpointConfig(checkpoint_score_attribute="accuracy"))
    (warning,) = [record.getMessage() for record in caplog.records if "has no metric 'accuracy'" in record.message]
    assert "it has caf\\udce9\\x00. " in warning


@pytest.mark.parametrize("train_fn", [lambda: None, partial(lambda *, lr: None, lr=0.1)])
def test_a_configuration_for_a_function_without_arguments_is_refused_once(run, train_fn):
    with pytest.raises(TypeError, match=r"<lambda>\(\) takes no argument: leave config out, or let the function take it"):
        train(train_fn, {"a": 1}, run=run, failure=FailureConfig(max_failures=3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScalingConfig(num_workers=0),
        lambda: CheckpointConfig(num_to_keep=0),
        lambda: CheckpointConfig(checkpoint_score_order="up"),
        lambda: RunConfig(name="a/b"),
        lambda: RunConfig(resume="maybe"),
        lambda: FailureConfig(max_failures=-2),
        lambda: FailureConfig(retry_delay_s=-1),
        lambda: FailureConfig(retry_delay_s=float("nan")),
        lambda: FailureConfig(retry_delay_s=[1] * 51),
        lambda: FailureConfig(grace_s=float("inf")),
        lambda: ScalingConfig(workers=2),
    ],
)
def test_a_wrong_configuration_is_refused_where_it_is_written(make):
    with pytest.raises(ValueError, match="validation error"):
        make()


def test_more_ranks_than_gpus_are_refused_before_anything_starts(run, tmp_path):
    with pytest.raises(ValueError, match=r"num_workers=64 with use_gpu=True .* this machine has"):
        train("trainings:train_epochs", epochs(1), ScalingConfig(num_workers=64, use_gpu=True), run)
    assert not (tmp_path / "store").exists()


def test_a_storage_that_ranks_cannot_see_is_told(tmp_path):
    machine = re.escape(socket.gethostname())
    with pytest.raises(RuntimeError, match=rf"rank 0 on machine {machine} cannot see run 'run' in memory://"):
        train(
            "trainings:train_epochs", epochs(1), run=RunConfig(name="run", storage=f"memory://{tmp_path}"), failure=NO_RESTARTS
        )


def test_a_prune_that_fails_does_not_stop_the_training_and_the_next_one_makes_up_for_it(run, monkeypatch):
    delete = LocalStorage.delete
    failed = []

    def failing(self, keys):
        failed.append(list(keys))
        raise OSError(30, "Read-only file system")  # which no other try helps

    monkeypatch.setattr(LocalStorage, "delete", failing)
    result = train("trainings:train_epochs", epochs(5), run=run, checkpoint=CheckpointConfig(num_to_keep=1))
    assert failed
    assert result.metrics["epoch"] == 4
    assert len(CheckpointStore.open(run.storage, "run").list()) == 5
    monkeypatch.setattr(LocalStorage, "delete", delete)
    train("trainings:train_epochs", epochs(6), run=run, checkpoint=CheckpointConfig(num_to_keep=1))
    assert [manifest.metrics["epoch"] for manifest in CheckpointStore.open(run.storage, "run").list()] == [5]


def test_where_nothing_may_be_replaced_or_deleted_a_run_is_resumed_and_each_attempt_tells_it_once(
    run, tmp_path, monkeypatch, caplog
):
    """As at Google for who may create objects alone, and at Azure under a policy of immutability."""
    put, delete = LocalStorage.put_bytes, LocalStorage.delete
    refused = set()

    def refuse(storage, keys):
        if there := {key for key in keys if storage.local_path(key).exists()}:
            refused.update(key.split("/")[1] for key in there)
            raise PermissionError("the blob is immutable due to a policy")

    def put_new(storage, key, data):
        refuse(storage, [key])
        put(storage, key, data)

    def delete_nothing(storage, keys):
        keys = list(keys)
        refuse(storage, keys)
        delete(storage, keys)

    monkeypatch.setattr(LocalStorage, "put_bytes", put_new)
    monkeypatch.setattr(LocalStorage, "delete", delete_nothing)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/x.py").touch()
    run = run.model_copy(update={"working_dir": str(tmp_path / "code")})
    for number in (3, 6):
        result = train("trainings:train_epochs", epochs(number), run=run, checkpoint=CheckpointConfig(num_to_keep=1))
    assert result.return_value == {"begun": 3, "attempt": 2}
    assert len(CheckpointStore.open(run.storage, "run").list()) == 6
    assert refused >= {"attempts", "code", "latest.json", "manifests"}
    told = {record.getMessage(): None for record in caplog.records if "the claim of attempt" in record.getMessage()}
    assert list(told) == [
        "the claim of attempt 2 on run 'run' stays as it was stored at first: the blob is immutable due to a policy"
    ]
    assert caplog.text.count("the hint to the latest checkpoint is not written any more by this attempt") == 2


def test_a_journal_that_cannot_be_written_costs_a_warning_not_the_training(run, monkeypatch, caplog):
    def failing(self, checkpoint_id):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointStore, "hint_latest", failing)
    assert train("trainings:train_epochs", epochs(2), run=run).checkpoint.metrics["epoch"] == 1
    assert "the hint to the latest checkpoint could not be written" in caplog.text


def test_a_storage_that_cannot_be_written_is_told_before_any_rank_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        train("trainings:train_epochs", epochs(1), run=RunConfig(name="run", storage=str(tmp_path / "file")))


def test_what_a_function_has_left_for_the_end_of_its_process_is_done(run, tmp_path):
    """As an upload in a thread, and W&B's last data."""
    assert train("trainings:leave_something_to_do", {"folder": str(tmp_path)}, run=run).completed
    assert (tmp_path / "thread").exists()
    assert (tmp_path / "atexit").exists()


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_finished_training_completes_though_its_process_group_does_not_end(run, tmp_path, how):
    result = train("trainings:cannot_leave_its_group", {"how": how, "folder": str(tmp_path)}, TWO, run, failure=NO_RESTARTS)
    assert (result.completed, result.return_value) == (True, {"attempt": 1})
    assert (tmp_path / "left-1").exists()
    assert (tmp_path / "atexit").exists()


@pytest.mark.parametrize("how", ["fork", "closed", "endless", "unloadable"])
def test_a_finished_training_completes_whatever_it_returns(run, how):
    result = train("trainings:end_oddly", {"how": how}, run=run)
    assert result.completed
    is_kept = how in ("fork", "closed")
    assert (result.return_value == how) is is_kept
    stored = Result.from_storage(run.storage, "run")
    assert stored.return_value == (how if is_kept else None)
    assert sum(path.stat().st_size for path in Path(run.storage).rglob("*.json")) < 100_000


@pytest.mark.parametrize("how", ENDS)
def test_a_training_that_returns_how_something_has_ended_has_completed(run, how):
    result = train("trainings:end_oddly", {"how": how}, run=run)
    assert (result.completed, result.error, result.attempts) == (True, None, 1)
    assert repr(result.return_value) == repr(returned_end(how))
    stored = Result.from_storage(run.storage, "run")
    assert stored.return_value == (result.return_value if how == "half" else None)
    assert train("trainings:end_oddly", {"how": how}, run=run).completed, "as of each start"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("surrogate", r"ValueError: a lone \\ud800 surrogate"),
        ("enormous", r"ValueError: z+ \[199\d+ characters left out\] z+"),
        ("base exception", "Interrupted"),
        ("no repr", "NoReprError: from the training"),
    ],
)
def test_an_odd_exception_is_the_users_and_told_with_its_traceback(run, how, message):
    with pytest.raises(RankFailedError, match=message):
        train("trainings:end_oddly", {"how": how}, run=run)
    told = Result.from_storage(run.storage, "run")
    assert told.attempts == 1
    assert "in end_oddly" in str(told.error)
    assert len(str(told.error)) < 200_000
    with pytest.raises(RankFailedError, match=message):
        train("trainings:end_oddly", {"how": how}, run=run, failure=FailureConfig(max_failures=1))
    assert Result.from_storage(run.storage, "run").attempts == 3, "each counts as any other failure"


def test_a_function_that_would_not_run_is_told_once(run):
    with pytest.raises(TypeError, match="never_awaited is async"):
        train("trainings:never_awaited", run=run, failure=FailureConfig(max_failures=3))
    assert Result.from_storage(run.storage, "run").attempts == 1


def test_a_backend_that_this_torch_lacks_is_told_once(run):
    with pytest.raises(ValueError, match="torch here has no backend 'mpi'"):
        train("trainings:train_epochs", epochs(1), ScalingConfig(backend="mpi"), run)
    assert Result.from_storage(run.storage, "run").attempts == 1


def test_a_report_that_one_rank_got_wrong_is_its_failure_not_its_peers(run):
    def wrong_on_rank_1():
        report({"loss": 1 if get_context().world_rank == 0 else [1]})

    with pytest.raises(ValueError, match="metric 'loss' is of type list"):
        train(wrong_on_rank_1, None, TWO, run)
    assert Result.from_storage(run.storage, "run").attempts == 1


def test_a_trial_leaves_the_page_of_the_storages_runs_to_its_sweep(run, monkeypatch):
    """With `trials_on`, each of ten thousand trials read all runs at its end, on its machine, for a page that has no trials."""
    refreshed = []
    monkeypatch.setattr("prefect_torch.flows.training.refresh_runs_page", refreshed.append)
    for name in ("s", "s/trial-0000-0123abcd"):
        train("trainings:tell_environment", run=run.model_copy(update={"name": name}))
        assert len(refreshed) == 1


def test_a_flow_run_shows_its_training_by_name_tag_and_message_and_where_to_look(run, caplog):
    by_epoch = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="epoch", checkpoint_score_order="min")
    state = train("trainings:train_epochs", epochs(3), run=run, checkpoint=by_epoch, return_state=True)
    assert state.message == "3 steps, epoch 0 (best at 0), 1 attempt"
    result = state.result()
    assert [manifest.step for manifest in CheckpointStore.open(run.storage, "run").list()] == [0, 1, 2]
    assert result.return_value is not None
    place = f"checkpoints of run 'run' are in {result.path}; see: prefect-torch show {run.storage} run"
    told = [record.message for record in caplog.records if place in record.message]
    assert told == [f"attempt 1: starting from the beginning; {place}", f"{state.message}; {place}"]
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(state.state_details.flow_run_id)
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [flow_run.id]}))
    assert flow_run.name.startswith("run-")
    assert flow_run.tags == ["run:run"]
    (page,) = [it.data for it in artifacts if it.key.endswith("-runs")]
    assert f"| [run]({page_url('flow-run', flow_run.id)}) | completed | 2 | epoch 0 |" in page
