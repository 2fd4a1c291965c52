"""Final states whose request is repeated, as after a lost answer or the server's 503, and those of a second try."""

import httpx
import pytest
from prefect import flow, task
from prefect.transactions import transaction
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.tasks.prefect_api.final_state import completed


@pytest.fixture
def answers_lost(monkeypatch):
    """Lose the first answer to each request for a completed state; their statuses."""
    send, lost = httpx.Client.send, []

    def send_again(self, request, **options):
        if request.url.path.endswith("/set_state") and b'"COMPLETED"' in request.content:
            lost.append(send(self, request, **options).status_code)
        return send(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", send_again)
    return lost


def test_a_result_arrives_though_the_answer_to_the_final_state_was_lost(answers_lost):
    @short_tracebacks
    @flow(name="train", persist_result=False)
    def inner(value):
        return completed(f"{value} steps", {"value": value})

    @flow
    def outer():
        return [inner(1), inner(2)]

    assert inner(3) == {"value": 3}
    assert outer() == [{"value": 1}, {"value": 2}]
    assert answers_lost == [201] * 4
    assert inner(4, return_state=True).result() == {"value": 4}


@pytest.mark.parametrize(("status", "said"), [(404, "does not know flow run"), (401, "did not record that of flow run")])
def test_a_result_and_an_error_arrive_though_the_api_takes_no_final_state(monkeypatch, caplog, status, said):
    """It has lost the flow run, or the key has expired meanwhile."""
    send = httpx.Client.send

    def lose(self, request, **options):
        if request.url.path.endswith("/set_state") and (b'"COMPLETED"' in request.content or b'"FAILED"' in request.content):
            request.url = request.url.copy_with(username="me", password="secret")
            return httpx.Response(status, request=request)
        return send(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", lose)

    @short_tracebacks
    @flow(name="train", persist_result=False)
    def inner(fails):
        if fails:
            raise ValueError("boom")
        return completed("1 step", "done")

    assert inner(False) == "done"
    (line,) = [it.getMessage() for it in caplog.records if "it has completed, but " in it.getMessage()]
    assert f"Prefect's API {said}" in line
    assert "secret" not in line
    with pytest.raises(ValueError, match="boom"):
        inner(True)
    completed_state, failed_state = (inner(fails, return_state=True) for fails in (False, True))
    assert (completed_state.is_completed(), completed_state.message, completed_state.result()) == (True, "1 step", "done")
    assert (failed_state.is_failed(), failed_state.message) == (True, "Flow run encountered an exception: ValueError: boom")
    with pytest.raises(ValueError, match="boom"):
        failed_state.result()


def test_a_flow_s_own_error_of_http_stays_what_it_raises():
    @short_tracebacks
    @flow(name="train", persist_result=False)
    def inner():
        try:
            int("before")
        except ValueError:
            response = httpx.Response(401, request=httpx.Request("GET", "http://elsewhere/data"))
            response.raise_for_status()

    with pytest.raises(httpx.HTTPStatusError, match="elsewhere"):
        inner()


def test_a_try_that_completes_returns_though_one_before_it_has_raised():
    @short_tracebacks
    @flow(name="train", retries=1, persist_result=False)
    def inner(fails):
        tries.append(fails)
        if fails[len(tries) - 1]:
            raise ValueError(f"try {len(tries)}")
        return completed("1 step", "done")

    @flow
    def outer():
        return inner([True, False])

    tries = []
    assert inner([True, False]) == "done"
    tries.clear()
    assert outer() == "done"
    tries.clear()
    with pytest.raises(ValueError, match="try 2"):
        inner([True, True])


def test_a_proxys_page_hides_no_exception_of_a_flow(monkeypatch):
    """With status 200, in the place of the flow run's state."""
    send, pages = httpx.Client.send, []

    def answer(self, request, **options):
        if request.method == "GET" and len(tries) == 2 and "/flow_runs/" in request.url.path:
            pages.append(request.url.path)
            return httpx.Response(200, text="<html>maintenance</html>", request=request)
        return send(self, request, **options)

    @short_tracebacks
    @flow(name="train", retries=1, persist_result=False)
    def inner():
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("try 1")
        return completed("1 step", "done")

    tries = []
    monkeypatch.setattr(httpx.Client, "send", answer)
    with pytest.raises(ValueError, match="try 1"):
        inner()
    assert pages


def test_only_what_leaves_a_flow_rolls_back_the_transaction_around_it():
    """The task of each attempt that failed did so, in the middle of a training that went on."""

    @task(retries=1, retry_delay_seconds=0)
    def attempt(fails):
        tries.append(fails)
        if fails or len(tries) == 1:
            raise ValueError(f"try {len(tries)}")

    @short_tracebacks
    @flow(name="train", persist_result=False)
    def inner(fails):
        attempt(fails)
        return completed("1 step", "done")

    @task
    def make():
        pass

    make.on_rollback(lambda _: rolled_back.append(len(tries)))

    @flow
    def outer(fails):
        with transaction():
            make()
            return inner(fails)

    tries, rolled_back = [], []
    assert outer(False) == "done"
    assert (len(tries), rolled_back) == (2, [])
    tries.clear()
    with pytest.raises(ValueError, match="try 2"):
        outer(True)
    assert rolled_back == [2]
