"""Flow runs that are run again, by a person or by a parent's retries, go on with what they trained."""

import asyncio
from json import JSONDecodeError
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import Task, flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.flow_engine import run_flow
from prefect.settings import (
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW,
    temporary_settings,
)
from prefect.states import AwaitingRetry, Cancelled, Crashed, Failed, Pending, Running, Suspended
from prefect.task_worker import TaskWorker
from prefect_servers import api_that_answers
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.flows import RunConfig, run_names, train
from prefect_torch.flows.monitoring.restarted import CallTry, EarlierTries
from prefect_torch.flows.run_names import default_run_name, name_run, numbered_calls
from prefect_torch.tasks.prefect_api.flow_run import find_end_before_rerun, has_run_before

SUPPORT = Path(__file__).parents[1] / "support"


@flow
def name_itself():
    """Return the name that a training here would have."""
    with get_client(sync_client=True) as client:
        return name_run(client, FlowRunContext.get().flow_run, numbered_calls())


def name_in_own_process(client, flow_run_id):
    """Return the name that a training in a flow run has that another process runs."""
    run_names._codes.clear()
    return name_run(client, client.read_flow_run(flow_run_id))


def test_each_place_that_calls_a_training_has_a_name_of_its_own_which_all_retries_share():
    tries = {"pipeline": [], "in_task": []}

    def once_more(who, names):
        tries[who].append(names)
        if len(tries[who]) == 1:
            raise ValueError("once more")

    @flow
    def below():
        return name_itself()

    @task(retries=1)
    def in_task():
        once_more("in_task", [name_itself(), below()])

    @flow(retries=1)
    def pipeline():
        in_loop = [name_itself() for _ in range(2)]
        if not tries["pipeline"]:
            in_task()
        once_more("pipeline", [*in_loop, below()])

    pipeline()
    assert tries["pipeline"][0] == tries["pipeline"][1]
    assert tries["in_task"][0] == tries["in_task"][1]
    names = [*tries["pipeline"][0], *tries["in_task"][0]]
    assert len(set(names)) == len(names) == 5


def test_each_call_in_a_task_that_no_flow_calls_has_a_name_which_all_tries_of_that_task_share(client):
    tries = []

    @flow
    def below():
        return name_itself()

    @task(retries=1)
    def fit():
        tries[-1].append([name_itself(), name_itself(), below()])
        if len(tries[-1]) == 1:
            raise ValueError("once more")

    async def serve_once(task_run):
        await TaskWorker(fit).execute_task_run(task_run)

    def fit_in_background():
        asyncio.run(serve_once(client.read_task_run(fit.delay().task_run_id)))

    with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
        for call in (fit, fit, fit_in_background):
            tries.append([])
            call()
    assert [first == second for first, second in tries] == [True] * 3
    names = [name for first, _ in tries for name in first]
    assert len(set(names)) == len(names) == 9
    assert all(name.startswith("fit-") for name in names)


def test_two_deployments_of_one_flow_that_a_flow_starts_train_runs_of_their_own_in_each_try(client):
    names = [f"deployed-{uuid4()}" for _ in range(2)]
    for name in names:
        name_itself.to_deployment(name).apply()
    started = []

    @flow(retries=1)
    def pipeline():
        started.append([run_deployment(f"name-itself/{name}", timeout=0, as_subflow=True).id for name in names])
        if len(started) == 1:
            raise ValueError("once more")

    pipeline()
    first, second = ([name_in_own_process(client, it) for it in of_try] for of_try in started)
    assert first == second
    assert len(set(first)) == 2


def test_flow_runs_of_a_deployment_that_a_retried_flow_starts_in_another_order_do_not_swap_their_runs(client):
    """The calls of concurrent tasks and coroutines have no order, and Prefect numbers them."""

    @flow
    def name_of_rate(lr: float):
        """Stand for a training with a config."""

    deployment_id = name_of_rate.to_deployment("rates").apply()
    orders, started = [(0.1, 0.01), (0.1, 0.01), (0.01, 0.1)], []

    @flow(retries=2)
    def pipeline():
        rates = orders[len(started)]
        started.append([run_deployment(deployment_id, parameters={"lr": lr}, timeout=0).id for lr in rates])
        if len(started) < len(orders):
            raise ValueError("once more")

    pipeline()
    first, same_order, another_order = ([name_in_own_process(client, it) for it in of_try] for of_try in started)
    assert first == same_order
    assert len({*first, *another_order}) == 4


def test_flows_of_one_name_that_are_bound_to_a_work_pool_have_runs_of_their_own(client):
    """As `from one import fit` and `from another import fit as fit_too`, with the decorators `docker` and `kubernetes`."""

    def fit():
        return 1

    def fit_too():
        return 2

    pool = client.create_work_pool(WorkPoolCreate(name=f"bound-{uuid4()}", type="process"))
    above, names = begin(client, train_fn="trainings:train_epochs"), []
    for function in (fit, fit_too):
        call = client.create_task_run(Task(function, name="fit"), above.id, "0", state=Running())
        bound = client.create_flow_run(flow(function, name="fit"), parent_task_run_id=call.id, work_pool_name=pool.name)
        names.append(name_in_own_process(client, bound.id))
    assert len(set(names)) == 2


