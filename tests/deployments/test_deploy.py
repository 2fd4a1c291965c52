"""Deployments in work pools of a real server."""

import math
import re
import sys
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from uuid import uuid4

import my_training
import numpy as np
import pytest
from forked_programs import run_program
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.deployments import run_deployment
from prefect.exceptions import MissingResult
from prefect.flow_engine import run_flow
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.deployments import (
    create_work_pool,
    deploy,
    job_template,
    make_deployment,
    plan_deployment,
    serve,
    server_settings,
)
from prefect_torch.deployments.planning import _look_at_pool
from prefect_torch.deployments.work_pools import KINDS
from prefect_torch.flows import FailureConfig, KubernetesCluster, Result, RunConfig, ScalingConfig, train

OWN_FLOWS = (Path(__file__).parents[2] / "docs/how-to/own-flows.md").read_text()
ON_S3 = RunConfig(storage="s3://bucket/runs")
IN_PLACE = {"prefect.deployments.steps.set_working_directory": {"directory": "."}}
IMAGE = {kind: {} if kind == "process" else {"image": "registry/train"} for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def work_pools(prefect_server):
    for kind in KINDS:
        create_work_pool(f"{kind}-pool", kind, **IMAGE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_takes_each_template_and_a_second_call_changes_its_defaults(client, kind):
    name, value = ("visible_gpus", "1") if kind == "process" else ("num_gpus", 8)
    known = client.read_work_pool(f"{kind}-pool")
    assert (known.type, name in known.base_job_template["variables"]["properties"]) == (kind, True)
    assert create_work_pool(f"{kind}-pool", kind, **IMAGE[kind], **{name: value}) == known.id
    changed = client.read_work_pool(f"{kind}-pool")
    assert changed.base_job_template["variables"]["properties"][name]["default"] == value


def test_a_work_pool_of_another_type_is_left_alone(client):
    with pytest.raises(ValueError, match="'process-pool' exists already, with the type 'process'"):
        create_work_pool("process-pool", "docker")
    assert client.read_work_pool("process-pool").type == "process"


def test_a_function_is_deployed_to_processes_where_it_and_its_storage_are_found(client):
    deployment = client.read_deployment(deploy("local", "my_training:train_fn", {"epochs": 3}, work_pool="process-pool"))
    assert deployment.entrypoint == "prefect_torch.flows.training.train"
    assert deployment.parameters["train_fn"] == "my_training:train_fn"
    assert deployment.parameters["config"] == {"epochs": 3}
    assert (deployment.work_pool_name, deployment.job_variables) == ("process-pool", {"working_dir": str(Path.cwd())})


def test_a_function_itself_is_deployed_by_its_name(client, tmp_path, monkeypatch):
    deployment = client.read_deployment(deploy("itself", my_training.train_fn, work_pool="process-pool"))
    assert deployment.parameters["train_fn"] == "my_training:train_fn"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(
        "from prefect_torch.deployments import make_deployment\n"
        "def train_fn(config): pass\n"
        "if __name__ == '__main__':\n    print(make_deployment('itself', train_fn).parameters['train_fn'])\n"
    )
    done = run_program([sys.executable, "program.py"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "program.py:train_fn"
    with pytest.raises(ValueError, match="<lambda> exists in this process only: define it at the top level"):
        deploy("nameless", lambda: None, work_pool="process-pool")


@pytest.mark.parametrize("wrong", ["my_training:train_function", "my_trainings:train_fn", "my_training.py:train_fn"])
def test_a_function_that_does_not_exist_is_told_at_once(wrong):
    with pytest.warns(
        UserWarning, match=f"train_fn '{wrong}': .*; flow runs fail unless the worker's machine has it"
    ) as caught:
        deploy("missing", wrong, work_pool="process-pool")
    assert [it.filename for it in caught] == [__file__]
    deploy("missing", wrong, work_pool="process-pool", job_variables={"working_dir": "/elsewhere"})
    deploy("missing", wrong, run=ON_S3, work_pool="docker-pool")
    with pytest.raises(ValueError, match=f"train_fn '{wrong}': "):
        serve(make_deployment("missing", wrong))


@pytest.mark.parametrize(
    "unset", [{"restore_defaults": {PREFECT_API_URL}}, {"updates": {PREFECT_API_URL: ""}}], ids=["unset", "empty"]
)
def test_a_schedule_without_a_server_that_runs_it_is_told(monkeypatch, unset):
    """The server that a process starts itself runs no schedules."""
    served = []
    monkeypatch.setattr("prefect.serve", lambda *deployments: served.extend(it.name for it in deployments))
    monkeypatch.setattr("prefect_torch.deployments.training.end_restarts", lambda *_, **__: None)
    monkeypatch.setattr("prefect_torch.deployments.training._end_cron", lambda _: None)
    nightly = make_deployment("nightly", "my_training:train_fn", cron="0 3 * * *")
    serve(nightly)
    with temporary_settings(**unset):
        serve(make_deployment("called", "my_training:train_fn"))
        with pytest.warns(UserWarning, match="no schedule runs: .*server start`, and set PREFECT_API_URL") as caught:
            serve(nightly)
    assert [it.filename for it in caught] == [__file__]
    assert served == ["nightly", "called", "nightly"]


def test_a_config_that_prefect_does_not_take_is_refused_in_one_sentence(client):
    large = {"samples": "x" * 600_000}
    told = (
        r"^the parameters have 600,\d+ bytes, and Prefect's server takes less than 524,288: put data .* path into the config$"
    )
    with pytest.raises(ValueError, match=told):
        deploy("large", "my_training:train_fn", large, work_pool="process-pool")
    with pytest.raises(ValueError, match=told):
        train("my_training:train_fn", large)


CIRCLE = {"a": []}
CIRCLE["a"].append(CIRCLE)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"clip": math.inf},
            r"config\['clip'\] is inf, which Prefect's API does not return as it is: give text, for example, and",
        ),
        ({"net": {"drop": [0.1, math.nan]}}, r"config\['net'\]\['drop'\]\[1\] is nan"),
        ({"seed": 2**64}, r"config\['seed'\] is an integer of more than 64 bits"),
        ({"clip": -math.inf, "mode": HTTPStatus.OK}, r"config\['clip'\] is -inf"),
        ({"at": ({5: 0.1},)}, r"config\['at'\]\[0\] has the key 5"),
        ({"file": "caf\udce9"}, r"config\['file'\] has a lone surrogate or a NUL"),
        ({"seed": np.int64(5)}, r"config\['seed'\] is a numpy.int64"),
        ({"circle": CIRCLE}, "a parameter is nested too deeply for Prefect, or holds itself"),
    ],
)
def test_a_config_that_prefect_would_change_is_refused(config, told):
    """Infinity became None, and a dict of numbers one of texts."""
    with pytest.raises(ValueError, match=f"^{told}"):
        deploy("changed", "my_training:train_fn", config, work_pool="process-pool")


