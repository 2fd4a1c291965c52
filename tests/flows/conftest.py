"""One real Prefect server for all trainings of this folder."""

import pytest
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings
from prefect_servers import server_of_this_process


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    with temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120}), server_of_this_process():
        yield
