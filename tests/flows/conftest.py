"""One real Prefect server for all trainings of this folder, and the run that most of them train."""

import subprocess
from copy import deepcopy
from functools import cache

import pytest
from forked_programs import PopenOfProgram
from prefect.blocks.core import Block
from prefect_torch.ckpt.storage import opening
from prefect_torch.flows import RunConfig


@pytest.fixture(scope="session", autouse=True)
def programs_begin_without_imports():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", PopenOfProgram)
        yield


@pytest.fixture(scope="session", autouse=True)
def trainings_have_a_server(programs_begin_without_imports, prefect_server):
    """Begin the server before the first test, whose time it would take."""


@pytest.fixture(scope="module", autouse=True)
def saved_blocks_are_deleted(trainings_have_a_server, prefect_server):
    """Leave no block to the next file: an error that lists all of them would not fit on a screen."""
    yield
    prefect_server.delete_blocks()


@pytest.fixture(scope="session", autouse=True)
def schemas_made_once():
    """Remember the schemas of blocks: Prefect makes that of a class for each field of each block that is saved."""
    made = cache(Block.model_json_schema.__func__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Block, "model_json_schema", classmethod(lambda cls, *args, **options: deepcopy(made(cls, *args, **options)))
        )
        yield


@pytest.fixture
def opened(monkeypatch):
    """The storages that this process opens, each time anew: of a bucket, with a search for a login, and new connections."""
    urls, open_spec = [], opening.open_spec

    def listed(spec, renew=None):
        urls.append(spec.url)
        return open_spec(spec, renew)

    monkeypatch.setattr(opening, "open_spec", listed)
    return urls


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="run", storage=str(tmp_path / "store"))