def test_a_config_is_given_to_the_function_as_json(client):
    config = {
        "betas": (0.9, np.float64(0.5)),
        "seed": 2**64 - 1,
        "data": Path("/data"),
        "none": None,
        "flag": True,
        "same": [[], []],
    }
    found = client.read_deployment(deploy("json", "my_training:train_fn", config, work_pool="process-pool"))
    assert found.parameters["config"] == {**config, "betas": [0.9, 0.5], "data": "/data"}


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_containers_are_asked_for_a_gpu_for_each_rank(client, kind):
    scaling = ScalingConfig(num_workers=4, use_gpu=True)
    options = {"work_pool": f"{kind}-pool", "image": "registry/train:1", "job_variables": {"shared_memory": "32g"}}
    first = deploy(
        "remote", "my_training:train_fn", None, scaling, ON_S3, cron="0 3 * * *", timezone="Europe/Berlin", **options
    )
    deployment = client.read_deployment(first)
    assert deployment.job_variables == {"num_gpus": 4, "shared_memory": "32g", "image": "registry/train:1"}
    assert deployment.schedules[0].schedule.timezone == "Europe/Berlin"
    assert deploy("remote", "my_training:train_fn", run=ON_S3, **options) == first
    assert client.read_deployment(first).job_variables["num_gpus"] == 0


