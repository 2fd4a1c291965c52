"""What a run of tests/gpu found, in one file that a person can send: versions, devices, outcomes and figures."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("prefect-torch", "prefect", "torch", "lightning", "transformers", "accelerate", "numpy")
ROOT = Path(__file__).parents[2]


@dataclass
class Results:
    """The outcome of every test, and the figures that tests record."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def record(self, test: str, outcome: str, seconds: float, reason: str = "") -> None:
        """Record how a test ended; the worst of its phases counts."""
        if self.outcomes.get(test) in (None, "passed"):
            self.outcomes[test] = outcome
            if reason:
                self.reasons[test] = reason
        self.seconds[test] = round(self.seconds.get(test, 0.0) + seconds, 2)

    def ran(self) -> bool:
        """Return whether any test ran."""
        return any(outcome != "skipped" for outcome in self.outcomes.values())

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**surroundings(), **asdict(self)}, indent=1) + "\n")


def surroundings() -> dict[str, Any]:
    """Return what the results depend on: the machine and its software, without names of users or hosts."""
    return {
        "command": sys.argv[1:],
        "commit": _first_line("git", "rev-parse", "HEAD"),
        "is_changed": bool(_first_line("git", "status", "--porcelain", "--untracked-files=no")),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "links": _output("nvidia-smi", "topo", "-m"),
        "gpus": [_describe(index) for index in range(torch.cuda.device_count())],
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("CUDA_", "NCCL_", "PYTORCH_"))},
    }


def _describe(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    output = _output(*command)
    return None if output is None else (output.splitlines() or [""])[0]


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # there is no such program, or no driver
        return None
