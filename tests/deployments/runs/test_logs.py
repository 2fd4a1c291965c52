"""`logs`: files beside a run, else what Prefect's API has."""

from datetime import datetime, timezone
from uuid import uuid4

from prefect import flow, get_run_logger, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import LogCreate
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import rows, wait_until
from stored_runs import store_run

FAILED = {6: "ValueError: no labels", 7: "KeyError: 'labels'"}  # by rank


def test_files_beside_the_run_are_printed_for_the_newest_attempt(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    for key, text in {"000002/rank-0.log": "a:\n    b\x1b[2J", "000002/rank-1.log": "c", "000001/rank-0.log": "old"}.items():
        store.storage.put_bytes(f"run/logs/{key}", text.encode())
    assert command("logs", local, "run") == (0, "rank-0: a:\nrank-0:     b [2J\nrank-1: c\n", "")
    assert command("logs", local, "run", "--rank", "1")[1] == "rank-1: c\n"
    code, out, err = command("logs", local, "run", "--rank", "9")
    assert (code, out, err) == (1, "", "prefect-torch: no log of rank 9 lies beside run 'run'; there are rank-0, rank-1\n")
    assert command("logs", local, "run", "--attempt", "1")[1] == "rank-0: old\n"
    code, _, err = command("logs", local, "run", "--attempt", "7")
    assert (code, err) == (1, "prefect-torch: run 'run' has no attempt 7; it has 1, 2\n")


def test_a_run_that_no_flow_run_has_led_has_a_log_where_its_training_stores_one(local, command, tmp_path):
    store_run(local, tmp_path / "scratch")
    code, out, err = command("logs", local, "run")
    assert (code, out) == (1, "")
    assert "attempt 2 of run 'run' was led by no flow run, and no log lies beside the run: with log_ranks or log_level" in err


def test_without_files_and_an_api_it_says_what_to_set(local, command, tmp_path):
    flow_run_id = str(uuid4())
    store_run(local, tmp_path / "scratch", flow_run_id=flow_run_id)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code, _, err = command("logs", local, "run")
    assert (code, err) == (
        1,
        (
            f"prefect-torch: the log of flow run {flow_run_id} is in Prefect: set PREFECT_API_URL to the API that ran it, or, "
            "if the flow started a server of its own, to that of `prefect server start` on its machine\n"
        ),
    )


def test_the_lines_of_a_flow_run_and_its_ranks_come_from_the_api(local, command, tmp_path, prefect_server):
    @task(task_run_name="rank-{rank}")
    def train_rank(rank):
        return str(task_run_id())

    @task(task_run_name="node-0: ranks 4-7")
    def train_node():
        return str(task_run_id())

    @task(task_run_name="train-run")
    def train_workers():
        return str(task_run_id())

    def task_run_id():
        from prefect.context import TaskRunContext  # noqa: PLC0415

        return TaskRunContext.get().task_run.id

    @flow
    def training():
        get_run_logger()
        from prefect.context import FlowRunContext  # noqa: PLC0415

        return str(FlowRunContext.get().flow_run.id), [*map(train_rank, range(2)), train_node(), train_workers()]

    flow_run_id, ranks = training()
    store_run(local, tmp_path / "scratch", flow_run_id=flow_run_id)
    numbered = [(ranks[1], f"line {number}") for number in range(250)]
    lines = [(None, "begins"), (ranks[0], "zero:\n  at  x"), (ranks[1], "one"), *numbered]
    lines.insert(1, (ranks[2], "rank 4: four"))
    of_state = "Finished in state Failed({!r})"  # with other quotes around an apostrophe
    failed = [(ranks[3], "rank 0 of attempt 1 failed:\n  here")]
    failed += [(ranks[2], of_state.format(f"rank {rank} of attempt 1 failed: {error}")) for rank, error in FAILED.items()]
    lines += failed
    ours = {"id": {"any_": [flow_run_id]}}
    wait_until(lambda: len(rows(prefect_server.api, "task_runs", flow_runs=ours)) == len(ranks), "task runs are stored")
    with get_client(sync_client=True) as client:
        client.create_logs([
            LogCreate(
                name="x",
                level=40 if "failed" in message else 20,
                message=message,
                timestamp=datetime(2030, 1, 1, 1, number // 60, number % 60, tzinfo=timezone.utc),
                flow_run_id=flow_run_id,
                task_run_id=task_run_id,
            )
            for number, (task_run_id, message) in enumerate(lines)
        ])  # fmt: skip
    code, out, err = command("logs", local, "run")
    assert (code, err) == (0, "")
    node = "2030-01-01T01:00:01Z INFO node-0: ranks 4-7: rank 4: four"
    of_ranks = "2030-01-01T01:00:02Z INFO rank-0: zero:\n  at  x\n2030-01-01T01:00:03Z INFO rank-1: one\n"
    assert f"2030-01-01T01:00:00Z INFO flow: begins\n{node}\n{of_ranks}" in out
    assert "2030-01-01T01:04:13Z INFO rank-1: line 249\n" in out
    of_first = command("logs", local, "run", "--rank", "0")[1].splitlines()
    assert of_first[-4:-2] == ["2030-01-01T01:00:02Z INFO rank-0: zero:", "  at  x"]
    assert of_first[-2:] == ["2030-01-01T01:04:14Z ERROR train-run: rank 0 of attempt 1 failed:", "  here"]
    for rank, error in FAILED.items():
        said = command("logs", local, "run", "--rank", str(rank))[1].splitlines()
        assert said[-1].endswith(f"node-0: ranks 4-7: {of_state.format(f'rank {rank} of attempt 1 failed: {error}')}")
    assert command("logs", local, "run", "--rank", "4")[1].splitlines()[-1] == node
    code, _, err = command("logs", local, "run", "--rank", "5")
    assert (code, err) == (1, f"Prefect has no log lines of rank 5 in flow run {flow_run_id}\n")


def test_a_log_costs_a_request_per_page_of_lines_and_one_for_the_names_in_it(
    local, command, tmp_path, prefect_server, monkeypatch
):
    """A training of months has a task run for each of its thousands of prunes; 450 lines of one time fill three pages."""
    asked, read_task_runs, read_logs = [], SyncPrefectClient.read_task_runs, SyncPrefectClient.read_logs

    @task(task_run_name="{name}")
    def work(name):
        from prefect.context import TaskRunContext  # noqa: PLC0415

        return TaskRunContext.get().task_run.id

    @flow
    def training():
        from prefect.context import FlowRunContext  # noqa: PLC0415

        return FlowRunContext.get().flow_run.id, work("rank-0"), [work(f"prune-{number}") for number in range(3)]

    with disable_run_logger():
        flow_run_id, rank, prunes = training()
    store_run(local, tmp_path / "scratch", flow_run_id=str(flow_run_id))
    ours = {"id": {"any_": [str(flow_run_id)]}}
    wait_until(lambda: len(rows(prefect_server.api, "task_runs", flow_runs=ours)) == 1 + len(prunes), "task runs are stored")
    lines = [f"line {number}" for number in range(700)]
    times = [datetime(2030, 1, 1, 1, 0, min(number // 100, 2), tzinfo=timezone.utc) for number in range(len(lines))]
    with get_client(sync_client=True) as client:
        client.create_logs([
            LogCreate(name="x", level=20, message=message, timestamp=at, flow_run_id=flow_run_id, task_run_id=rank)
            for message, at in zip(lines, times, strict=True)
        ])  # fmt: skip
    monkeypatch.setattr(
        SyncPrefectClient, "read_logs", lambda *args, **kwargs: (asked.append(None), read_logs(*args, **kwargs))[1]
    )

    def read_names(*args, task_run_filter, **kwargs):
        asked.append(task_run_filter.id.any_)
        return read_task_runs(*args, task_run_filter=task_run_filter, **kwargs)

    monkeypatch.setattr(SyncPrefectClient, "read_task_runs", read_names)
    printed = command("logs", local, "run")[1].splitlines()
    ours = [line.partition("rank-0: ")[2] for line in printed if line.startswith("2030")]
    assert sorted(ours) == sorted(lines)
    assert asked.count([rank]) == 1
    assert len(asked) <= 7


def test_an_unknown_flow_run_is_one_sentence(local, command, tmp_path, prefect_server):
    flow_run_id = str(uuid4())
    store_run(local, tmp_path / "scratch", flow_run_id=flow_run_id)
    code, _, err = command("logs", local, "run")
    assert (code, f"{prefect_server.api} has no flow run {flow_run_id}" in err) == (1, True)
