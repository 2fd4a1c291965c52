"""Trainings that store their checkpoints with blocks of prefect-gcp and prefect-azure."""

import uuid

import pytest
from prefect_torch.flows import RunConfig, train


def save(block):
    name = f"test-{uuid.uuid4().hex[:8]}"
    block.save(name)
    return f"{block.get_block_type_slug()}/{name}"


def test_cloud_blocks_are_found_by_their_names(azurite):
    azure_credentials = pytest.importorskip("prefect_azure.credentials").AzureBlobStorageCredentials  # not by every worker
    azure_container = pytest.importorskip("prefect_azure.blob_storage").AzureBlobStorageContainer
    credentials = azure_credentials(connection_string=azurite.connection_string())
    block = azure_container(container_name=azurite.new_container(), credentials=credentials)
    result = train("trainings:train_epochs", {"epochs": 2}, run=RunConfig(name="run", storage=save(block)))
    assert result.path == f"az://{block.container_name}/run"
    again = train("trainings:train_epochs", {"epochs": 3}, run=RunConfig(name="run", storage=block))
    assert again.return_value == {"begun": 2, "attempt": 2}
    other = train(
        "trainings:train_epochs", {"epochs": 3}, run=RunConfig(name="other", storage=block), resume_from=result.checkpoint.path
    )
    assert other.return_value == {"begun": 2, "attempt": 1}
