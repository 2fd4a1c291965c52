"""Prefect's API is away, or slow, in the middle of trainings: they go on, and all is told when it is back."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_programs import Popen
from http_proxy import Response, proxied
from prefect import flow, get_run_logger
from prefect.logging import disable_run_logger
from prefect.logging.handlers import APILogHandler, APILogWorker
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect_servers import PrefectServer, Proxy, postgres, postgres_program, rows, wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import RunConfig, SearchConfig, grid, sweep, train
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.prefect_api import outage as api_outage
from prefect_torch.tasks.prefect_api.embedded_server.keeping import ServerKeeper
from prefect_torch.tasks.prefect_api.outage import is_outage, outlast_api_outages

SUPPORT = Path(__file__).parents[1] / "support"
AWAY_S = float(os.environ.get("PREFECT_TORCH_TEST_AWAY_S", "15"))
SLOW_S = 5.0
FLOW_RUN = "0f2b7a9e-6d59-4a0b-9a53-0c7b3a1d9f11"
FINAL = {"Completed", "Failed", "Cancelled", "Crashed"}
TICK = re.compile(r"(Task run 'rank-\d' - )?(attempt \d rank \d tick \d+)")

pytestmark = pytest.mark.timeout(400 + 2 * AWAY_S)


class Training:
    """A training in a process of its own, that talks to the API at `api`."""

    def __init__(self, folder: Path, api: str, *, ranks: int = 2) -> None:
        folder.mkdir()
        self.storage = str(folder / "store")
        self.end = folder / "end"
        self._output = folder / "output.txt"
        config = {"end": str(self.end), "pause_s": 0.5, "ranks": ranks}
        with self._output.open("wb") as output:
            self.process = Popen(
                [sys.executable, str(SUPPORT / "talking.py"), self.storage, json.dumps(config)],
                env={**os.environ, "PREFECT_API_URL": api, "PYTHONPATH": str(SUPPORT)},
                stdout=output,
                stderr=output,
            )

    def output(self) -> str:
        return self._output.read_text()

    def newest(self) -> tuple[int, int]:
        """Return the attempt and the step of the newest checkpoint."""
        ids = [path.stem.split("-") for path in Path(self.storage, "run", "manifests").glob("*.json")]
        return max(((int(attempt), int(step)) for attempt, step, _ in ids), default=(0, -1))

    def wait_for(self, attempt: int, step: int) -> None:
        def has_come() -> bool:
            assert self.process.poll() is None, self.output()[-4000:]
            return self.newest() >= (attempt, step)

        wait_until(has_come, f"a checkpoint of attempt {attempt}, step {step}")

    def wait_for_more(self) -> None:
        attempt, step = self.newest()
        self.wait_for(attempt, step + 3)

    def kill_rank(self, rank: int) -> None:
        os.kill(int(re.findall(rf"Task run 'rank-{rank}' - pid (\d+)", self.output())[-1]), signal.SIGKILL)

    def state(self, api: str) -> str:
        """Return the name of the flow run's state."""
        name = re.findall(r"Flow run '(\S+)' - attempt 1: ", self.output())[0]
        (found,) = rows(api, "flow_runs", flow_runs={"name": {"any_": [name]}})
        return found["state_name"]

    def finish(self) -> str:
        self.process.wait(300)
        return self.output()


@dataclass(frozen=True)
class Outage:
    """What was seen of a training whose server was away for a while, and the server, which is back."""

    server: PrefectServer
    training: Training
    gone_at: tuple[int, int]
    back_at: tuple[int, int]
    said_meanwhile: set[str]


def live_through(server: PrefectServer, how: signal.Signals, folder: Path) -> Outage:
    """End the server in the middle of a training, kill a rank, and start the server again."""
    server.start()
    training = Training(folder, server.api)
    training.wait_for(1, 3)
    server.stop(how)
    back_s = time.monotonic() + AWAY_S
    gone_at, said_before = training.newest(), ticks(training.output())
    training.wait_for_more()
    training.kill_rank(1)
    training.wait_for(2, 0)
    while time.monotonic() < back_s:
        training.wait_for_more()
    back_at, said = training.newest(), ticks(training.output()) - said_before
    server.start()
    training.wait_for_more()
    training.end.touch()
    training.finish()
    return Outage(server, training, gone_at, back_at, said)