def test_gpus_that_are_named_are_not_counted_too(client):
    scaling, ids = ScalingConfig(num_workers=2, use_gpu=True), ["0", "1"]
    named = {"work_pool": "docker-pool", "job_variables": {"gpu_ids": ids}}
    deployment = client.read_deployment(deploy("named", "my_training:train_fn", None, scaling, ON_S3, **named))
    assert deployment.job_variables == {"num_gpus": 0, "gpu_ids": ids}


def test_checkpoints_that_would_vanish_with_their_container_are_refused():
    with pytest.raises(ValueError, match=r"'./checkpoints' is a directory of a container, which is lost with it"):
        deploy("lost", "my_training:train_fn", work_pool="docker-pool")
    with pytest.raises(ValueError, match=r"'~/checkpoints' is a directory of a container.*, or the absolute path of a volume"):
        deploy("lost", "my_training:train_fn", run=RunConfig(storage="~/checkpoints"), work_pool="docker-pool")
    with pytest.raises(ValueError, match=r"give RunConfig\(storage=...\) a URL or a block$"):  # no volume is mounted there
        deploy("lost", "my_training:train_fn", work_pool="kubernetes-pool")
    deploy("volume", "my_training:train_fn", run=RunConfig(storage="/volume/runs"), work_pool="docker-pool")


@pytest.mark.parametrize(
    ("kind", "job_variables", "grace_s", "most"),
    [
        ("process", {}, 26, 25),
        ("docker", {"command": "prefect flow-run execute"}, 26, 25),
        ("kubernetes", {}, 56, 55),
        ("kubernetes", {"termination_grace_s": 90}, 86, 85),
    ],
)
def test_a_grace_that_will_not_hold_is_warned_of(recwarn, kind, job_variables, grace_s, most):
    def deploy_with(grace_s):
        failure, options = FailureConfig(grace_s=grace_s), {"work_pool": f"{kind}-pool", "job_variables": job_variables}
        deploy("graceful", "my_training:train_fn", run=ON_S3, failure=failure, **options)

    deploy_with(most)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=f"grace_s={grace_s} is too long: .* give at most grace_s={most}"):
        deploy_with(grace_s)


def page_program(part):
    """Return the program of the page about own flows that starts a deployment, and has `part` in it."""
    programs = (it for it in re.findall(r"```python\n(.*?)```", OWN_FLOWS, re.DOTALL) if "run_deployment(" in it)
    (program,) = (it for it in programs if part in it)
    return program


def test_the_flow_runs_of_the_page_about_own_flows_have_the_whole_config_and_a_storage(client):
    found = deploy("digits", "my_training:train_fn", {"epochs": 5, "lr": 0.1}, run=ON_S3, work_pool="process-pool")
    exec(page_program("timeout=0"), {})
    made = client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found])))
    assert sorted(it.parameters["run"]["name"] for it in made) == ["lr-0.01", "lr-0.1"]
    assert all(set(it.parameters["config"]) == {"epochs", "lr"} for it in made)
    assert {it.parameters["run"].get("storage") for it in made} == {"s3://bucket/trainings"}


def test_a_program_of_the_page_about_own_flows_reads_the_result_of_its_flow_run(client, tmp_path, monkeypatch, capsys):
    deploy("digits", "my_training:train_fn", work_pool="process-pool")

    def run_here(name, parameters):
        """Stand for a worker, which would run the flow run while `run_deployment` waits."""
        flow_run = run_deployment(name, parameters=parameters, timeout=0)
        run_flow(train, client.read_flow_run(flow_run.id))
        return client.read_flow_run(flow_run.id)

    monkeypatch.setattr("prefect.deployments.run_deployment", run_here)
    variables = {}
    exec(page_program("Result.from_storage").replace("s3://bucket/trainings", str(tmp_path)), variables)
    (run,) = list_runs(str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == f"{Result.from_storage(str(tmp_path), run).path} {{}}"
    with pytest.raises(MissingResult):
        variables["flow_run"].state.result()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "process"])
