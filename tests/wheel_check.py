"""Installs the wheel into a clean environment of each of some Pythons, without constraints, and uses it from elsewhere.

    python tests/wheel_check.py [python3.11 ...] [--torch 'torch==2.13.0'] [--linked-torch] [--without-torch python3.12 ...]
                                [--record]

Every module is imported, none of Prefect's server with them; it trains with an API elsewhere; without one, it trains or says
which server to install; with the extra that brings one, the demo trains, loses a rank and resumes. --linked-torch, for CI: on
the torch of the Python that runs this program, which has to be of the same version. With the Pythons of --without-torch
(gigabytes, where it has no build for CPUs): the modules of checkpoints that need no torch are imported, and a stored run is
verified through a block. --record writes the outcomes to tests/benchmarks/results/wheel_check.txt.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests/support"), str(ROOT / "tests/benchmarks")]
from linked_torch import link_torch  # noqa: E402 - here and below: found by the line above
from lowest_versions import PYPROJECT  # noqa: E402
from prefect_servers import PrefectServer  # noqa: E402
from result_file import write_results  # noqa: E402
from wheel_programs import IMPORT_EVERYTHING, INTEGRATIONS, REFUSED, TRAIN, TRAINING  # noqa: E402

SOURCES = (
    "package",
    "ckpt",
    "tasks",
    "flows",
    "deployments",
    "pyproject.toml",
    "MANIFEST.in",
    "constraints.txt",
    "README.md",
    "LICENSE",
)
STORED_RUN = ROOT / "tests/support/stored_run_of_0_1"
PREFECT = "from importlib.metadata import version; print(version('prefect'))"
IMPORT_CHECKPOINTS = """
import importlib, pkgutil
import prefect_torch, prefect_torch.ckpt
from prefect_torch.ckpt.blocks import CheckpointStorage
names = [it.name for it in pkgutil.walk_packages(prefect_torch.ckpt.__path__, "prefect_torch.ckpt.")]
parts = ("state", "lightning", "transformers", "accelerate", "framework_folders")
for name in names:
    if not any(f".ckpt.{part}" in name for part in parts):
        importlib.import_module(name)
store = CheckpointStorage(location=r"{run}").get_store("run")
assert [store.verify(manifest) for manifest in store.list()]
print(prefect_torch.__version__, len(names))
"""


def main() -> None:
    """Check each Python, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="python")
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--linked-torch", action="store_true")
    parser.add_argument("--without-torch", nargs="+", default=[], metavar="PYTHON")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    pythons = [*options.pythons, *options.without_torch]
    if not pythons:
        parser.error("name a Python")
    outcomes = []
    for name in pythons:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(check(name, Path(folder), options))
        print(outcomes[-1], flush=True)
    if options.record:
        write_results("wheel_check.txt", 1, outcomes)


def check(name: str, folder: Path, options: argparse.Namespace) -> str:
    """Build, install, import and use the wheel below `folder`, and return what was done with which versions."""
    without_torch = name in options.without_torch
    run([name, "-m", "venv", "--without-pip", folder / "venv"])
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    wheel = build(folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(STORED_RUN, elsewhere / "stored")
    if without_torch:
        requirements = PYPROJECT["project"]["dependencies"]
        run([*pip, *[it for it in requirements if not it.startswith("torch")]])
        run([*pip, "--no-deps", wheel])
        run([python, "-c", IMPORT_CHECKPOINTS.replace("{run}", str(elsewhere / "stored"))], elsewhere)
    else:
        if options.linked_torch:
            link_torch(folder / "venv", folder / "torch")
        else:
            run([*pip, *shlex.split(options.torch)])
        run([*pip, wheel])
        import_everything(python, wheel, elsewhere)
        train_without_server(python, elsewhere)
        run([*pip, f"{wheel}[server]", "scikit-learn"])
        shutil.copytree(ROOT / "examples", elsewhere / "examples")
        run([python, elsewhere / "examples/digits.py"], elsewhere)
    version = run([python, "--version"]).strip()
    outcome = "imported without torch, a stored run verified" if without_torch else "imported, trained, resumed"
    return f"{version}: {outcome}; prefect {run([python, '-c', PREFECT]).strip()}, the newest of all else"


def import_everything(python: Path, wheel: Path, folder: Path) -> None:
    """Import all modules but those whose frameworks are extras, and no server: with some versions it cannot be imported."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [Path(name) for name in archive.namelist() if name.endswith(".py")]
    hidden = [it for it in sources if it.name != "__init__.py" and ".".join(it.parent.parts) in INTEGRATIONS]
    imported = run([python, "-c", IMPORT_EVERYTHING], folder, PREFECT_API_URL="http://127.0.0.1:9/api").split()
    if imported[1:] != [str(len(sources) - len(hidden) - 1)]:  # prefect_torch is not among what it holds
        raise SystemExit(f"of {len(sources)} modules, with {len(hidden)} that need extras, and the server's: {imported[1:]}")


def train_without_server(python: Path, folder: Path) -> None:
    """Train with an API elsewhere, and with an embedded server; if the newest libraries do not run it, that is said."""
    server = PrefectServer(folder / "server")
    server.start()
    try:
        far = train(python, folder / "far", PREFECT_API_URL=server.api)
    finally:
        server.stop()
    near = train(python, folder / "near")
    if not is_trained(far):
        raise failed(far)
    if not is_trained(near) and not is_refused(near):
        raise failed(near)


def train(python: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Train in a folder of its own, and return what the program came to."""
    folder.mkdir()
    (folder / "my_training.py").write_text(TRAINING)
    (folder / "train.py").write_text(TRAIN)
    return execute([python, "train.py"], folder, **settings)


def is_trained(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether it trained."""
    return done.returncode == 0 and done.stdout.split()[-1:] == ["trained"]


def is_refused(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether its last line says what to install."""
    return done.returncode != 0 and re.fullmatch(REFUSED, done.stderr.rstrip().rpartition("\n")[2]) is not None


def build(folder: Path) -> Path:
    """Return a wheel made of a copy of the sources, so that nothing of the checkout's environment is in it."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, sources / name)
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "dist", sources])
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def run(command: list[str | Path], folder: Path | None = None, **settings: str) -> str:
    """Return the output of a command, which sees no setting of Python or Prefect of its caller but `settings`.

    Raises:
        SystemExit: If it fails, with its output.

    """
    done = execute(command, folder, **settings)
    if done.returncode != 0:
        raise failed(done)
    return done.stdout


def failed(done: subprocess.CompletedProcess[str]) -> SystemExit:
    """Return the error of a command that did not do what it should, with its output."""
    return SystemExit(f"{shlex.join(map(str, done.args))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def execute(command: list[str | Path], folder: Path | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Return what a command came to; see `run`."""
    environment = {name: it for name, it in os.environ.items() if not name.startswith(("PYTHON", "PREFECT_"))}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    if folder is not None:  # the newest Prefect would change the database of the user's, which then has no way back
        environment["PREFECT_HOME"] = str(folder / "prefect")
    environment.update(settings)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
