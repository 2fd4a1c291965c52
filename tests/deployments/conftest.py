"""Storages, and the command `prefect-torch` in this process."""

import json

import pytest
from prefect_torch.deployments.command_line.program import run


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