def test_containers_without_an_image_of_the_training_are_refused(client, kind):
    create_work_pool(f"plain-{kind}", kind)
    options = {"run": ON_S3, "work_pool": f"plain-{kind}"}
    with pytest.raises(ValueError, match=f"containers of work pool 'plain-{kind}' would have Prefect's image"):
        deploy("imageless", "my_training:train_fn", **options)
    for given in ({"image": "i:1"}, {"job_variables": {"image": "i:1"}}):
        deployment = client.read_deployment(deploy("imageless", "my_training:train_fn", **options, **given))
        assert deployment.job_variables["image"] == "i:1"


def test_a_deployment_that_moves_to_processes_has_their_directory_again(client):
    found = deploy("moved", "my_training:train_fn", run=ON_S3, work_pool="docker-pool")
    assert client.read_deployment(found).pull_steps == [IN_PLACE]
    assert deploy("moved", "my_training:train_fn", run=ON_S3, work_pool="process-pool") == found
    assert not client.read_deployment(found).pull_steps


def test_a_deployment_that_is_served_leaves_its_work_pool_and_so_does_its_resumer(client, monkeypatch):
    """The pool's workers went on to take its flow runs, without the job variables."""
    deploy("served", "my_training:train_fn", run=ON_S3, work_pool="process-pool", work_queue="some", max_restarts=1)
    monkeypatch.setattr("prefect.serve", lambda *given: [Runner().add_deployment(it) for it in given])
    serve(make_deployment("served", "my_training:train_fn", run=ON_S3), max_restarts=1)
    for name in ("train/served", "resume/train-served"):
        found = client.read_deployment_by_name(name)
        assert (found.work_pool_name, found.work_queue_name, found.job_variables) == (None, None, {})


def test_a_deployment_waits_in_the_work_queue_that_it_names(client):
    options = {"work_pool": "process-pool"}
    found = deploy("urgent", "my_training:train_fn", **options, work_queue="high", max_restarts=1)
    assert client.read_deployment(found).work_queue_name == "high"
    assert client.read_deployment_by_name("resume/train-urgent").work_queue_name == "high"
    assert deploy("urgent", "my_training:train_fn", **options) == found
    assert client.read_deployment(found).work_queue_name == "default"


def test_schedules_that_somebody_added_stay_and_that_of_an_earlier_call_ends(client):
    def crons(deployment_id):
        return sorted(getattr(it.schedule, "cron", "by hand") for it in client.read_deployment_schedules(deployment_id))

    options = {"work_pool": "process-pool"}
    found = deploy("scheduled", "my_training:train_fn", **options)
    client.create_deployment_schedules(found, [(IntervalSchedule(interval=timedelta(hours=1)), True)])
    deploy("scheduled", "my_training:train_fn", **options)
    assert crons(found) == ["by hand"]
    deploy("scheduled", "my_training:train_fn", **options, cron="0 3 * * *")
    deploy("scheduled", "my_training:train_fn", **options, cron="0 4 * * *")
    assert crons(found) == ["0 4 * * *"]
    client.create_deployment_schedules(found, [(IntervalSchedule(interval=timedelta(hours=1)), True)])
    deploy("scheduled", "my_training:train_fn", **options)
    assert crons(found) == ["by hand"]


def test_what_somebody_has_paused_stays_paused(client):
    def deploy_again():
        return deploy("held", "my_training:train_fn", run=ON_S3, work_pool="process-pool", cron="0 3 * * *")

    def is_paused():
        known = client.read_deployment(found)
        (schedule,) = known.schedules
        return known.paused, not schedule.active

    found = deploy_again()
    assert is_paused() == (False, False)
    client.pause_deployment(found)
    deploy_again()
    assert is_paused() == (True, False)
    client.resume_deployment(found)
    (schedule,) = client.read_deployment_schedules(found)
    client.update_deployment_schedule(found, schedule.id, active=False)
    deploy_again()
    assert is_paused() == (False, True)