def test_neither_an_edit_nor_another_name_of_the_flow_run_changes_the_names_of_its_trainings(client):
    """A new process reads the code again, and evaluates `flow_run_name` again."""
    names = []

    @flow(retries=1)
    def pipeline():
        if not names:

            @flow(name="fit")
            def fit():
                return name_itself()

        else:
            client.update_flow_run(FlowRunContext.get().flow_run.id, name="renamed")

            @flow(name="fit")
            def fit():
                edited = name_itself()
                return edited  # noqa: RET504 - another code

        @flow(name="fit")
        def another_of_that_name():
            return [name_itself()][0]

        names.append([name_itself(), fit(), fit(), another_of_that_name()])
        if len(names) == 1:
            raise ValueError("once more")

    pipeline()
    assert names[0] == names[1]
    assert len(set(names[0])) == 4


def test_a_flow_run_that_is_renamed_keeps_the_name_of_its_training(client):
    flow_run = begin(client, train_fn="trainings:train_epochs")
    name = name_run(client, client.read_flow_run(flow_run.id))
    assert name == default_run_name(flow_run.name, str(flow_run.id))
    client.update_flow_run(flow_run.id, name="renamed")
    assert name_run(client, client.read_flow_run(flow_run.id)) == name


def test_a_flow_run_without_a_parent_is_named_after_itself(client):
    state = name_itself(return_state=True)
    flow_run = client.read_flow_run(state.state_details.flow_run_id)
    assert state.result() == default_run_name(flow_run.name, str(flow_run.id))


def test_flow_runs_of_a_schedule_that_are_named_alike_train_runs_of_their_own():
    """Prefect gives two of a hundred scheduled flow runs the same name every now and then, and ids of the same millisecond."""
    one, another = "01a21e03-4482-76bc-aae6-c05f869d7200", "01a21e03-4482-78af-871d-f24fb1ce0220"
    assert default_run_name("neat-kittiwake", one) == "neat-kittiwake-869d7200"
    assert default_run_name("neat-kittiwake", another) == "neat-kittiwake-b1ce0220"
    assert default_run_name("neat-kittiwake", "61f8be40-d880-49ab-9462-8bf316eaee74") == "neat-kittiwake-61f8be40"


def test_a_parents_retry_goes_on_with_its_nameless_trainings(tmp_path):
    tries = []

    @flow(retries=1)
    def pipeline():
        done, failing = {"epochs": 2}, {"epochs": 3, "how": "raise", "rank": 0, "at": 1}
        tries.append([])
        for config in (done, failing):
            tries[-1].append(train("trainings:train_epochs", config, run=RunConfig(storage=str(tmp_path))))

    pipeline()
    (first,), (again, resumed) = tries
    assert again.path == first.path != resumed.path
    assert first.return_value == {"begun": 0, "attempt": 1}
    assert again.return_value == {"begun": 2, "attempt": 2}  # it was complete, and nothing is trained twice
    assert resumed.return_value == {"begun": 1, "attempt": 2}


@pytest.mark.parametrize("is_in_task", [False, True])
def test_a_parents_retry_goes_on_after_the_fresh_start_of_an_earlier_try(tmp_path, is_in_task):
    tries = []
    anew = RunConfig(name="anew", storage=str(tmp_path), resume="never")
    train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="anew", storage=str(tmp_path)))

    def fit():
        tries.append(train("trainings:train_epochs", {"epochs": 3, "how": "raise", "rank": 0, "at": 1, "times": 2}, run=anew))

    @flow(retries=1)
    def pipeline():
        (task(fit) if is_in_task else fit)()

    pipeline()
    assert [result.return_value for result in tries] == [{"begun": 1, "attempt": 3}]
    pipeline()
    assert tries[1].return_value == {"begun": 0, "attempt": 4}, "another flow run begins anew"


@pytest.mark.parametrize("is_in_flow", [False, True])
def test_a_retry_of_a_task_that_no_flow_calls_goes_on_after_the_fresh_start_of_its_first_try(tmp_path, is_in_flow):
    tries = []
    anew = RunConfig(name="anew", storage=str(tmp_path), resume="never")

    def call():
        tries.append(train("trainings:train_epochs", {"epochs": 3, "how": "raise", "rank": 0, "at": 1}, run=anew).return_value)

    @task(retries=1)
    def fit():
        (flow(call, name="below") if is_in_flow else call)()

    with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
        fit()
        fit()
    assert [it["begun"] for it in tries] == [1, 0], "another call begins anew"


