"""Base job templates, against Prefect's own, and rendered as workers render them."""

import asyncio
import json
from importlib.resources import files

import pytest
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessWorker
from prefect_torch.deployments import job_template
from prefect_torch.deployments.work_pools import KINDS

# What Prefect's server offers in its own form for a new work pool, with no worker installed.
VIEW = files("prefect.server.api").joinpath("collections_data/views/aggregate-worker-metadata.json")
COLLECTIONS = {kind: view for views in json.loads(VIEW.read_text()).values() for kind, view in views.items()}


def rendered(kind, values=None, defaults=None):
    """Return a job's configuration as a worker fills it in; a docker or kubernetes worker need not be installed."""

    class Configuration(BaseJobConfiguration, extra="allow"):
        pass

    configuration = asyncio.run(
        Configuration.from_template_and_values(job_template(kind, **(defaults or {})), values or {}, client=object())
    )
    return configuration.model_dump()


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_and_setting_of_prefects_own_template_is_kept(kind):
    ours, theirs = job_template(kind), COLLECTIONS[kind]["default_base_job_configuration"]
    assert set(ours["variables"]["properties"]) >= set(theirs["variables"]["properties"])
    assert set(ours["job_configuration"]) >= set(theirs["job_configuration"])
    own = {} if kind == "process" else {"command": "prefect-torch execute"}
    for name, variable in theirs["variables"]["properties"].items():
        assert ours["variables"]["properties"][name].get("default") == own.get(name, variable.get("default")), name


def test_the_process_template_has_what_the_installed_worker_has():
    ours, theirs = job_template("process"), ProcessWorker.get_default_base_job_template()
    assert set(ours["variables"]["properties"]) == {"visible_gpus", *theirs["variables"]["properties"]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_is_used_and_described_in_a_sentence(kind):
    template = job_template(kind)
    used = json.dumps(template["job_configuration"])
    for name, variable in template["variables"]["properties"].items():
        assert f"{{{{ {name} }}}}" in used or name == "env", name
        assert variable["description"].endswith((".", ")")), name


def test_a_process_sees_the_gpus_it_is_given_and_its_environment():
    environment = rendered("process", {"visible_gpus": "2,3", "env": {"A": "b"}})["env"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3", "A": "b"}
    assert rendered("process")["env"] == {}


def test_a_container_asks_for_gpus_and_shared_memory_beside_what_else_is_said():
    created = rendered("docker", {"num_gpus": 4, "shared_memory": "16g", "ipc_mode": "host"})
    assert created["command"] == "prefect-torch execute"
    assert created["container_create_kwargs"] == {
        "device_requests": [{"Driver": "nvidia", "Count": 4, "Capabilities": [["gpu"]]}],
        "shm_size": "16g",
        "init": True,
        "ipc_mode": "host",
    }


def test_a_container_asks_for_certain_gpus_where_they_are_named():
    request = {"Driver": "nvidia", "DeviceIDs": ["2", "3"], "Capabilities": [["gpu"]]}
    created = rendered("docker", defaults={"gpu_ids": ["2", "3"]})
    assert created["container_create_kwargs"]["device_requests"] == [request]
    created = rendered("docker", {"gpu_ids": ["2", "3"], "num_gpus": 0})  # Docker takes either
    assert created["container_create_kwargs"]["device_requests"] == [{**request, "Count": 0}]
    assert "num_gpus" not in job_template("docker", gpu_ids=["2"])["variables"]["properties"]  # deploy() would set it


def test_a_container_without_gpus_needs_no_driver():
    amd = {"num_gpus": 0, "devices": ["/dev/kfd", "/dev/dri"]}
    created = rendered("docker", defaults=amd)
    assert created["container_create_kwargs"] == {"init": True, "shm_size": "8g", "devices": ["/dev/kfd", "/dev/dri"]}
    assert not {"num_gpus", "gpu_ids"} & set(job_template("docker", **amd)["variables"]["properties"])


def test_a_pod_asks_for_gpus_shared_memory_and_time_to_end():
    job = rendered("kubernetes", {"num_gpus": 4, "shared_memory": "16Gi", "termination_grace_s": 90, "memory_limit": "64Gi"})
    pod = job["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64Gi"}
    assert container["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_defaults_of_a_work_pool_can_be_chosen():
    assert rendered("kubernetes", defaults={"num_gpus": 8})["job_manifest"]["spec"]["template"]["spec"]["containers"][0][
        "resources"
    ]["limits"] == {"nvidia.com/gpu": 8}
    with pytest.raises(ValueError, match="have no variable 'gpus': they have num_gpus, "):
        job_template("docker", gpus=1)
    with pytest.raises(ValueError, match="'ecs': give one of process, docker, kubernetes"):
        job_template("ecs")
