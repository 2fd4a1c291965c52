"""What is built holds everything, and no server is imported; tests/wheel_check.py uses the wheel in a clean environment."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import prefect_torch
import pytest
from lowest_versions import PYPROJECT, lowest
from packaging.requirements import Requirement
from prefect_torch.deployments.command_line.doctor.software_checks import FASTAPI, SQLALCHEMY
from wheel_programs import IMPORT_EVERYTHING, REFUSED, TRAIN, TRAINING

ROOT = Path(__file__).parents[1]
FOLDERS = ["package", "ckpt", "tasks", "flows", "deployments"]
# Before another name joins: `python -c "from pydantic import NAME"` with that version.
OF_PYDANTIC_2_10_1 = {
    *("BaseModel", "BeforeValidator", "ConfigDict", "Field", "FiniteFloat", "GetJsonSchemaHandler", "GetPydanticSchema"),
    *("HttpUrl", "InstanceOf"),
    *("PlainSerializer", "SecretStr", "SerializeAsAny", "SerializerFunctionWrapHandler", "TypeAdapter", "ValidationError"),
    *("ValidationInfo", "ValidatorFunctionWrapHandler", "WithJsonSchema", "WrapSerializer", "WrapValidator"),
    *("field_serializer", "field_validator", "model_serializer", "model_validator"),
}
SOURCES = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_folder_of_modules_is_a_listed_package():
    """What is not listed is missing from the wheel, and nothing but an import of it would tell."""
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = {folder: package for package, folder in setuptools["package-dir"].items()}
    assert packages == {str(folder): _package(folder) for folder in {source.parent for source in SOURCES}}
    assert sorted(setuptools["packages"]) == sorted(packages.values())
    assert all((ROOT / folder / "__init__.py").exists() for folder in packages)


def test_what_pydantic_itself_gives_is_in_its_lowest_version():
    """Later versions give more names; those that 2.10.1 has elsewhere are imported from there."""
    trees = [ast.parse((ROOT / source).read_text()) for source in SOURCES]
    imports = [it for tree in trees for it in ast.walk(tree) if isinstance(it, ast.ImportFrom) and it.module == "pydantic"]
    assert "pydantic==2.10.1" in lowest(PYPROJECT["project"]["dependencies"])
    assert {alias.name for it in imports for alias in it.names} <= OF_PYDANTIC_2_10_1


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
def without_fastapi(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """What a program printed that imports everything and then trains, where Prefect's server cannot even be imported."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "fastapi.py").write_text("raise ImportError('boom')")
    (folder / "my_training.py").write_text(TRAINING)
    (folder / "train.py").write_text(f"{IMPORT_EVERYTHING}\n{TRAIN}")
    command, environment = [sys.executable, "train.py"], {**os.environ, "PREFECT_API_URL": "", "PREFECT_HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_everything_is_imported_and_no_server(without_fastapi):
    """Whoever has a remote API never needs it, and with the newest fastapi it does not run."""
    expected = [prefect_torch.__version__, str(len(SOURCES) - 1)]  # prefect_torch is not among what it holds
    assert without_fastapi.stdout.split() == expected, without_fastapi.stderr[-4000:]


def test_a_server_that_does_not_run_is_refused_with_what_to_install(without_fastapi):
    *_, last = without_fastapi.stderr.splitlines()
    assert re.fullmatch(REFUSED, last)
    assert "(ImportError: boom)" in last
