"""A real Prefect server, for the tests of this folder that ask for one."""

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import PrefectServer, end_senders


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """Let clients in this process talk to it; its `api` is for other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.1")  # else each event is known after 5 s
        server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    try:
        server.start()
        with temporary_settings({PREFECT_API_URL: server.api}):
            end_senders()
            yield server
    finally:
        server.stop()
