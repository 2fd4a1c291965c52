"""Trainings that schedules and the Prefect UI start, and the command `prefect-torch`.

Lazy for one reason: the command looks at a folder of checkpoints in a fraction of the seconds that importing prefect takes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .training import make_deployment, serve

__all__ = ["make_deployment", "serve"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import training  # noqa: PLC0415 - only when something is asked for

    return getattr(training, name)
