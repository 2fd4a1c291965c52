"""The versions that the machines of a training must share."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "prefect-torch")


def versions() -> dict[str, str]:
    """Return the local versions of torch, of this package, and of Python, whose minor version pickled functions depend on."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), **{name: _version(name) for name in _PACKAGES}}


def explain_mixture(theirs: Mapping[str, str]) -> str | None:
    """Return how `theirs` differ from the versions here; None if they do not."""
    ours = versions()
    differ = [f"{name} {theirs.get(name)}, here {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
    return f"it has other versions: {'; '.join(differ)}" if differ else None


def _version(name: str) -> str:
    try:
        return version(name).partition("+")[0]  # builds for other devices are compatible
    except PackageNotFoundError:
        return "not installed"
