"""A return value that Prefect would take for the end of a task run: an exception, or a state."""

from dataclasses import dataclass
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import is_state_iterable


@dataclass(frozen=True, slots=True)
class Returned:
    """Holds a value that a function has returned.

    Attributes:
        value: The value.

    """

    value: Any


def held(value: Any) -> Any:
    """Return what a task returns in the place of `value`, so that the task run completes whatever it is."""
    return Returned(value) if isinstance(value, BaseException | State) or is_state_iterable(value) else value


def released(returned: Any) -> Any:
    """Return the value of `held`."""
    return returned.value if isinstance(returned, Returned) else returned