def test_a_deployment_whose_serve_has_ended_is_not_paused_in_its_work_pool(client):
    made = make_deployment("ended", "my_training:train_fn", run=ON_S3)
    client.pause_deployment(made.apply())
    found = deploy("ended", "my_training:train_fn", run=ON_S3, work_pool="process-pool")
    assert not client.read_deployment(found).paused


def test_a_work_pool_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="there is no work pool 'gone': create it with `prefect work-pool create gone"):
        deploy("nowhere", "my_training:train_fn", work_pool="gone")


@pytest.mark.parametrize(("kind", "job_variables"), [("docker", {}), ("kubernetes", {"termination_grace_s": 700})])
def test_a_grace_longer_than_prefects_server_lets_a_cancellation_take_is_warned_of(recwarn, monkeypatch, kind, job_variables):
    def deploy_with(grace_s):
        failure, options = FailureConfig(grace_s=grace_s), {"work_pool": f"{kind}-pool", "job_variables": job_variables}
        deploy("cancelled", "my_training:train_fn", run=ON_S3, failure=failure, **options)

    cleanup = {"enabled": True, "cancelling_timeout_seconds": 300.0}
    monkeypatch.setattr(server_settings, "_read", lambda _: {"services": {"cancellation_cleanup": cleanup}})
    deploy_with(295)
    assert len(recwarn) == 0
    with pytest.warns(UserWarning, match="a cancelled flow run .* 300 s .* at most grace_s=295, or a larger PREFECT_SERVER_"):
        deploy_with(296)
    cleanup["enabled"] = False
    deploy_with(600)
    monkeypatch.setattr(server_settings, "_read", lambda _: {})  # of Prefect Cloud
    deploy_with(600)


def test_a_block_is_named_in_the_parameters_and_must_be_saved(prefect_server):
    block = CheckpointStorage(storage="s3://bucket/of-a-block")
    with pytest.raises(ValueError, match="an unsaved block"):
        make_deployment("blocked", "my_training:train_fn", run=RunConfig(storage=block))
    block.save("of-a-test")
    deployment = make_deployment("blocked", "my_training:train_fn", run=RunConfig(storage=block))
    assert deployment.parameters["run"]["storage"] == "checkpoint-storage/of-a-test"


def test_restarts_are_looked_after_in_the_same_work_pool_without_a_gpu(client):
    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    deploy("watched", "my_training:train_fn", None, scaling, ON_S3, work_pool="kubernetes-pool", image="i:1", max_restarts=5)
    resumer = client.read_deployment_by_name("resume/train-watched")
    assert resumer.work_pool_name == "kubernetes-pool"
    assert resumer.job_variables == {"num_gpus": 0, "image": "i:1"}
    assert resumer.pull_steps == client.read_deployment_by_name("train/watched").pull_steps == [IN_PLACE]
    (automation,) = client.read_automations_by_name("Resume train/watched")
    assert automation.actions[0].deployment_id == resumer.id
    assert automation.actions[0].parameters["max_restarts"] == 5


@pytest.mark.parametrize("are_defaults", [False, True])
def test_restarts_need_no_node_as_large_as_that_of_the_training(client, are_defaults):
    """The node was what was lost: the run's name was busy until there was another."""
    arch, gpu = {"kubernetes.io/arch": "amd64"}, {"nvidia.com/gpu.product": "NVIDIA-H200"}
    given = {"node_selector": {**arch, **gpu}, "memory_request": "500Gi", "cpu_limit": "64"}
    create_work_pool("large-pool", "kubernetes", image="i:1", **(given if are_defaults else {}))
    variables = {"finished_job_ttl": 9, **({} if are_defaults else given)}
    deploy("large", "my_training:train_fn", run=ON_S3, work_pool="large-pool", job_variables=variables, max_restarts=1)
    assert client.read_deployment_by_name("resume/train-large").job_variables == {
        **variables,
        "num_gpus": 0,
        "node_selector": arch,
        "memory_request": "0",
        "cpu_request": "0",
    }