def live_slowly(server_port: int, folder: Path) -> float:
    """Slow the API down in the middle of a training, and return how long its slowest report took."""
    proxy = Proxy(server_port)
    proxy.accept()
    training = Training(folder, proxy.api, ranks=1)
    training.wait_for(1, 3)
    proxy.delay_s = SLOW_S
    wait_until(lambda: proxy.num_late >= 5, "chunks that come late")
    training.wait_for_more()
    proxy.delay_s = 0.0
    training.end.touch()
    (slowest_s,) = re.findall(r'"slowest_s": ([\d.]+)', training.finish())
    proxy.refuse()
    return float(slowest_s)


def ticks(text: str) -> set[str]:
    return {match[1] for match in TICK.findall(text)}


def server_port() -> int:
    """Return the port of the server that all tests of this folder use."""
    return int(PREFECT_API_URL.value().split(":")[2].partition("/")[0])


CASES = ["sqlite-SIGTERM", "postgresql-SIGKILL"]
if postgres_program("initdb") is None:
    CASES.append("sqlite-SIGKILL")  # in place of the one that is skipped


@pytest.fixture(scope="module", autouse=True)
def lived(tmp_path_factory) -> Iterator[dict[str, "Future[Any]"]]:
    """All that takes long, at the same time, since most of it is waiting; tests that need it come last."""
    folder = tmp_path_factory.mktemp("outages")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        futures: dict[str, Future[Any]] = {"slow": pool.submit(live_slowly, server_port(), folder / "slow")}
        for case in CASES:
            database, how = case.split("-")
            if database == "postgresql" and postgres_program("initdb") is None:
                continue
            url = stack.enter_context(postgres()) if database == "postgresql" else None
            server = PrefectServer(folder / f"{case}-home", url)
            stack.callback(server.stop)
            futures[case] = pool.submit(live_through, server, signal.Signals[how], folder / case)
        yield futures


@pytest.fixture(params=CASES)
def outage(request, lived) -> Outage:
    if request.param not in lived:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return lived[request.param].result()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Between this test and the server of all."""
    between = Proxy(server_port())
    between.accept()
    yield between
    between.refuse()


@pytest.mark.parametrize("raises", [False, True])
def test_an_end_while_the_api_refuses_is_told_when_it_is_back(proxy, raises):
    """One retry of Prefect's own ends after 2.4 s: what nobody holds back is lost, but not for an answer of a busy SQLite.

    That SQLite may be busy twice when the flow run is created: Prefect's usual number of retries applies to that.
    """
    told = []
    few_retries = ExitStack()

    @flow
    def end():
        few_retries.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}))
        with outlast_api_outages():
            proxy.refuse()
            threading.Timer(AWAY_S / 3, proxy.accept).start()
            told.append(flow_run.id)
            if raises:
                raise ValueError("boom")

    with temporary_settings({PREFECT_API_URL: proxy.api}), few_retries:
        assert end(return_state=True).name == ("Failed" if raises else "Completed")
        APILogHandler().flush()  # and whatever else Prefect would go on sending through the proxy
    (found,) = rows(proxy.api, "flow_runs", flow_runs={"id": {"any_": told}})
    assert found["state_name"] == ("Failed" if raises else "Completed")


def test_an_end_while_a_proxy_answers_with_a_page_of_its_own_is_told_afterwards():
    """Its status is 200, and Prefect's client raises a JSONDecodeError."""
    pages = [Response(200, b"<html>maintenance</html>", {})] * 2

    def change(method: str, path: str, response: Response) -> Response:
        return pages.pop() if method == "GET" and path.startswith("/api/flow_runs/") and pages else response

    @flow
    def end():
        with outlast_api_outages():
            proxy.change = change
        return flow_run.id

    with proxied(f"http://127.0.0.1:{server_port()}") as proxy:
        with temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
            assert end()
            APILogHandler().flush()
        assert pages == []


def climb(storage):
    return train("sweep_trainings:climb", {"lr": 0.3, "epochs": 1}, run=RunConfig(storage=storage))


def climb_in_a_sweep(storage):
    search = SearchConfig(metric="loss")
    return sweep("sweep_trainings:climb", {"lr": grid([0.3])}, {"epochs": 1}, search, run=RunConfig(storage=storage))


