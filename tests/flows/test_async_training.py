"""Trainings in an event loop: beside other work, as subflows, in a task, two at once, and cancelled."""

import asyncio
import gc
import math
import os
import re
import sys
import threading
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.runtime import flow_run
from prefect_torch.ckpt import CheckpointStore, get_checkpoint, get_context, report
from prefect_torch.flows import FailureConfig, Result, RunConfig, ScalingConfig, async_training, atrain, prune, train
from prefect_torch.flows.calls.awaited_call import check_not_awaited
from prefect_torch.flows.run_names import name_run, numbered_calls
from prefect_torch.tasks.prefect_api import outage
from prefect_torch.tasks.training.restarts import Restarts

# Prefect's client of an async flow leaves its socket to the garbage collector when the loop ends (tried with 3.8.8).
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning", "ignore:unclosed"
)


PAGE = Path(__file__).parents[2] / "docs/how-to/own-flows.md"
TWO = ScalingConfig(num_workers=2)


async def ticks_during(work):
    """Return what `work` returns, and how often the loop came round to something else meanwhile."""
    number, pending = 0, asyncio.ensure_future(work)
    while not pending.done():
        await asyncio.wait([pending], timeout=0.01)
        number += 1
    return await pending, number


def test_two_trainings_of_an_async_flow_run_at_once_as_its_subflows_one_of_them_in_a_task(tmp_path, caplog):
    @task
    async def in_a_task():
        return await atrain("trainings:train_epochs", {"epochs": 2}, TWO, RunConfig(name="b", storage=str(tmp_path)))

    @flow
    async def parent():
        one = atrain("trainings:train_epochs", {"epochs": 2}, TWO, RunConfig(name="a", storage=str(tmp_path)))
        return flow_run.id, await ticks_during(asyncio.gather(one, in_a_task()))

    parent_id, (results, ticks) = asyncio.run(parent())
    gc.collect()  # the socket, before another test
    assert [result.path for result in results] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [result.return_value for result in results] == [{"begun": 0, "attempt": 1}] * 2
    assert ticks > 10  # a loop that is blocked comes round once
    of_parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(parent_id)]))
    with get_client(sync_client=True) as client:
        subflows = client.read_flow_runs(flow_run_filter=of_parent)
    assert [run.state_name for run in subflows] == ["Completed"] * 2
    begun = {(record.name, record.flow_run_id) for record in caplog.records if record.getMessage().startswith("attempt 1: ")}
    assert begun == {("prefect.flow_runs", str(run.id)) for run in subflows}, "each has its own log, also the one in a task"


@pytest.mark.parametrize("place", ["flow", "task", "flow in a task"])
def test_trainings_that_an_event_loop_begins_together_keep_their_names_in_a_retry(monkeypatch, place):
    """Their threads reach Prefect in any order: each would have continued from the checkpoints of another one."""
    tries = []

    @flow
    def name_itself():
        with get_client(sync_client=True) as client:
            return name_run(client, client.read_flow_run(UUID(flow_run.id)), numbered_calls())

    async def compare():
        arrived, order = [threading.Event() for _ in range(3)], [2, 1, 0] if tries else [0, 1, 2]

        def train_in_turn(_, config, *__):
            turn = order.index(config["number"])
            assert turn == 0 or arrived[turn - 1].wait(60)
            name = name_itself()
            arrived[turn].set()
            return name

        monkeypatch.setattr(async_training, "train", train_in_turn)
        tries.append(await asyncio.gather(*(atrain("unused", {"number": number}) for number in range(3))))
        if len(tries) == 1:
            raise ValueError("once more")

    async def call():
        await flow(compare)()

    @flow
    async def pipeline():
        await task(retries=1)(compare if place == "task" else call)()

    asyncio.run((flow(retries=1)(compare) if place == "flow" else pipeline)())
    gc.collect()  # the sockets, before another test
    assert tries[0] == tries[1]
    assert len(set(tries[0])) == 3


async def cancelled_once(is_due, *args, **options):
    """Train, cancel the await once `is_due` returns true, and wait until it ends."""
    training = asyncio.ensure_future(atrain(*args, **options))
    while not is_due():
        assert not training.done(), training.result()
        await asyncio.sleep(0.05)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training


def test_a_cancelled_await_ends_after_a_last_checkpoint_and_the_next_one_continues(tmp_path):
    def train_until_told():
        step = int(get_checkpoint().metrics["step"]) + 1 if get_checkpoint() else 0
        while not get_context().should_checkpoint():
            report({"step": step}, state={"step": step})
            step += 1
        report({"step": step}, state={"step": step})

    run = RunConfig(name="run", storage=str(tmp_path))
    store = CheckpointStore.open(str(tmp_path), "run")

    asyncio.run(cancelled_once(store.list, train_until_told, run=run))
    last = store.latest()
    result = Result.from_storage(str(tmp_path), "run")
    assert f"terminated (CancelledError); work is safe up to step {last.step}" in str(result.error)
    begun = train(step_of_the_checkpoint, run=run).return_value
    assert begun == last.metrics["step"]


def test_a_cancelled_await_ends_during_the_delay_of_a_restart(tmp_path, monkeypatch, caplog):
    waits, count_failure = threading.Event(), Restarts.count_failure

    def count(self, kind):
        waits.set()
        return count_failure(self, kind)

    monkeypatch.setattr(Restarts, "count_failure", count)
    run, failure = RunConfig(name="run", storage=str(tmp_path)), FailureConfig(max_failures=1, retry_delay_s=3600)

    asyncio.run(cancelled_once(waits.is_set, fail, run=run, failure=failure))
    assert Result.from_storage(str(tmp_path), "run").attempts == 1
    assert "restart 1 of 1 (max_failures); the training starts again in 3600 s" in caplog.text


