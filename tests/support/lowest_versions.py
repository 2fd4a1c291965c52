"""What pyproject.toml says, and the lowest versions that its requirements allow."""

import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it there

PYPROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement at its lowest version."""
    return [f"{it.name}=={at.version}" for it in map(Requirement, requirements) for at in it.specifier if at.operator == ">="]