@pytest.mark.parametrize("call", [climb, climb_in_a_sweep])
def test_a_server_without_its_database_as_a_flow_run_begins_does_not_end_it(tmp_path, call):
    """Prefect's own client does not repeat a request that has status 500, and nothing restarts a flow run that Failed."""
    failed = []

    def change(method: str, path: str, response: Response) -> Response:
        is_within = bool(failed) or path.endswith("/labels")  # before, Prefect's engine changes the name
        if method != "PATCH" or not is_within or path in failed:
            return response
        failed.append(path)
        return Response(500, b"{}", {"Retry-After": "0.1"})

    with proxied(f"http://127.0.0.1:{server_port()}") as proxy:
        proxy.change = change
        with temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
            assert call(tmp_path)
            APILogHandler().flush()
    assert [path.endswith("/labels") for path in failed][:2] == [True, False]


def test_an_embedded_server_is_kept_running_until_nothing_but_the_final_state_is_left(tmp_path, monkeypatch):
    """One that died while the page was made stayed away: a ConnectError, and Prefect did not let the process end."""
    keepers = []
    refresh = "prefect_torch.flows.training.refresh_runs_page"
    monkeypatch.setattr(refresh, lambda _: keepers.append(api_outage._keeper.get(None)))
    train("sweep_trainings:climb", {"lr": 0.3, "epochs": 1}, run=RunConfig(storage=tmp_path))
    (keeper,) = keepers
    assert keeper is not None


def test_only_an_inner_flow_run_that_has_just_begun_does_not_ask_whether_the_api_answers(monkeypatch):
    asked = []
    monkeypatch.setattr(api_outage, "_outage", lambda: asked.append(flow_run.id))
    monkeypatch.setattr(api_outage, "_JUST_NOW_S", 60.0)

    @flow
    def inner(lasts_s):
        with outlast_api_outages():
            time.sleep(lasts_s)  # a training
        return flow_run.id

    @flow
    def outer():
        with outlast_api_outages():
            inner(0.0)
            assert asked == []
            monkeypatch.setattr(api_outage, "_JUST_NOW_S", 0.1)
            slow = inner(0.1)
            assert asked == [slow]
        return flow_run.id

    assert outer() == asked[-1]
    assert len(asked) == 2


@pytest.mark.parametrize("own", [None, 2])
def test_lines_are_tried_for_minutes_unless_the_user_says_otherwise(monkeypatch, own):
    tries = []
    handle = APILogWorker._handle_batch

    async def record(self, items):
        tries.extend(PREFECT_CLIENT_MAX_RETRIES.value() for item in items if "from the body" in str(item))
        await handle(self, items)

    monkeypatch.setattr(APILogWorker, "_handle_batch", record)

    @flow
    def say_something():
        get_run_logger().info("before the body")
        context = copy_context()  # of a thread that has begun before
        with outlast_api_outages():
            context.run(get_run_logger().info, "from the body")
            get_run_logger().info("from the body")
        APILogWorker.instance().drain()

    with temporary_settings({} if own is None else {PREFECT_CLIENT_MAX_RETRIES: own}):
        say_something()
    assert tries == [7 if own is None else 2] * 2


def test_lines_are_sent_again_to_a_server_that_lost_its_database_or_a_proxy_that_lost_its_server():
    answers = [Response(500, b"{}", {"Retry-After": "0.1"}), Response(504, b"{}", {"Retry-After": "0.1"})]

    def change(method: str, path: str, response: Response) -> Response:
        return answers.pop(0) if (method, path) == ("POST", "/api/logs/") and answers else response

    @flow
    def say_something():
        with outlast_api_outages():
            proxy.change = change
            get_run_logger().info("sent three times")
            APILogWorker.instance().drain()
        return flow_run.id

    with proxied(f"http://127.0.0.1:{server_port()}") as proxy:
        with temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
            told = say_something()
            APILogHandler().flush()
        assert answers == []
        assert "POST /api/logs/" in proxy.requests
    lines = rows(f"http://127.0.0.1:{server_port()}/api", "logs", logs={"flow_run_id": {"any_": [told]}})
    assert [row["message"] for row in lines].count("sent three times") == 3, "the proxy has passed on what it says was lost"


def test_an_end_from_outside_does_not_wait_for_the_api(monkeypatch):
    monkeypatch.setattr(api_outage, "_wait_for_api", lambda *_: pytest.fail("it waits"))
    with pytest.raises(KeyboardInterrupt), outlast_api_outages():
        raise KeyboardInterrupt