def test_a_deployment_is_planned_with_its_work_pool(tmp_path, command, as_json):
    (tmp_path / "store").mkdir()
    options = {
        "scaling": ScalingConfig(num_workers=4, use_gpu=True),
        "run": RunConfig(name="run", storage=str(tmp_path / "store")),
        "failure": FailureConfig(grace_s=20),
    }
    deploy("planned", "elsewhere:train_fn", work_pool="docker-pool", job_variables={"num_gpus": 2}, **options)
    planned = plan_deployment("train/planned")
    assert not planned.would_begin
    lines = {line.subject: (line.status, line.text) for line in planned.lines}
    assert lines["gpus"] == ("wrong", "4 needed, and work pool 'docker-pool' is asked for 2 (num_gpus)")
    assert lines["function"] == ("ok", "looked for in the image of work pool 'docker-pool' alone")
    assert lines["grace"][0] == "ok"
    assert "`docker stop` needs --time 25 for a container of work pool 'docker-pool'" in lines["grace"][1]
    params = '{"scaling": {"num_workers": 2, "use_gpu": true}, "failure": {"grace_s": 90}}'
    told = as_json("plan", "planned", "--params", params)
    assert told["would_begin"]
    assert [line["text"] for line in told["lines"] if line["status"] == "warning"] == []
    assert [line["text"] for line in told["lines"] if "--time 95" in line["text"]]
    code, out, err = command("plan", "train/planned")
    assert (code, err) == (1, "")
    assert "wrong    gpus         4 needed" in out


@pytest.fixture
def planned_away_from(client, tmp_path, monkeypatch):
    """Return a function that plans a deployment, made and planned in a directory that has nothing of `code`."""
    code, away = tmp_path / "code", tmp_path / "away"
    code.mkdir()
    away.mkdir()
    module = f"of_{uuid4().hex}"  # the search path of this process keeps the directories of earlier tests
    (code / f"{module}.py").write_text("def train_fn(config): pass\n")
    monkeypatch.chdir(away)

    def planned(working_dir, pull_steps=None):
        run = RunConfig(name="run", storage="./checkpoints")
        variables = {"working_dir": working_dir}
        made = deploy("away", f"{module}:train_fn", run=run, work_pool="process-pool", job_variables=variables)
        if pull_steps is not None:
            found = client.read_deployment(made)
            kept = found.model_dump(include={"name", "flow_id", "entrypoint", "parameters", "work_pool_name", "job_variables"})
            client.create_deployment(pull_steps=pull_steps, **kept)
        lines = {line.subject: line for line in plan_deployment("away").lines}
        assert Path.cwd() == away
        assert not (away / "checkpoints").exists()
        return lines

    return code, planned


@pytest.mark.parametrize("is_pulled", [False, True], ids=["working_dir", "pull"])
def test_a_plan_looks_for_the_function_and_the_storage_where_the_flow_run_begins(planned_away_from, is_pulled):
    code, planned = planned_away_from
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "code"}}
    shell = {"prefect.deployments.steps.run_shell_script": {"script": "true"}}
    lines = planned(str(code.parent), [step, shell]) if is_pulled else planned(str(code))
    assert lines["function"].status == "ok"
    assert lines["storage"].text.startswith(f"{code}/checkpoints: wrote, listed, read and deleted")
    assert "start" in lines


@pytest.mark.parametrize(
    ("working_dir", "pull_steps", "place"),
    [
        ("/elsewhere", None, "/elsewhere, which this machine lacks"),
        (None, None, "a directory that each flow run makes itself"),
        (
            "/tmp",
            [
                {"prefect.deployments.steps.git_clone": {"repository": "https://host/code"}},
                {"prefect.deployments.steps.set_working_directory": {"directory": "part"}},
            ],
            "a directory that each flow run makes itself",
        ),
    ],
)
def test_a_plan_says_that_the_directory_of_the_flow_run_is_not_here(planned_away_from, working_dir, pull_steps, place):
    lines = planned_away_from[1](working_dir, pull_steps)
    assert lines["function"].text == f"not looked for: the flow run begins in {place}"
    assert lines["storage"].text.startswith(f"storage './checkpoints' was not checked: it is in {place}")
    assert {lines["function"].status, lines["storage"].status} == {"warning"}
    assert "start" not in lines


