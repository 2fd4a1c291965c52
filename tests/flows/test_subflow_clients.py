"""The clients that Prefect's engine runs a sweep's trials with: one each, which soon repeat what SQLite's lock refuses."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    temporary_settings,
)
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect_servers import rows
from prefect_torch.tasks.prefect_api.client import SubflowClients


@contextmanager
def refusing(times, headers=()):
    """Serve an API that refuses the first requests as Prefect's server does when SQLite is locked; yield when they came."""
    came = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            came.append(time.monotonic())
            body = json.dumps({"exception_message": "Service Unavailable"}).encode()
            self.send_response(503 if len(came) <= times else 200)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    settings = {
        PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api",
        PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False,
        PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False,
        PREFECT_CLIENT_MAX_RETRIES: 3,
    }
    try:
        with temporary_settings(settings):
            yield came
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def clients():
    """Make them for the API of the settings, and close them."""
    made = []

    def make():
        made.append(SubflowClients())
        return made[-1]

    yield make
    for it in made:
        it.close()


def ask():
    with get_client(sync_client=True) as client:
        return client.request("GET", "/hello").status_code


def aask():
    async def request():
        async with get_client() as client:
            return (await client.request("GET", "/hello")).status_code

    return run_coro_as_sync(request())


@pytest.mark.parametrize("asks", [ask, aask])
def test_what_was_refused_is_repeated_soon_and_three_times(clients, asks):
    with refusing(3) as came, clients().used():
        assert asks() == 200
    assert len(came) == 4
    assert all(after - before >= 0.1 for before, after in pairwise(came))
    assert came[-1] - came[0] < 7, "Prefect waits for 2, 4 and 8 s"


def test_a_server_that_says_when_is_heard_and_one_that_goes_on_refusing_is_not_flooded(clients):
    with refusing(9, [("Retry-After", "0.3")]) as came, clients().used(), pytest.raises(PrefectHTTPStatusError, match="503"):
        ask()
    assert all(after - before >= 0.3 for before, after in pairwise(came))
    with refusing(9) as came, temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 4}), clients().used():
        with pytest.raises(PrefectHTTPStatusError, match="503"):
            ask()
        waits = [after - before for before, after in pairwise(came)]
    assert sum(waits[:3]) < 7
    assert 2 <= waits[-1] < 12, "Prefect's first wait, not its fourth"


def test_all_threads_take_the_same_ones_and_others_do_not(clients):
    with refusing(0):
        shared = clients()

        def taken():
            with shared.used(), get_client(sync_client=True) as client:
                return client, run_coro_as_sync(current())

        async def current():
            return get_client()

        with ThreadPoolExecutor(2) as pool:
            (first, afirst), (second, asecond) = [
                it.result() for it in [pool.submit(copy_context().run, taken) for _ in range(2)]
            ]
        assert first is second
        assert afirst is asecond
        with shared.used():
            assert ask() == 200, "they are open after others' use"
        assert get_client(sync_client=True) is not first


@flow
def half(number: float, of: dict):
    if number < 0:
        raise ValueError("boom")
    return {"half": number / 2, "id": flow_run.id, **of}


def test_a_flow_is_called_as_a_plain_call_does_and_has_its_name_from_the_beginning(clients):
    @flow
    def parent():
        shared = clients()
        with shared.used(), tags("t"):
            plain = half(1, {"a": 1})
            named = [shared.call(half, f"half-{number}", {"number": number, "of": {"a": 1}}) for number in (1, 2)]
            with pytest.raises(ValueError, match="boom"):
                shared.call(half, "half--1", {"number": -1, "of": {}})
        return flow_run.id, plain, *named

    above, plain, one, two = parent()
    assert [(it["half"], it["a"]) for it in (plain, one, two)] == [(0.5, 1), (0.5, 1), (1.0, 1)]
    api = PREFECT_API_URL.value()
    found = {it["name"]: it for it in rows(api, "flow_runs", flow_runs={"parent_flow_run_id": {"any_": [above]}})}
    assert len(found) == 4
    assert {name: it["state_name"] for name, it in found.items() if name.startswith("half-")} == {
        "half-1": "Completed",
        "half-2": "Completed",
        "half--1": "Failed",
    }
    (of_plain,) = (it for name, it in found.items() if not name.startswith("half-"))
    assert (of_plain["id"], found["half-1"]["id"], found["half-2"]["id"]) == (plain["id"], one["id"], two["id"])
    for field in ("parameters", "tags", "flow_id", "flow_version", "run_count"):
        assert found["half-1"][field] == of_plain[field], field
    assert all(it["start_time"] and it["end_time"] and it["total_run_time"] > 0 for it in found.values())
    assert found["half-2"]["parameters"] == {"number": 2, "of": {"a": 1}}
    between = {it["id"] for it in rows(api, "task_runs", flow_runs={"id": {"any_": [above]}})}
    assert between == {it["parent_task_run_id"] for it in found.values()}
    assert len(between) == 2, "one for the plain call, and one for all others"
    with get_client(sync_client=True) as client:
        graph = client.request("GET", f"/flow_runs/{above}/graph-v2").json()
    assert {(node["id"], node["state_type"]) for _, node in graph["nodes"]} == {
        (it["id"], it["state_type"]) for it in found.values()
    }


def test_flow_runs_that_begin_at_once_share_one_task_run(clients):
    @flow
    def parent():
        shared = clients()

        def call(number):
            with shared.used():
                return shared.call(half, f"half-{number}", {"number": number, "of": {}})["id"]

        with ThreadPoolExecutor(4) as pool:
            return flow_run.id, [it.result() for it in [pool.submit(copy_context().run, call, n) for n in range(1, 5)]]

    above, below = parent()
    api = PREFECT_API_URL.value()
    found = rows(api, "flow_runs", flow_runs={"parent_flow_run_id": {"any_": [above]}})
    assert sorted(it["id"] for it in found) == sorted(below)
    assert {it["state_name"] for it in found} == {"Completed"}
    (between,) = rows(api, "task_runs", flow_runs={"id": {"any_": [above]}})
    assert between["state_name"] == "Completed"
