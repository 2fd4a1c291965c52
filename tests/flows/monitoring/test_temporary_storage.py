"""What the log says of a storage that ends with its flow run."""

import logging
import uuid

import pytest
from prefect import flow
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.flow_engine import run_flow
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.deployments import job_template
from prefect_torch.flows import RunConfig
from prefect_torch.flows.monitoring import temporary_storage
from prefect_torch.flows.monitoring.temporary_storage import is_mounted, warn_of_temporary_storage


@pytest.fixture
def warnings_in(client, monkeypatch, caplog):
    """A function that returns the warnings of a training in a flow that a worker has begun."""
    monkeypatch.setattr(temporary_storage, "get_run_logger", lambda: logging.getLogger("of-a-run"))

    def warnings_in(kind, storage):
        @flow
        def training():
            warn_of_temporary_storage(CheckpointStore.open(storage, "run"), RunConfig(storage=storage))

        @flow
        def pipeline():
            training()

        pool = f"{kind}-{uuid.uuid4().hex[:8]}"
        client.create_work_pool(WorkPoolCreate(name=pool, type=kind, base_job_template=job_template(kind)))
        deployment_id = client.create_deployment(client.create_flow(pipeline), pool, work_pool_name=pool)
        run_flow(pipeline, flow_run=client.create_flow_run_from_deployment(deployment_id))
        return [it.getMessage() for it in caplog.records if it.name == "of-a-run"]

    return warnings_in


def test_a_directory_of_a_container_is_warned_of(warnings_in, monkeypatch):
    """A deployment cannot have one, but any flow run of it, by `--param run=...`."""
    monkeypatch.setattr(temporary_storage, "is_mounted", lambda _: False)
    (told,) = warnings_in("docker", "./checkpoints")
    assert told.startswith("storage './checkpoints' is a directory of a container, which is lost with it: ")


@pytest.mark.parametrize(
    ("kind", "storage", "mounted"), [("docker", "./checkpoints", True), ("docker", "/srv", False), ("process", "./c", False)]
)
def test_a_volume_and_a_directory_of_a_machine_are_not(warnings_in, monkeypatch, kind, storage, mounted):
    monkeypatch.setattr(temporary_storage, "is_mounted", lambda _: mounted)
    assert warnings_in(kind, storage) == []


def test_what_is_on_another_file_system_is_mounted():
    assert is_mounted("/proc/self/missing")
    assert not is_mounted("/missing")
