"""Installs the wheel into a clean environment of another Python, without constraints, and uses it from elsewhere.

    python tests/wheel_check.py python3.12 [--torch 'torch==2.13.0'] [--without-torch]

By default: every module is imported, and the demo trains, loses a rank and resumes. Without torch (gigabytes, where it has
no build for CPUs): the modules of checkpoints that need no torch are imported, and a stored run is verified through a block.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
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
IMPORT_ALL = """
import importlib, pkgutil
import prefect_torch
names = [it.name for it in pkgutil.walk_packages(prefect_torch.__path__, "prefect_torch.")]
extras = ("prefect_torch.ckpt.lightning", "prefect_torch.ckpt.transformers", "prefect_torch.ckpt.accelerate")
for name in names:
    if not name.startswith(extras):
        importlib.import_module(name)
print(prefect_torch.__version__, len(names))
"""


def main() -> None:
    """Check one Python, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python")
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--without-torch", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), options)


def check(folder: Path, options: argparse.Namespace) -> None:
    """Build, install, import and use the wheel below `folder`."""
    run([options.python, "-m", "venv", str(folder / "venv")])
    python = folder / "venv/bin/python"
    wheel = build(folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(STORED_RUN, elsewhere / "stored")
    if options.without_torch:
        requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        run([python, "-m", "pip", "install", "-q", *[it for it in requirements if not it.startswith("torch")]])
        run([python, "-m", "pip", "install", "-q", "--no-deps", wheel])
        run([python, "-c", IMPORT_CHECKPOINTS.replace("{run}", str(elsewhere / "stored"))], elsewhere)
    else:
        run([python, "-m", "pip", "install", "-q", *shlex.split(options.torch)])
        run([python, "-m", "pip", "install", "-q", f"{wheel}[server]", "scikit-learn"])
        run([python, "-c", IMPORT_ALL], elsewhere)
        shutil.copytree(ROOT / "examples", elsewhere / "examples")
        run([python, elsewhere / "examples/digits.py"], elsewhere)
    version = run([python, "--version"]).strip()
    print(f"{version}: {'imported without torch' if options.without_torch else 'imported, trained, resumed'}", flush=True)


def build(folder: Path) -> Path:
    """Return a wheel made of a copy of the sources, so that nothing of the checkout's environment is in it."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, sources / name)
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "dist", sources])
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def run(command: list[str | Path], folder: Path | None = None) -> str:
    """Return the output of a command, which sees no setting of Python or Prefect of its caller.

    Raises:
        SystemExit: If it fails, with its output.

    """
    environment = {name: it for name, it in os.environ.items() if not name.startswith(("PYTHON", "PREFECT_"))}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
