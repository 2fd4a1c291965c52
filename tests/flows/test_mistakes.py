"""What a person sees of a mistake fits on a screen."""

import inspect
import logging
import os
import pydoc
import re
import subprocess
import sys
import sysconfig
import traceback
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from forked_programs import run_program
from prefect import flow
from prefect._internal.concurrency.cancellation import CancelledError
from prefect.exceptions import ObjectNotFound, ParameterBindError, ParameterTypeError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed
from prefect.utilities.callables import parameter_schema
from prefect_servers import rows, wait_until
from prefect_torch.ckpt.context import TrainContext, set_context
from prefect_torch.flows import RankFailedError, RunConfig, SearchConfig, evaluate, prune, sweep, train, uniform
from prefect_torch.flows.calls import log_filter
from prefect_torch.flows.calls import short_tracebacks as module
from prefect_torch.flows.calls.log_filter import FlowLogFilter
from prefect_torch.flows.calls.parameters import large_parameters_explained
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.flows.calls.unknown_arguments import explain_unbound
from prefect_torch.flows.monitoring.terminal import show_short
from prefect_torch.tasks.rank import tracebacks

MISTAKES = Path(__file__).parents[1] / "support/mistakes.py"
HEADING = re.compile(r"^=== (\d+) (.*)$", re.MULTILINE)
NUMBER = 25
COLUMNS = 80
INSTALLED = "/home/ada/.venv/lib/python3.11/site-packages"
USUAL_PATHS = {
    str(Path(tracebacks.__file__).parents[3]): INSTALLED,
    sysconfig.get_path("purelib"): INSTALLED,
    str(MISTAKES.parent): "/home/ada",
}


@pytest.mark.parametrize(
    ("kind", "others"),
    [(train, {}), (sweep, {"space": {"lr": uniform(0.0, 1.0)}}), (evaluate, {"storage": "./checkpoints", "run": "digits"})],
    ids=lambda it: getattr(it, "name", ""),
)
def test_a_flow_that_a_rank_calls_is_refused_before_prefect_has_a_flow_run(kind, others):
    name = f"{kind.name}-{uuid4().hex}"
    set_context(TrainContext(1, 1, 0, 2, 2, "digits", 1))
    try:
        with pytest.raises(RuntimeError, match="rank 1 of run 'digits' would start ranks itself, as would each of the 2"):
            kind.with_options(name=name)("os:getcwd", **others)
    finally:
        set_context(None)
    assert rows(PREFECT_API_URL.value(), "flow_runs", flows={"name": {"any_": [name]}}) == []


