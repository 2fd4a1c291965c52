"""What is built holds everything, and what is installed without our pins, so with the newest of all, imports and trains."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import prefect_torch
import pytest
import tomllib
from linked_torch import link_torch
from packaging.requirements import Requirement
from prefect_servers import PrefectServer
from prefect_torch.deployments.command_line.doctor.software_checks import FASTAPI, SQLALCHEMY

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ["package", "ckpt", "tasks", "flows", "deployments"]
SOURCES = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# Their frameworks are extras.
INTEGRATIONS = ("prefect_torch.ckpt.accelerate", "prefect_torch.ckpt.lightning", "prefect_torch.ckpt.transformers")
OFFLINE = "pip reaches no registry"

pytestmark = pytest.mark.timeout(600)  # a test that installs waits for the registry

IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys
import prefect_torch
names = [module.name for module in pkgutil.walk_packages(prefect_torch.__path__, "prefect_torch.")]
for name in names:
    if not name.startswith({INTEGRATIONS!r}):
        importlib.import_module(name)
from importlib.metadata import distribution
for entry_point in distribution("prefect-torch").entry_points:
    entry_point.load()
print(prefect_torch.__version__, len(names), *[name for name in sys.modules if name.startswith("prefect.server")])
"""
TRAINING = """
from prefect_torch.ckpt import report


def train_fn(config):
    for step in range(3):
        report({"step": step}, state={"step": step})
    return "trained"
"""
TRAIN = """
from prefect_torch.flows import RunConfig, ScalingConfig, train

if __name__ == "__main__":
    print(train("my_training:train_fn", scaling=ScalingConfig(num_workers=2), run=RunConfig(name="run")).return_value)
"""


def test_every_folder_of_modules_is_a_listed_package():
    """What is not listed is missing from the wheel, and nothing but an import of it would tell."""
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = {folder: package for package, folder in setuptools["package-dir"].items()}
    assert packages == {str(folder): _package(folder) for folder in {source.parent for source in SOURCES}}
    assert sorted(setuptools["packages"]) == sorted(packages.values())
    assert all((ROOT / folder / "__init__.py").exists() for folder in packages)


def _package(folder: Path) -> str:
    parts = folder.parts[1:] if folder.parts[0] == "package" else folder.parts
    return ".".join(["prefect_torch", *parts])


def test_the_caps_of_the_extra_are_those_that_doctor_knows_and_the_constraints_keep():
    caps = {one.name: one for one in map(Requirement, PYPROJECT["project"]["optional-dependencies"]["server"])}
    known = {library.name: f"<{'.'.join(map(str, library.first_refused))}" for library in (FASTAPI, SQLALCHEMY)}
    assert {name: str(cap.specifier) for name, cap in caps.items()} == known
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert all(cap.specifier.contains(pins[name]) for name, cap in caps.items())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    for name in [*FOLDERS, "pyproject.toml", "MANIFEST.in", "constraints.txt", "README.md", "LICENSE"]:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, sources / name)
    (sources / "tests").mkdir()
    (sources / "tests/test_loose.py").touch()  # setuptools takes such files along, without what they need
    _build(sources, f"build_sdist({str(built)!r})")
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(sources / "unpacked", filter="data")
    (unpacked,) = (sources / "unpacked").iterdir()
    _build(unpacked, f"build_wheel({str(built)!r})")
    return built


def _build(sources: Path, call: str) -> None:
    _run([sys.executable, "-c", f"from setuptools import build_meta; build_meta.{call}"], sources)


def _run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_sdist_carries_no_loose_tests_and_the_wheel_every_module(built):
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        carried = {Path(name).relative_to(sdist.name.removesuffix(".tar.gz")) for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {Path("constraints.txt"), Path("LICENSE"), *SOURCES} <= carried
    assert not [path for path in carried if path.parts[:1] == ("tests",)]
    for source in SOURCES:
        assert f"{_package(source.parent).replace('.', '/')}/{source.name}" in names
    data = ("job_templates/kubernetes.json", "command_line/ray/equivalents.json")
    assert {"prefect_torch/py.typed", *(f"prefect_torch/deployments/{name}" for name in data)} <= names


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Path:
    """An interpreter with the wheel and the newest of all that it needs; only torch, which is gigabytes, is this one's."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    probe = subprocess.run([*pip, "--no-deps", "tenacity"], capture_output=True, text=True, check=False)
    if probe.returncode != 0 and "CI" not in os.environ:
        pytest.skip(f"{OFFLINE}: {probe.stderr[-200:]}")
    link_torch(folder / "venv", folder / "torch")
    (wheel,) = built.glob("*.whl")
    _run([*pip, str(wheel)], folder)
    return python


def test_without_our_pins_everything_is_imported_and_no_server(clean, tmp_path):
    """With the newest fastapi, Prefect's server cannot even be imported, and whoever has a remote API never needs it."""
    found = _run([str(clean), "-c", IMPORT_EVERYTHING], tmp_path, PREFECT_API_URL="http://127.0.0.1:9/api")
    # A framework that is not installed hides what is in its folder; prefect_torch itself is not among what it holds.
    hidden = {source for source in SOURCES if source.name != "__init__.py" and _package(source.parent) in INTEGRATIONS}
    assert found.split() == [prefect_torch.__version__, str(len(SOURCES) - len(hidden) - 1)]


@pytest.fixture
def training(tmp_path) -> list[str]:
    (tmp_path / "my_training.py").write_text(TRAINING)
    (tmp_path / "train.py").write_text(TRAIN)
    return ["train.py"]


def test_without_our_pins_it_trains_with_an_api_elsewhere(clean, training, tmp_path):
    server = PrefectServer(tmp_path / "server")
    server.start()
    try:
        assert _run([str(clean), *training], tmp_path, PREFECT_API_URL=server.api).split()[-1] == "trained"
    finally:
        server.stop()


def test_without_our_pins_a_server_that_does_not_run_is_refused_with_what_to_install(clean, training, tmp_path):
    done = subprocess.run(
        [str(clean), *training],
        cwd=tmp_path,
        env={**os.environ, "PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:  # Prefect has mended it
        assert done.stdout.split()[-1] == "trained"
        return
    *_, last = done.stderr.splitlines()
    assert re.fullmatch(
        r"ImportError: the server of prefect \S+, which a flow starts unless PREFECT_API_URL names another, does not run with "
        r"fastapi \S+ and sqlalchemy \S+ \(.+\): pip install 'fastapi<0.151' 'sqlalchemy<2.1', or set PREFECT_API_URL",
        last,
    )
