"""One real Prefect server for all trainings of this folder."""

import pytest
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from prefect_servers import end_senders


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    with (
        temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        end_senders()
        yield
