"""Flows that Prefect's decorators bind to a work pool of ours: the job that each decorator asks for."""

import asyncio
import sys

import pytest
from prefect import flow
from prefect_torch.deployments.work_pools import job_template
from prefect_torch.flows import RunConfig, ScalingConfig, train


@flow
def research(storage: str) -> str:
    result = train("my_training:train_fn", scaling=ScalingConfig(num_workers=2), run=RunConfig(name="run", storage=storage))
    return result.return_value


def job(bound, kind):
    """Return the job that the worker of a bound flow would submit to a work pool with our template."""
    values = {**bound.job_variables, "command": "a bundle's"}
    return asyncio.run(bound.worker_cls.job_configuration.from_template_and_values(job_template(kind), values))


def test_a_container_of_the_docker_decorator_has_its_gpus_and_shared_memory(prefect_server):
    from prefect_docker.decorators import docker  # noqa: PLC0415 - it imports a client: in one worker, not in each

    options = job(docker("pool", num_gpus=2, shared_memory="4g")(research), "docker").container_create_kwargs
    assert options["device_requests"][0]["Count"] == 2
    assert options["shm_size"] == "4g"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="prefect-kubernetes with the decorator requires Python 3.11")
def test_a_pod_of_the_kubernetes_decorator_has_its_gpus_shared_memory_and_grace(prefect_server):
    from prefect_kubernetes.decorators import kubernetes  # noqa: PLC0415 - it imports two clients: in one worker, not in each

    bound = kubernetes("pool", num_gpus=2, shared_memory="4Gi", termination_grace_s=120)(research)
    pod = job(bound, "kubernetes").job_manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "4Gi"
    assert pod["terminationGracePeriodSeconds"] == 120