def test_a_body_that_is_terminated_while_it_waits_for_the_api_waits_no_longer_nor_do_those_around_it(monkeypatch):
    asked = []
    monkeypatch.setattr(api_outage, "_POLL_S", 0.0)
    monkeypatch.setattr(api_outage, "_outage", lambda: asked.append(None) or ConnectionRefusedError(111, "refused"))
    monkeypatch.setattr(api_outage, "_JUST_NOW_S", 0.0)

    @flow
    def end():
        with outlast_api_outages(), outlast_api_outages(lambda: len(asked) == 3):
            return "ended"

    assert end() == "ended"
    assert len(asked) == 3


def test_an_embedded_server_that_does_not_start_again_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(api_outage, "_outage", lambda: ConnectionRefusedError(111, "refused"))
    keeper = ServerKeeper()
    keeper.has_given_up = True
    unreached = api_outage._unreached.set(set())
    with disable_run_logger():
        api_outage._wait_for_api(keeper, lambda: False)
    api_outage._unreached.reset(unreached)
    assert is_outage(httpx.ConnectError("refused"))
    token = api_outage._keeper.set(keeper)
    assert not is_outage(httpx.ConnectError("refused"))
    api_outage._keeper.reset(token)


@pytest.mark.parametrize(("status", "is_away"), [(500, True), (503, True), (429, True), (404, False), (422, False)])
def test_a_server_that_cannot_answer_now_is_told_from_one_that_refuses(status, is_away):
    request = httpx.Request("POST", "http://prefect/api/flow_runs/")
    assert is_outage(httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))) == is_away


def test_an_api_that_stays_away_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(api_outage, "_LONGEST_S", 0.0)
    monkeypatch.setattr(api_outage, "_outage", lambda: ConnectionRefusedError(111, "refused"))

    @flow
    def end():
        with outlast_api_outages():
            return "ended"

    assert end() == "ended"


def test_an_api_that_stays_away_is_waited_for_once_without_the_gpus_of_the_training(tmp_path, monkeypatch):
    """Nor its machines: others may wait for them."""
    order = []
    monkeypatch.setattr(api_outage, "_LONGEST_S", 0.0)
    monkeypatch.setattr(api_outage, "_outage", lambda: order.append("asked") or ConnectionRefusedError(111, "refused"))
    monkeypatch.setattr(api_outage, "_JUST_NOW_S", 0.0)
    monkeypatch.setattr(GpuAllocation, "release", lambda _: order.append("released"))
    train("sweep_trainings:climb", {"lr": 0.3, "epochs": 1}, run=RunConfig(storage=tmp_path))
    assert order == ["released", "asked"]


def test_ranks_commit_on_and_restart_while_the_server_is_away(outage):
    assert outage.gone_at[0] == 1
    assert outage.back_at >= (2, outage.gone_at[1] + 3)
    steps = [manifest.step for manifest in CheckpointStore.open(outage.training.storage, "run").list()]
    assert steps == list(range(steps[0], steps[-1] + 1))


def test_every_state_is_right_once_the_server_is_back(outage):
    assert outage.training.process.returncode == 0, outage.training.output()[-4000:]
    assert outage.training.state(outage.server.api) == "Completed"

    def found() -> dict[str, list[tuple[str, int]]]:
        states: dict[str, list[tuple[str, int]]] = {}
        for row in rows(outage.server.api, "task_runs", sort="EXPECTED_START_TIME_ASC"):
            states.setdefault(row["name"], []).append((row["state_name"], row["run_count"]))
        return states

    # The server itself takes a moment to enter what it was told.
    wait_until(lambda: all(name in FINAL for runs in found().values() for name, _ in runs), found)
    states = found()
    assert set(states.pop("prune-run")) == {("Completed", 1)}
    left, again = states.pop("rank-0")
    assert left in {("Cancelled", 1), ("Failed", 1)}  # by how it noticed that the other was gone
    assert again == ("Completed", 1)
    assert states == {"train-run": [("Completed", 2)], "rank-1": [("Failed", 1), ("Completed", 1)]}


def test_every_line_that_was_said_meanwhile_is_in_the_api(outage):
    arrived = ticks("\n".join(row["message"] for row in rows(outage.server.api, "logs")))
    assert outage.said_meanwhile
    assert outage.said_meanwhile - arrived == set()
    assert arrived == ticks(outage.training.output())


def test_reports_do_not_wait_for_a_slow_api(lived):
    assert lived["slow"].result() < SLOW_S
