"""Prefect's runner while the API is away."""

import asyncio
import json
from importlib import import_module
from uuid import uuid4

import httpx
import pytest
from http_proxy import Response, proxied
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runner._scheduled_run_poller import ScheduledRunPoller
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_RETRY_EXTRA_CODES, get_current_settings, temporary_settings
from prefect.utilities.services import critical_service_loop
from prefect_torch.deployments.serving import _CANCELLED, _CANCELLED_SINCE_3_9, _DUE, runner_outlasts_outages
from prefect_version import IS_3_9

REQUEST = httpx.Request("POST", "http://127.0.0.1/api/deployments/get_scheduled_flow_runs")


def loops():
    """Return the loops for due flow runs and for cancelled or suspended ones, where the installed Prefect has them."""
    places = (_DUE, _CANCELLED_SINCE_3_9 if IS_3_9 else _CANCELLED)
    return [getattr(import_module(module), name) for module, _, name in (it.rpartition(".") for it in places)]


def answered(status, text="refused"):
    return httpx.HTTPStatusError(text, request=REQUEST, response=httpx.Response(status, request=REQUEST))


class Done(Exception):  # noqa: N818 - no error
    pass


class Poller(ScheduledRunPoller):
    """Prefect's poller of a runner, whose polls end as they are given."""

    def __init__(self, polls):
        self._storage_objs, self._query_seconds = [], 1e-6
        self._polls = iter([*polls, Done()])
        self.num_polls = 0

    async def _get_and_submit_flow_runs(self, task_group=None):
        error = next(self._polls)
        self.num_polls += 1
        if error is not None:
            raise error


def poll(polls):
    """Return the number of polls, each with an error or None, before the poller ends, and the error with which it does."""
    poller = Poller(polls)
    with pytest.raises(Exception, match="unhandled errors in a TaskGroup") as caught:
        asyncio.run(poller.run())
    (error,) = caught.value.exceptions
    return poller.num_polls, error


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), answered(500), answered(503), httpx.ReadTimeout("slow")])
def test_a_runner_outlasts_any_number_of_polls_without_an_answer(error, caplog):
    polls = [None, *[error] * 10, None, None, *[error] * 5]
    back = []
    with runner_outlasts_outages(after_outage=lambda: back.append(1)):
        num_polls, end = poll(polls)
    assert (num_polls, type(end), len(back)) == (len(polls) + 1, Done, 1)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("serving")]
    away = f"Prefect's API is away ({error!r}): flow runs go on, and due ones start when it is back"
    assert said == [away, "Prefect's API is back", away]
    num_polls, end = poll(polls)
    assert (num_polls, str(end)) == (4, "Service exceeded error threshold."), "Prefect's own ends at the third"


def test_what_is_due_after_an_outage_is_tried_until_the_api_has_answered_it(caplog):
    answers = iter([httpx.ConnectError("gone again"), httpx.ReadTimeout("slow"), None])
    calls = []

    def restart():
        calls.append(next(answers))
        if calls[-1] is not None:
            raise calls[-1]

    with runner_outlasts_outages(after_outage=restart):
        assert poll([httpx.ConnectError("refused"), *[None] * 5])[0] == 7
    assert len(calls) == 3
    said = [record.getMessage() for record in caplog.records if record.name.endswith("serving")]
    assert len(said) == 2
    assert said[-1] == "Prefect's API is back"


def test_a_page_of_a_proxy_is_no_answer():
    """With status 200; Prefect's own runner ends at the first."""
    page = json.JSONDecodeError("Expecting value", "<html>maintenance</html>", 0)
    with runner_outlasts_outages():
        assert poll([page] * 5)[0] == 6
    assert poll([page]) == (1, page)


def test_what_is_due_after_an_outage_and_fails_ends_no_flow_runs(caplog):
    calls = []

    def restart():
        calls.append(1)
        raise LookupError("the deployment is gone")

    with runner_outlasts_outages(after_outage=restart):
        assert poll([httpx.ConnectError("refused"), None, None])[0] == 4
    assert len(calls) == 1
    assert "are not restarted: LookupError('the deployment is gone')" in caplog.text


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_no_flow_run_either(status, caplog):
    back = []
    with runner_outlasts_outages(after_outage=lambda: back.append(1)):
        refused = [answered(status, "for url 'http://me:secret@host/api'")] * 5
        assert poll([None, *refused, answered(503), *refused, None])[0] == 14
    assert len(back) == 1
    said = [record.getMessage() for record in caplog.records if record.name.endswith("serving")]
    assert "secret" not in str(said)
    assert ["start another `serve` with a new key" in it for it in said] == [True, False, True, False]


def test_another_refusal_still_ends_a_runner():
    refused = answered(404)
    with runner_outlasts_outages():
        assert poll([None, refused, None]) == (2, refused)


def test_other_runners_of_the_process_are_prefects_own_afterwards():
    with runner_outlasts_outages():
        assert critical_service_loop not in loops()
    assert loops() == [critical_service_loop] * 2


def test_a_flow_run_that_begins_while_the_server_has_no_database_asks_again(prefect_server):
    """Its process has the settings of the runner's. Prefect's own client does not repeat a request that has status 500."""
    failed = []

    def change(method: str, path: str, response: Response) -> Response:
        if not path.startswith("/api/flow_runs/") or failed:
            return response
        failed.append(path)
        return Response(500, b"{}", {"Retry-After": "0.1"})

    with runner_outlasts_outages(), proxied(prefect_server.url) as proxy:
        of_processes = get_current_settings().to_environment_variables(exclude_unset=True)
        assert of_processes["PREFECT_CLIENT_RETRY_EXTRA_CODES"] == "500,504"
        proxy.change = change
        with temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
            client = get_client(sync_client=True)
            with client, pytest.raises(ObjectNotFound):
                client.read_flow_run(uuid4())
    assert len(failed) == 1
    with temporary_settings({PREFECT_CLIENT_RETRY_EXTRA_CODES: {418}}), runner_outlasts_outages():
        assert PREFECT_CLIENT_RETRY_EXTRA_CODES.value() == {418}
