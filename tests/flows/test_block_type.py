"""The block type "Checkpoint Storage" as a server has it: what the UI shows of it, and that a saved block can be checked."""

import ast
import os
import sys
import uuid
from pathlib import Path

import prefect_torch
import pytest
from forked_programs import run_program
from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem
from prefect.settings import PREFECT_API_URL
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.storage.probe import StorageUnfitError
from prefect_torch.flows import TorchCluster

ROOT = Path(prefect_torch.__file__).parent


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    name = f"type-{uuid.uuid4().hex[:8]}"
    CheckpointStorage(location=str(tmp_path_factory.mktemp("place"))).save(name)  # which registers its type, too
    return name


def test_the_server_knows_its_picture_documentation_and_example(name):
    with get_client(sync_client=True) as client:
        block_type = client.read_block_type_by_slug("checkpoint-storage")
    assert (block_type.name, block_type.is_protected) == ("Checkpoint Storage", False)
    assert str(block_type.logo_url).startswith("https://")
    assert str(block_type.documentation_url).startswith("https://")
    assert block_type.description.endswith(".")
    assert 'CheckpointStorage.load("BLOCK_NAME")' in block_type.code_example


def test_every_field_of_its_form_has_a_title_and_a_sentence():
    fields = CheckpointStorage.model_json_schema()["properties"]
    assert set(fields) == {"location", "file_system", "password"}
    for field in fields.values():
        assert field["title"][0].isupper()
        assert field["description"].endswith(".")


def test_a_saved_block_can_be_checked(name, tmp_path):
    assert list(CheckpointStorage.load(name).check().took_s) == ["write", "list", "read", "write 8 MiB", "delete", "forget"]
    (tmp_path / "file").touch()
    CheckpointStorage(location=str(tmp_path / "file")).save(name, overwrite=True)
    with pytest.raises(StorageUnfitError, match="/file does not write"):
        CheckpointStorage.load(name).check()


def test_every_block_is_registered_from_the_root():
    command = [Path(sys.executable).with_name("prefect"), "block", "register", "-m", "prefect_torch"]
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    done = run_program(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully registered 2 blocks" in done.stdout
    assert "Checkpoint Storage" in done.stdout
    assert TorchCluster.get_block_type_slug().replace("-", " ").title() in done.stdout


class TestCheckpointStorage(BlockStandardTestSuite):
    """What Prefect asks of the blocks of every integration."""

    @pytest.fixture
    def block(self):
        return CheckpointStorage

    def test_has_a_valid_image(self, block):
        """The picture is Prefect's own, which its suite would fetch from the internet."""
        assert block._logo_url == LocalFileSystem._logo_url


def test_every_block_of_this_package_is_in_the_root_and_in_the_suite():
    """tests/flows/test_cluster_block.py has that of TorchCluster."""
    found = {node.name for file in ROOT.rglob("*.py") for node in ast.parse(file.read_text()).body if is_block(node)}
    assert found == {"CheckpointStorage", "TorchCluster"} <= set(prefect_torch.__all__)


def is_block(node):
    return isinstance(node, ast.ClassDef) and any(ast.unparse(parent).endswith("Block") for parent in node.bases)
