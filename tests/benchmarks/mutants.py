"""Whether tests notice defects: a fixed list of small changes of the core, each of which some test must fail for.

    python tests/benchmarks/mutants.py [--only ckpt/runs]

Each change is made in a copy of the package, which tests import instead of the installed one; nothing here is changed. A mutant
is "killed" if its tests fail, and "survived" if they pass, which is a missing test. The copy without any change must pass them.
The score is written to tests/benchmarks/results/mutants.txt.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/benchmarks/results/mutants.txt"
FOLDERS = ("ckpt", "tasks", "flows", "deployments")


@dataclass(frozen=True)
class Mutant:
    """One occurrence of `old` in `path` becomes `new`; the first one, if there are several."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants_of(path: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(path, old, new, tuple(tests.split())) for old, new in changes]


MUTANTS = [
    *mutants_of(
        "ckpt/runs/retention.py",
        "tests/ckpt/runs/test_retention.py",
        ("return (0, 0.0)", "return (3, 0.0)"),
        ("return (1, 0.0)", "return (2, 0.0)"),
        ('value if order == "max" else -value', "value"),
        ("value < 1", "value < 0"),
        ("isinstance(value, bool) or not isinstance(value, int)", "not isinstance(value, int)"),
        ("if attribute is None:", "if False:"),
        ("keep_last: int = 1", "keep_last: int = 2"),
    ),
    *mutants_of(
        "ckpt/storage/keys.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        ('name in ("", ".", "..")', 'name in ("", ".")'),
        ('name in ("", ".", "..")', 'name in (".", "..")'),
        ('"\\\\" in key or ', ""),
        (' or any(character < " " for character in key)', ""),
        ("_TEMPORARY.fullmatch(name)", "_TEMPORARY.match(name[:5])"),
    ),
    *mutants_of(
        "ckpt/storage/retry.py",
        "tests/ckpt/storage/test_retry.py",
        ("isinstance(error, (FileNotFoundError, ValueError))", "isinstance(error, FileNotFoundError)"),
        ("isinstance(error, (FileNotFoundError, ValueError))", "isinstance(error, ValueError)"),
        ("(StorageError, ConnectionError, TimeoutError)", "(StorageError, ConnectionError)"),
        ("(StorageError, ConnectionError, TimeoutError)", "(ConnectionError, TimeoutError)"),
        ("error.errno in _TRANSIENT_ERRNOS", "error.errno not in _TRANSIENT_ERRNOS"),
        ('return "credentials"', 'return "final"'),
        ("token = _retries_end.set(event)", "token = _retries_end.set(threading.Event())"),
    ),
    *mutants_of(
        "ckpt/storage/local.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        ("_unlink(way, [temporary])", "pass"),
        ("_require_whole(file, written, self._path(key))", "pass"),
        ("way.replace(temporary, name)", "way.replace(name, temporary)"),
        ("if needed_bytes > free_bytes:", "if False:"),
        ("os.fsync(file.fileno())", "pass"),
    ),
    *mutants_of(
        "ckpt/storage/cloud_blocks.py",
        "tests/ckpt/storage/test_cloud_specs.py",
        ('.lstrip("?")', ""),
        ('fields.get("defaultendpointsprotocol", "https")', '"http"'),
        ("if account is None:", "if False:"),
        ('options["allow_http"] = "true"', "pass"),
    ),
    *mutants_of(
        "ckpt/runs/attempts.py",
        "tests/ckpt/runs/test_attempts.py",
        ("return alike and self != other", "return alike"),
        ("_start_ticks(self.pid) != self.started or not _exists(self.pid)", "not _exists(self.pid)"),
        ("checkpoint_id if is_id(checkpoint_id) else None", "checkpoint_id"),
    ),
    *mutants_of(
        "tasks/rank/failures.py",
        "tests/tasks/rank/test_failures.py",
        ('(StorageFullError, "user")', '(StorageFullError, "infrastructure")'),
        ('(FencedError, "final")', '(FencedError, "user")'),
        ('(MemoryError, "out_of_memory")', '(MemoryError, "user")'),
        ('"withdrawn": "user"', '"withdrawn": "infrastructure"'),
    ),
    *mutants_of(
        "tasks/training/restarts.py",
        "tests/tasks/training/test_restarts.py",
        ("self._here[kind] += 1", "self._here[kind] += 0"),
        ("return not self._is_used_up(kind)", "return True"),
        ("else sum(budgets)", "else max(budgets)"),
        ("if self._earlier is not None or not self._is_rerun:", "if True:"),
    ),
    *mutants_of("tasks/prune_task.py", "tests/flows/test_pruning.py", ("check_fence(store, attempt)", "pass")),
]


def main() -> None:
    """Try the mutants and write the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the beginning of paths")
    chosen = [mutant for mutant in MUTANTS if mutant.path.startswith(parser.parse_args().only)]
    for tests in {mutant.tests for mutant in chosen}:
        unchanged = Mutant("ckpt/storage/keys.py", "", "", tests)
        assert try_out(unchanged) == "survived", f"{' '.join(tests)} fail without any change"
    lines = []
    for mutant in chosen:
        lines.append(f"{try_out(mutant):8}  {mutant.path}: {mutant.old!r} -> {mutant.new!r}")
        print(lines[-1], flush=True)
    killed = sum(line.startswith("killed") for line in lines)
    RESULTS.write_text("\n".join([f"{killed} of {len(lines)} mutants were killed by their tests.", "", *lines, ""]))


def try_out(mutant: Mutant) -> str:
    """Return what becomes of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "prefect_torch")
        shutil.copytree(ROOT / "package", package)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, package / name)
        target = package / mutant.path
        text = target.read_text()
        assert mutant.old in text, f"{mutant.path} has no {mutant.old!r} any more"
        target.write_text(text.replace(mutant.old, mutant.new, 1))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "killed" if done.returncode == 1 else "survived"


if __name__ == "__main__":
    main()
