"""A real Prefect server, storages, and the command `prefect-torch` in this process."""

import json

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import PrefectServer, senders_follow
from prefect_torch.deployments.command_line.program import run


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """Let clients in this process talk to it; its `api` is for other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.1")  # else each event is known after 5 s
        server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    try:
        server.start()
        with senders_follow(temporary_settings({PREFECT_API_URL: server.api})):
            yield server
    finally:
        server.stop()


@pytest.fixture(params=["local", "s3"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "local":
        (tmp_path / "storage").mkdir()
        return str(tmp_path / "storage")
    server = request.getfixturevalue("moto")
    for name, value in server.options().items():
        monkeypatch.setenv(name.upper(), value)
    return f"s3://{server.new_bucket()}/folder"


@pytest.fixture
def local(tmp_path):
    (tmp_path / "storage").mkdir()
    return str(tmp_path / "storage")


@pytest.fixture
def command(capsys):
    """Run a command in this process; return its exit code, what it printed, and what it said on stderr."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert err.count("\n") <= 1, err
        return code, out, err

    return call


@pytest.fixture
def as_json(command):
    def call(name, *arguments):
        code, out, err = command(name, *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no strict JSON"))

    return call