def test_a_planned_grace_is_compared_with_those_of_the_flow_run_and_of_the_pods_of_its_ranks():
    pods = ScalingConfig(num_workers=8, use_gpu=True, cluster=KubernetesCluster(termination_grace_s=60))
    options = {"run": ON_S3, "work_pool": "kubernetes-pool", "job_variables": {"termination_grace_s": 120}}
    deploy("pods", "elsewhere:train_fn", None, pods, failure=FailureConfig(grace_s=90), **options)
    flow_run = "a flow run of work pool 'kubernetes-pool' is killed 120 s"
    grace = [line for line in plan_deployment("train/pods").lines if line.subject == "grace"]
    assert [(line.status, "a pod is killed 60 s" in line.text, flow_run in line.text) for line in grace] == [
        ("warning", True, False),
        ("ok", False, True),
    ]


def test_a_storage_that_vanishes_with_its_container_is_told_without_the_run_that_this_machine_has(
    tmp_path, monkeypatch, as_json
):
    monkeypatch.chdir(tmp_path)
    deploy("vanishing", "elsewhere:train_fn", run=RunConfig(name="run", storage="s3://bucket/runs"), work_pool="docker-pool")
    told = as_json("plan", "vanishing", "--params", '{"run": {"name": "run"}}')
    assert told["would_begin"]
    lines = {line["subject"]: line["status"] for line in told["lines"]}
    assert lines == {"function": "ok", "gpus": "ok", "grace": "ok", "storage": "warning"}


@pytest.mark.parametrize(
    ("defaults", "job_variables", "status", "text"),
    [
        ({}, {"num_gpus": 2}, "wrong", "is asked for 2 (num_gpus)"),
        ({}, {"num_gpus": -1}, "ok", "is asked for all of a machine (num_gpus=-1)"),
        ({}, {"num_gpus": 0, "gpu_ids": ["0", "1"]}, "wrong", "is asked for 2 (gpu_ids)"),
        ({"gpu_ids": ["0", "1", "2", "3"]}, {}, "ok", "is asked for 4 (gpu_ids)"),
        ({"num_gpus": 0, "devices": ["/dev/kfd"]}, {}, "ok", "has no variable that says how many a container has"),
    ],
)
def test_the_gpus_of_a_container_are_those_that_it_is_asked_for(defaults, job_variables, status, text):
    template = job_template("docker", **defaults)
    pool = WorkPool(name="a-pool", type="docker", base_job_template=template, default_queue_id=uuid4())
    arguments = {"scaling": ScalingConfig(num_workers=4, use_gpu=True), "run": RunConfig(storage="~/runs", working_dir="/work")}
    lines = {line.subject: (line.status, line.text) for line in _look_at_pool(pool, job_variables, arguments)}
    assert lines["gpus"] == (status, f"4 needed, and work pool 'a-pool' {text}")
    assert lines["working_dir"] == ("ok", "looked for in the image of work pool 'a-pool' alone")
    assert lines["storage"][0] == "warning"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "there is no deployment 'train/nowhere'; those deployed are: "),
        (["--params", "{"], "--params is no JSON"),
        (["--params", "[]"], "--params is no JSON object"),
        ([], "the parameters lack the training function"),
        (
            ["--params", '{"train_fn": "my_training:train_fn", "ranks": 3}'],
            "train() got an unexpected keyword argument 'ranks'; it takes ",
        ),
        (["--params", '{"train_fn": "my_training:train_fn", "scaling": {"num_workers": "x"}}'], "num_workers"),
    ],
)
def test_a_plan_of_nothing_says_what_is_missing(command, arguments, told):
    code, _, err = command("plan", *arguments)
    assert code in (1, 2)
    assert told in err
