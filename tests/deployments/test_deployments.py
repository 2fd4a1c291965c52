import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commits import commit
from prefect.deployments.steps import set_working_directory
from prefect.flows import Flow
from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageSpec
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.deployments import make_deployment
from prefect_torch.deployments.restarts import make_resumer
from prefect_torch.deployments.resuming import resume
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    Hosts,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
    SyncConfig,
    evaluate,
    prune,
    train,
)
from prefect_torch.flows.arguments import committed_checkpoint
from prefect_torch.tasks.gang.engines import slurm_cluster
from prefect_torch.tasks.gang.engines.cluster import MachineRequest

ROOT = Path(__file__).parents[2]
ENTRIES = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_every_entrypoint_of_prefect_yaml_is_a_flow(entry):
    module, _, name = entry["entrypoint"].partition(":")
    assert isinstance(getattr(importlib.import_module(module), name), Flow)


def test_the_pull_step_in_the_comment_of_prefect_yaml_leads_to_the_code_in_the_image():
    (comment,) = re.findall(r"(?m)^#( +pull:\n(?:#  +.+\n)+)", (ROOT / "prefect.yaml").read_text())
    ((step,),) = yaml.safe_load(comment.replace("\n#", "\n")).values()
    (working_dir,) = re.findall(r"(?m)^WORKDIR (\S+)\n", (ROOT / "Dockerfile").read_text().partition("USER trainer")[2])
    assert step == {"prefect.deployments.steps.set_working_directory": {"directory": working_dir}}
    assert callable(set_working_directory)


def test_a_deployment_carries_its_parameters_as_json():
    deployment = make_deployment(
        "nightly",
        "my_training:train_fn",
        {"epochs": 3},
        ScalingConfig(num_workers=4),
        RunConfig(storage="s3://bucket/x"),
        cron="0 3 * * *",
        timezone="Europe/Berlin",
    )
    assert deployment.parameters == {
        "train_fn": "my_training:train_fn",
        "config": {"epochs": 3},
        "scaling": {"num_workers": 4},
        "run": {"storage": "s3://bucket/x"},
    }
    assert deployment.entrypoint == "prefect_torch.flows.training.train"
    assert deployment.schedules[0].schedule.timezone == "Europe/Berlin"


def test_a_deployment_has_no_setting_that_was_not_given_which_an_older_version_at_the_workers_might_refuse():
    scaling = ScalingConfig(cluster=SlurmCluster(partition="gpu"), backend=None)
    sync = SyncConfig(upload="a {source} {target}", download="b {source} {target}", target="c")
    checkpoint, failure = CheckpointConfig(num_to_keep=1), FailureConfig(retry_delay_s=5, max_failures=0)
    made = make_deployment("nightly", "m:f", scaling=scaling, run=RunConfig(sync=sync), checkpoint=checkpoint, failure=failure)
    assert made.parameters == {
        "train_fn": "m:f",
        "scaling": {"cluster": {"kind": "slurm", "partition": "gpu"}},
        "run": {"sync": {"upload": "a {source} {target}", "download": "b {source} {target}", "target": "c"}},
        "checkpoint": {"num_to_keep": 1},
        "failure": {"retry_delay_s": [5.0], "max_failures": 0},
    }
    assert ScalingConfig(**made.parameters["scaling"]) == scaling


def test_a_deployment_begins_from_a_checkpoint_of_another_run(tmp_path):
    store = CheckpointStore.open(str(tmp_path), "base")
    manifest = commit(store, 3)
    for given in (f"base/{manifest.id}", store.checkpoint(manifest), Path(store.path_of(manifest.id))):
        deployment = make_deployment("tuned", "my_training:train_fn", resume_from=given)
        assert (
            committed_checkpoint(deployment.parameters["resume_from"], StorageSpec(str(tmp_path))).checkpoint_id == manifest.id
        )
    with pytest.raises(ValueError, match="give a committed checkpoint, its path or URL, or 'run/id'"):
        make_deployment("tuned", "my_training:train_fn", resume_from=Checkpoint.from_directory(tmp_path))
    with pytest.raises(ValueError, match="the sftp:// URL holds credentials, which Prefect stores"):
        make_deployment("tuned", "my_training:train_fn", resume_from=f"sftp://me:s3cr3t@host/base/{manifest.id}")


@pytest.mark.parametrize("cluster", [Hosts(["gpu1"]), SlurmCluster()], ids=lambda cluster: cluster.kind)
def test_machines_have_the_interpreter_of_where_the_flow_runs_instead_of_where_it_was_deployed(monkeypatch, cluster):
    deployed = make_deployment("there", "my_training:train_fn", scaling=ScalingConfig(cluster=cluster)).parameters["scaling"]
    monkeypatch.setattr(sys, "executable", "/there/bin/python")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_cluster, "_nodes_of_job", lambda *_: "1")
    commands = []
    agents = SimpleNamespace(arguments=lambda *_, **__: [], run=lambda command, _: commands.append(command))
    with ScalingConfig(**deployed).cluster.lend(MachineRequest(1, 1, use_gpu=False, avoid=frozenset()), agents):
        assert [" /there/bin/python -m " in command.replace("'", " ") for command in commands] == [True]


def test_the_run_form_shows_every_parameter_with_its_description():
    schema = train.parameters.model_dump()
    assert list(schema["properties"]) == ["train_fn", "config", "scaling", "run", "checkpoint", "failure", "resume_from"]
    assert all(field.get("description") for field in schema["properties"].values()), schema["properties"]
    assert schema["properties"]["train_fn"]["type"] == "string"
    assert schema["required"] == ["train_fn"]
    for name in ("ScalingConfig", "RunConfig", "CheckpointConfig", "FailureConfig"):
        assert all(field.get("description") for field in schema["definitions"][name]["properties"].values())
    storage = schema["definitions"]["RunConfig"]["properties"]["storage"]
    slugs = {schema["definitions"][choice["$ref"].rpartition("/")[2]]["block_type_slug"] for choice in storage["anyOf"][1:]}
    assert {"checkpoint-storage", "local-file-system", "remote-file-system", "s3-bucket"} <= slugs
    assert CheckpointStorage._block_type_slug in slugs


def test_descriptions_are_sentences_and_no_docstrings():
    deployment = make_deployment("nightly", "trainings:train_epochs", scaling=ScalingConfig(num_workers=4))
    assert deployment.description == (
        "Trains `trainings:train_epochs` on 4 ranks. A failed or killed training resumes from its latest checkpoint."
    )
    for described in (train, evaluate, prune, resume, make_resumer("train/nightly")):
        assert described.description.endswith("."), described.name
        assert not re.search(r"Args:|Raises:|\n", described.description), described.name


def test_deployments_of_two_flows_with_one_name_are_resumed_apart():
    assert [make_resumer(f"{flow}/nightly").name for flow in ("train", "sweep")] == ["train-nightly", "sweep-nightly"]


def test_a_range_of_ranks_is_described_in_words():
    deployment = make_deployment("nightly", "trainings:train_epochs", scaling=ScalingConfig(num_workers=(2, 4)))
    assert deployment.description.startswith("Trains `trainings:train_epochs` on 2 to 4 ranks. ")
