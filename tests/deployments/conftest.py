"""A real Prefect server, storages, and the command `prefect-torch` in this process."""

import json
from contextlib import ExitStack

import pytest
from prefect_servers import server_in_use
from prefect_torch.deployments.command_line.program import run


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.1")  # else each event is known after 5 s
            server = stack.enter_context(server_in_use(tmp_path_factory.mktemp("prefect")))
        yield server


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
