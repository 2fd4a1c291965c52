"""The versions that the machines of a training must share."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import prefect_torch


def versions() -> dict[str, str]:
    """Return the local versions of torch, of this package, and of Python, whose minor version pickled functions depend on.

    That of this package is the one that this process runs, also after an upgrade of its files.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": _installed("torch"), "prefect-torch": prefect_torch.__version__}


def explain_mixture(theirs: Mapping[str, str]) -> str | None:
    """Return how `theirs` differ from the versions here; None if they do not."""
    ours = versions()
    differ = [f"{name} {theirs.get(name)}, here {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
    return f"it has other versions: {'; '.join(differ)}" if differ else None


def _installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]  # builds for other devices are compatible
    except PackageNotFoundError:
        return "not installed"