@pytest.fixture(scope="module")
def seen(tmp_path_factory, moto):
    """Make every mistake in one process, and return what it printed by mistake, with the most lines of it."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "COLUMNS": str(COLUMNS),
        "AWS_ENDPOINT_URL": moto.endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    done = run_program(
        [sys.executable, str(MISTAKES)],
        cwd=tmp_path_factory.mktemp("mistakes"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=True,
    )
    _, *parts = HEADING.split(done.stdout)
    return {name: (int(limit), text.strip()) for limit, name, text in zip(*[iter(parts)] * 3, strict=True)}


def lines_at_terminal(text):
    """Return how many lines of a terminal the text takes, with an environment in the user's home and a short random name."""
    for path, usual in USUAL_PATHS.items():
        text = text.replace(path, usual)
    text = re.sub(r"/tmp/pytest-\S+?/mistakes0", "/home/ada", text)
    for name in sorted(set(re.findall(r"Flow run '([a-z-]+)'", text)), key=len, reverse=True):
        text = text.replace(name, "indigo-heron")
    return sum(-(-max(len(line), 1) // COLUMNS) for line in text.splitlines())


def test_every_mistake_is_made(seen):
    assert len(seen) == NUMBER
    assert [name for name, (_, text) in seen.items() if "Error: " not in text.splitlines()[-1] + text] == []


def test_what_is_printed_fits_on_a_screen(seen):
    """A failure of the function takes less than 40 lines, a mistake in arguments, storages or names less than 15."""
    lines = {name: lines_at_terminal(text) for name, (_, text) in seen.items()}
    too_long = {name: f"{lines[name]} of {limit}\n{text}" for name, (limit, text) in seen.items() if lines[name] >= limit}
    assert not too_long, "\n".join(f"{name}: {text}" for name, text in too_long.items())


def test_the_function_s_traceback_is_printed_once_and_has_only_its_own_frames(seen):
    _, text = seen["a wrong key on two ranks"]
    assert text.count('    report({"lr": config["learning_rat"]})') == 1
    assert "NoneType: None" not in text
    assert not re.search(r"/prefect_torch/\S+\.py", text), text
    assert "direct cause" not in text
    assert "/site-packages/prefect/" not in text


@pytest.mark.parametrize("library", ["obstore", "tenacity", "httpx", "anyio", "fsspec"])
def test_no_library_s_frames_are_printed(seen, library):
    assert [name for name, (_, text) in seen.items() if f"/site-packages/{library}/" in text] == []


def test_a_rank_that_lost_its_peer_is_stopped_not_failed(seen):
    _, text = seen["one rank raises"]
    connected = r".* INFO +\| Task run 'rank-[01]' - \[Gloo\] Rank [01] is connected to 1 peer ranks\..*\n"  # torch 2.9 says so
    assert "Task run 'rank-" not in re.sub(connected, "", text), "the attempt says which rank failed"
    assert re.search(r"ERROR +\| Task run 'train-\S+' - rank 1 of attempt 1 failed:", text), text
    flow_run = re.search(r"Flow run '(\S+)' - attempt 1: starting from the beginning", text)[1]

    def at_server():
        task_runs = rows(PREFECT_API_URL.value(), "task_runs", flow_runs={"name": {"any_": [flow_run]}})
        return sorted(
            (it["name"], it["state_type"], it["state"]["message"]) for it in task_runs if it["name"].startswith("rank-")
        )

    stopped = ("rank-0", "CANCELLED", "stopped: lost its connection to rank 1")
    failed = ("rank-1", "FAILED", "rank 1 of attempt 1 failed: ZeroDivisionError: on rank 1")
    wait_until(lambda: at_server() == [stopped, failed], at_server)

    def logged_of_failed():
        task_runs = rows(PREFECT_API_URL.value(), "task_runs", flow_runs={"name": {"any_": [flow_run]}})
        rank_ids = [it["id"] for it in task_runs if it["name"] == "rank-1"]
        return [
            (it["level"], it["message"])
            for it in rows(PREFECT_API_URL.value(), "logs", logs={"task_run_id": {"any_": rank_ids}})
        ]

    last = (logging.INFO, f"Finished in state Failed('{failed[2]}')")
    wait_until(lambda: last in logged_of_failed(), logged_of_failed)


def test_a_failure_is_said_once_by_each_run_that_it_ends(seen):
    """The attempt's record has the traceback, which ends with the message, and the exception is the flow run's."""
    _, text = seen["a full disk"]
    said = [line for line in text.splitlines() if line.startswith("OSError: [Errno 28] No space left on device")]
    assert len(said) == 2, text
    assert text.count("No space left on device") == 3, "in these, and in the function's own line"
    assert text.splitlines()[-1].startswith("OSError: [Errno 28] No space left on device"), text
    flow_run = re.search(r"/flow-run/(\S+)", text)[1]

    def at_server():
        logs = rows(PREFECT_API_URL.value(), "logs", logs={"flow_run_id": {"any_": [flow_run]}})
        return [log["message"] for log in logs if log["message"].startswith("Finished in state Failed")]

    wait_until(lambda: any("No space left on device" in message for message in at_server()), at_server)


@pytest.mark.parametrize("others", [False, True])
def test_a_hook_that_another_has_set_is_left(monkeypatch, capsys, others):
    seen_by_other = []
    before = (lambda *exc: seen_by_other.append(exc)) if others else sys.__excepthook__
    monkeypatch.setattr(sys, "excepthook", before)
    of_flow, other = RuntimeError("of a flow"), KeyError("other")
    show_short(of_flow)
    for error in (of_flow, other):
        sys.excepthook(type(error), error, None)
    assert [error for _, error, _ in seen_by_other] == ([of_flow, other] if others else [])
    assert capsys.readouterr().err == ("" if others else "RuntimeError: of a flow\nKeyError: 'other'\n")


def test_states_and_messages_are_one_line(seen):
    _, text = seen["a changed model"]
    assert "\\n" not in text
    assert "'model.2.weight' is not in the checkpoint; 'model.2.bias' is not in the checkpoint" in text


def test_a_misspelled_keyword_is_named_in_one_line(seen):
    _, text = seen["a misspelled keyword"]
    assert text.splitlines()[-1] == (
        "prefect.exceptions.ParameterBindError: train() got an unexpected keyword argument 'scalin'; "
        "it takes train_fn, config, scaling, run, checkpoint, failure, resume_from"
    )


@pytest.mark.parametrize(
    ("called", "name", "instead"),
    [
        (train, "datasets", "load the data in the training function"),
        (train, "torch_config", "give scaling=ScalingConfig(backend=..., timeout_s=...)"),
        (train, "validation_config", "call evaluate(eval_fn, ..., watch=True), a flow of its own"),
        (train, "scaling_config", "give scaling"),
        (train, "num_workers", "give scaling=ScalingConfig(num_workers=...)"),
        (sweep, "param_space", "give space"),
        (sweep, "mode", "give search=SearchConfig(mode=...)"),
        (evaluate, "num_workers", "give scaling=ScalingConfig(num_workers=...)"),
    ],
)
def test_an_argument_of_rays_or_a_field_of_a_config_is_answered_with_what_to_write(called, name, instead):
    text = explain_unbound(called.fn, ("module:function", {}), {name: 1})
    assert text.startswith(f"{called.__name__}() got an unexpected keyword argument {name!r}; {instead}; it takes ")


@pytest.mark.parametrize("given", [{"return_state": True}, {"wait_for": []}])
def test_what_prefect_takes_with_each_call_is_not_named_as_the_wrong_argument(given):
    with pytest.raises(ParameterBindError, match="unexpected keyword argument 'scaling_config'; give scaling; it takes"):
        train("my_training:train_fn", **given, scaling_config={})


@pytest.mark.parametrize("shown", [train, sweep, evaluate, prune, train.with_options(retries=1), RunConfig, SearchConfig])
def test_help_prints_types_and_not_what_is_said_to_forms(shown):
    text = pydoc.render_doc(shown, renderer=pydoc.plaintext)
    assert not re.search(r"Annotated|FieldInfo| object at 0x|ge=", text.split(") -> ")[0]), text


def test_the_annotations_of_a_flow_still_say_it_to_forms():
    assert inspect.signature(train) == inspect.signature(train.fn)
    assert parameter_schema(train).properties["run"]["description"].startswith("The run's name, ")


def test_ipython_and_pytest_leave_out_the_frame_of_this_package():
    with pytest.raises(ParameterBindError) as caught:
        train("my_training:train_fn", scalin=2)
    assert [entry.path for entry in caught.traceback.filter(caught)] == [Path(__file__)]


def test_a_second_process_group_is_said_to_be_ready(seen):
    _, text = seen["a second process group"]
    assert "process group twice! The process group is ready when the function is called: leave init_process_group() out" in text


@pytest.mark.parametrize(
    ("name", "storage"),
    [("a storage without permission", "/proc/no-such-folder"), ("a bucket that does not exist", "s3://no-such-bucket/x")],
)
def test_a_storage_that_cannot_be_used_points_to_doctor(seen, name, storage):
    assert f"`prefect-torch doctor {storage}` tries each step that a training needs" in seen[name][1]


def test_a_defect_of_this_package_keeps_its_whole_traceback():
    @short_tracebacks
    @flow
    def defective():
        tracebacks.is_from_here(None)

    with pytest.raises(AttributeError) as caught:
        defective()
    files = [str(entry.path) for entry in caught.traceback]
    assert files[-1] == tracebacks.__file__
    assert str(Path(__file__)) in files[1:]  # the flow's own frame


def test_a_restart_names_its_budget(seen):
    _, text = seen["a budget of restarts"]
    assert "restart 1 of 1 (max_failures); the training starts again" in text
    assert "Retry 1/" not in text


@pytest.fixture
def of_train(monkeypatch):
    """The fields of a record of a flow run of `train`, which is the current one."""
    context = SimpleNamespace(flow=train, flow_run=SimpleNamespace(id=uuid4()))
    monkeypatch.setattr(log_filter, "FlowRunContext", SimpleNamespace(get=lambda: context))
    return {"flow_name": "train", "flow_run_id": str(context.flow_run.id)}


def test_a_flow_of_the_user_s_own_that_has_the_name_of_one_here_keeps_its_lines(tmp_path, caplog):
    """Also after it has called one of here: some were dropped, others shortened or no more than DEBUG."""

    def fail():
        raise OSError("first line\nsecond line")

    def interrupt():
        raise KeyboardInterrupt

    @flow(name="train", persist_result=False)
    def own(number: int, end=None):
        begun.append(flow_run.id)
        prune(str(tmp_path))
        if end is not None:
            end()

    begun = []
    own(1)
    with pytest.raises(OSError, match="first line"):
        own(2, fail)
    with pytest.raises(KeyboardInterrupt):
        own(3, interrupt)
    with pytest.raises(ParameterTypeError):
        own("none")
    said = [(it.levelname, it.getMessage()) for it in caplog.records if getattr(it, "flow_run_id", None) in begun]
    assert [level for level, text in said if text.startswith("Beginning flow run")] == ["INFO"] * 3
    assert [(level, text.split("'")[0]) for level, text in said if text.startswith(("Crash", "Encountered", "Finished"))] == [
        ("INFO", "Finished in state Completed()"),
        ("ERROR", "Encountered exception during execution: OSError("),
        ("INFO", "Finished in state Failed("),
        ("ERROR", "Crash detected! Execution was aborted by an interrupt signal."),
        ("INFO", "Finished in state Crashed("),
    ]
    assert any(text.startswith("Finished in state Failed") and "second line" in text for _, text in said)
    assert "Parameter validation failed for flow 'train'" in caplog.text


@pytest.mark.parametrize(
    ("url", "is_short"), [("http://host/api/flow_runs/1/set_state", True), ("http://host/api/blocks", False)]
)
def test_a_flow_run_that_prefect_has_lost_is_one_line(of_train, url, is_short):
    """It was `Encountered exception during execution: ObjectNotFound(None)`, above forty lines of Prefect's frames."""
    lost = ObjectNotFound(RuntimeError(f"Client error '404 Not Found' for url {url!r}"))
    record = logging.makeLogRecord(
        {
            "msg": "Encountered exception during execution: %r",
            "args": (lost,),
            "exc_info": (None, lost, None),
            **of_train,
        }
    )
    assert FlowLogFilter().filter(record)
    assert (record.exc_info is None) is is_short
    assert record.getMessage().startswith("Prefect's API does not know this flow run any more") is is_short


def test_a_final_state_that_prefect_refuses_is_one_line(of_train):
    request = httpx.Request("POST", "http://host/api/flow_runs/1/set_state")
    refused = httpx.HTTPStatusError("401 Unauthorized\nmore", request=request, response=httpx.Response(401, request=request))
    record = logging.makeLogRecord({"msg": "%r", "args": (1,), "exc_info": (None, refused, None), **of_train})
    assert FlowLogFilter().filter(record)
    assert record.exc_info is None
    said = "Prefect's API did not record the final state of this flow run: HTTPStatusError: 401 Unauthorized"
    assert record.getMessage() == said


@pytest.mark.parametrize("url", ["http://me:secret@host/api", "http://host/api"])
def test_a_line_whose_arguments_do_not_fit_is_left_to_logging(of_train, url):
    record = logging.makeLogRecord({"msg": "%d", "args": ("x",), **of_train})
    token = log_filter.is_called.set(True)
    try:
        with temporary_settings({PREFECT_API_URL: url}):
            assert FlowLogFilter().filter(record)
    finally:
        log_filter.is_called.reset(token)
    assert (record.msg, record.args) == ("%d", ("x",))


def test_the_login_of_prefects_api_is_in_no_line_that_all_its_users_see(of_train):
    url = "http://me:secret@host/api"
    request = httpx.Request("POST", f"{url}/flow_runs/1/set_state")
    with temporary_settings({PREFECT_API_URL: url}):
        with pytest.raises(httpx.HTTPStatusError) as caught:
            httpx.Response(503, request=request).raise_for_status()
        for fields in (
            {"msg": "away: %r", "args": (caught.value,)},
            {"msg": "%s", "args": (1,), "exc_info": (None, caught.value, None), **of_train},
        ):
            record = logging.makeLogRecord(fields)
            assert FlowLogFilter().filter(record)
            assert "for url 'http://host/api/flow_runs/1/set_state'" in record.getMessage()
            assert "secret" not in record.getMessage()
    record = logging.makeLogRecord({"msg": "to %s: 100%%", "args": ("sftp://me@host",)})
    assert FlowLogFilter().filter(record)
    assert record.getMessage() == "to sftp://me@host: 100%"


def test_a_timeout_of_the_caller_s_task_shows_the_frames_of_the_caller(monkeypatch):
    """Prefect logs it with all frames, and raises it to the flow, and prints it: three times seventy lines."""

    def interrupted(*_args, **_options):
        raise CancelledError

    monkeypatch.setattr(module, "call_for_result", interrupted)
    with pytest.raises(CancelledError) as caught:
        train("module:function")
    assert [Path(frame.filename).name for frame in traceback.extract_tb(caught.tb)] == [
        Path(__file__).name,
        "short_tracebacks.py",
    ]


@pytest.mark.parametrize("text", ["Beginning flow run 'a'", "Finished in state Completed()"])
def test_what_the_lines_with_a_training_s_location_say_is_not_said_twice(of_train, text):
    record = logging.makeLogRecord({"msg": text, "levelno": logging.INFO, **of_train})
    FlowLogFilter().filter(record)
    assert record.levelno == logging.DEBUG


def test_a_flow_of_here_under_another_name_logs_no_more_than_under_its_own(tmp_path, caplog):
    renamed = evaluate.with_options(name="renamed").with_options(retries=0)
    with pytest.raises(FileNotFoundError):
        renamed("json:loads", str(tmp_path), "none")
    with pytest.raises(ParameterTypeError):
        renamed("json:loads", str(tmp_path), 1)
    assert "Finished in state Failed" in caplog.text
    assert "Encountered exception" not in caplog.text
    assert "Parameter validation failed" not in caplog.text


def test_what_a_function_could_not_serialize_is_no_parameter_of_the_flow_run():
    error = ValueError("Circular reference detected (id repeated)")
    with pytest.raises(ValueError, match=r"^Circular") as caught, large_parameters_explained():
        raise error from RankFailedError(f"rank 0 failed: ValueError: {error}", 0, "user", error)
    assert caught.value is error


def test_the_flow_run_s_record_has_the_first_line_of_a_long_message(of_train):
    state = Failed(message="it broke\n  in 'this' line\nand that")
    record = logging.makeLogRecord({"msg": f"Finished in state {state}", **of_train})
    assert FlowLogFilter().filter(record)
    assert record.getMessage() == """Finished in state Failed("it broke")"""


def test_a_frozen_program_is_refused_before_it_starts_itself_as_if_it_were_python(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(RuntimeError, match="is a frozen program and no Python"):
        train("trainings:train_epochs")
