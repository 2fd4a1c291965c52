"""The lowest versions that requirements allow."""

from packaging.requirements import Requirement


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement at its lowest version."""
    return [f"{it.name}=={at.version}" for it in map(Requirement, requirements) for at in it.specifier if at.operator == ">="]