@pytest.mark.parametrize("just_now_s", [0.0, math.inf])
def test_a_cancelled_await_waits_no_longer_for_prefects_api(tmp_path, monkeypatch, just_now_s):
    """Nor does it when the ranks took so short a time that only the flow run itself looks whether the API answers."""
    waits = threading.Event()
    monkeypatch.setattr(outage, "_JUST_NOW_S", just_now_s)
    monkeypatch.setattr(outage, "_outage", lambda: waits.set() or ConnectionRefusedError(111, "refused"))

    run = RunConfig(storage=str(tmp_path))
    asyncio.run(cancelled_once(waits.is_set, "trainings:train_epochs", {"epochs": 1}, run=run))


def fail():
    raise ValueError("on purpose")


def test_a_cancellation_after_the_last_report_reaches_the_await(monkeypatch):
    """When the ranks have ended, nothing heeds it: the flow waits for Prefect's API, reads the result and returns it."""
    may_end = threading.Event()

    def ends_soon(*_):
        assert may_end.wait(30)
        return "a result"

    monkeypatch.setattr("prefect_torch.flows.async_training.train", ends_soon)

    async def is_late():
        async with asyncio.timeout(0.1) as limit:
            asyncio.get_running_loop().call_at(limit.when() + 0.01, may_end.set)
            return await atrain("trainings:train_epochs")

    if sys.version_info >= (3, 11):
        with pytest.raises(TimeoutError):
            asyncio.run(is_late())
        may_end.clear()

    async def cancelled():
        training = asyncio.ensure_future(atrain("trainings:train_epochs"))
        await asyncio.sleep(0.1)
        training.cancel()
        may_end.set()
        await training

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_any_number_of_trainings_run_at_once_and_leave_the_threads_of_the_event_loop_free(monkeypatch):
    """Which are few: `min(32, cpu_count + 4)`."""
    num_trainings = min(32, (os.cpu_count() or 1) + 4) + 1
    all_run = threading.Barrier(num_trainings + 1)

    def runs(*_):
        all_run.wait(30)
        return "a result"

    monkeypatch.setattr("prefect_torch.flows.async_training.train", runs)

    async def gathers():
        trainings = asyncio.gather(*(atrain("trainings:train_epochs") for _ in range(num_trainings)))
        await asyncio.to_thread(all_run.wait, 30)
        return await trainings

    assert asyncio.run(gathers()) == ["a result"] * num_trainings


def step_of_the_checkpoint():
    return get_checkpoint().metrics["step"]


def test_what_a_training_raises_reaches_the_await(tmp_path):
    with pytest.raises(ValueError, match="boom from the training"):
        asyncio.run(
            atrain(
                "trainings:train_epochs",
                {"epochs": 1, "how": "raise", "at": 0, "rank": 0},
                run=RunConfig(name="run", storage=str(tmp_path)),
            )
        )


def test_a_function_that_has_exhausted_an_iterator_fails_the_await(monkeypatch):
    """An asyncio.Future refuses a StopIteration, and stays pending."""
    monkeypatch.setattr("prefect_torch.flows.async_training.train", lambda *_: next(iter(())))

    async def waits():
        training = asyncio.ensure_future(atrain("trainings:train_epochs"))
        (ended,), _ = await asyncio.wait([training], timeout=30)
        return ended.exception()

    loop = asyncio.new_event_loop()  # not asyncio.run, which would wait for a training that never ends
    try:
        error = loop.run_until_complete(waits())
    finally:
        loop.close()
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)


def test_an_await_of_a_blocking_flow_is_refused_before_it_begins(tmp_path):
    run = RunConfig(name="run", storage=str(tmp_path))

    async def by_position():
        await train("trainings:train_epochs", {"epochs": 1}, None, run)

    async def by_name():
        arguments = {"config": {"epochs": 1}, "run": run}
        return [await train(train_fn="trainings:train_epochs", **arguments)]

    async def a_prune():
        await prune(str(tmp_path))

    refused = "blocks until it has ended and returns nothing to await: call it without `await`"
    for call in (by_position, by_name):
        with pytest.raises(TypeError, match=rf"^train\(\) {refused}; `await atrain\(...\)` takes the same arguments"):
            asyncio.run(call())
    with pytest.raises(TypeError, match=rf"^prune\(\) {refused}$"):
        asyncio.run(a_prune())
    assert not list(tmp_path.iterdir())


def test_a_blocking_call_of_a_coroutine_is_let_through():
    async def calls():
        check_not_awaited(sys._getframe(), "train")
        check_not_awaited(sys._getframe(), name="train")
        await asyncio.sleep(0)

    asyncio.run(calls())


def test_the_async_flow_of_the_page_about_own_flows_trains_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = (it for it in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "async def" in it)
    named = {"__name__": "page"}
    exec(program, named)
    asyncio.run(named["compare"]())
    gc.collect()
    paths = [str(tmp_path / "checkpoints" / name) for name in ("lr-0.1", "lr-0.01")]
    assert [line for line in capsys.readouterr().out.splitlines() if line in paths] == paths
    assert all(Result.from_storage("./checkpoints", Path(path).name).completed for path in paths)
