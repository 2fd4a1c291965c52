"""One real Prefect server for all trainings of this folder."""

import subprocess
from copy import deepcopy
from functools import cache

import pytest
from forked_programs import PopenOfProgram
from prefect.blocks.core import Block
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings
from prefect_servers import server_of_this_process


@pytest.fixture(scope="session", autouse=True)
def programs_begin_without_imports():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", PopenOfProgram)
        yield


@pytest.fixture(scope="session", autouse=True)
def prefect_server(programs_begin_without_imports):
    with temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120}), server_of_this_process():
        yield


@pytest.fixture(scope="session", autouse=True)
def schemas_made_once():
    """Remember the schemas of blocks: Prefect makes that of a class for each field of each block that is saved."""
    made = cache(Block.model_json_schema.__func__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Block, "model_json_schema", classmethod(lambda cls, *args, **options: deepcopy(made(cls, *args, **options)))
        )
        yield