def test_a_page_of_a_proxy_does_not_make_an_earlier_try_another_call():
    """A retried training would have begun anew, over the work of its first try."""
    checked = {PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False}  # as it was before
    tries = EarlierTries(CallTry("call", ((str(uuid4()), 2),), "a process"), ())
    with api_that_answers(200, b"<html>Please log in</html>"), temporary_settings(checked), pytest.raises(JSONDecodeError):
        _ = str(uuid4()) in tries
    assert "not of Prefect" not in tries


def test_another_call_of_a_task_begins_anew_although_the_call_before_was_retried(tmp_path):
    tries = []
    anew = RunConfig(name="nightly", storage=str(tmp_path), resume="never")

    @task(retries=1)
    def fit(fails):
        tries.append(train("trainings:train_epochs", {"epochs": 2}, run=anew).return_value)
        if fails:
            fails.pop()
            raise ValueError

    @flow
    def pipeline():
        fit([1])
        fit([])

    pipeline()
    first, again, another = tries
    assert (first["begun"], again["begun"], another["begun"]) == (0, 2, 0)


def test_a_parents_retry_does_not_take_a_run_back(tmp_path):
    """Which somebody else has taken over from an earlier try."""
    store = CheckpointStore.open(tmp_path, "taken")
    errors = []

    @flow(retries=1)
    def pipeline():
        try:
            run = RunConfig(name="taken", storage=str(tmp_path), takeover=True)
            train("trainings:train_epochs", {"epochs": 3, "how": "raise", "rank": 0, "at": 1}, run=run)
        except Exception as exc:
            if not errors:
                claim_attempt(store, Owner.current("of somebody else"), world_size=1)
            errors.append(exc)
            raise

    assert pipeline(return_state=True).is_failed()
    assert [type(error).__name__ for error in errors] == ["ValueError", "RunBusyError"]


def begin(client, **parameters):
    """Return a flow run of a deployment, which a person may run again."""
    flow_id = client.create_flow(train)
    deployment_id = client.create_deployment(flow_id, "run-again", entrypoint="prefect_torch.flows.training:train")
    return client.create_flow_run_from_deployment(deployment_id, parameters=parameters)


def test_a_flow_run_that_a_person_retries_has_new_budgets(client, tmp_path):
    """As the UI's button does it, to a flow run that failed."""
    flow_run = begin(
        client,
        train_fn=f"{SUPPORT / 'trainings.py'}:train_epochs",
        config={"epochs": 1, "how": "raise", "rank": 0, "at": 0, "times": 9},
        scaling={"num_workers": 1},
        run={"name": "run", "storage": str(tmp_path)},
        checkpoint={"num_to_keep": 1},
        failure={"max_failures": 1, "retry_delay_s": 0.01},
        resume_from=None,
    )
    store = CheckpointStore.open(tmp_path, "run")
    for attempts in (2, 4):
        run_flow(train, flow_run=client.read_flow_run(flow_run.id), return_type="state")
        assert len(list(list_attempts(store))) == attempts
        state = client.read_flow_run(flow_run.id).state
        assert state.is_failed(), state
        client.set_flow_run_state(flow_run.id, AwaitingRetry())
    assert {outcome.kind for outcome in read_outcomes(store)} == {"user"}
    first, *_, last = (attempt.owner for attempt in list_attempts(store))
    assert first.flow_run_id == last.flow_run_id == str(flow_run.id)
    assert first.budget is None
    assert UUID(last.budget)


@pytest.mark.parametrize(
    ("end", "is_decided"), [(Failed(), True), (Cancelled(), True), (Crashed(), False), (None, False)], ids=str
)
def test_budgets_go_on_after_a_crash_and_begin_anew_after_an_end(client, end, is_decided):
    flow_run = begin(client, train_fn="trainings:train_epochs")
    ended = None
    for state in (Pending(), Running(), end, AwaitingRetry(), Pending(), Running(), Pending(), Running()):
        if state is not None:
            accepted = client.set_flow_run_state(flow_run.id, state).state
            ended = accepted if state is end else ended
    assert find_end_before_rerun(str(flow_run.id)) == (str(ended.id) if is_decided else None)


@flow(persist_result=False)
def ask():
    """Return whether the flow run has run before, and how often Prefect says it has."""
    return has_run_before(), FlowRunContext.get().flow_run.run_count


@pytest.mark.parametrize(
    ("before", "counts"), [(None, {1}), (Suspended(pause_key="by hand", timeout_seconds=60), {1, 2}), (Failed(), {2})]
)
def test_a_flow_run_that_was_suspended_has_run_before_though_prefect_may_count_one_run(client, before, counts):
    created = client.create_flow_run_from_deployment(ask.to_deployment("asked").apply())
    if before is not None:
        for state in (Pending(), Running(), before):
            client.set_flow_run_state(created.id, state)
        if before.is_paused():
            client.resume_flow_run(created.id)
        client.set_flow_run_state(created.id, Pending(), force=before.is_failed())
    has_run, count = run_flow(ask, client.read_flow_run(created.id))
    assert has_run == (before is not None)
    assert count in counts, "usually one, if it was suspended"
