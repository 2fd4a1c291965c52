"""What the results of trainings and of sweeps have in common: hints for attributes that they lack, and rows as a data frame."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def hinting(hint_for: Callable[[str], str]) -> Callable[[object, str], object]:
    """Return a `__getattr__` that raises AttributeError, with the hint for the attribute at the end of its message.

    A class has it behind `if not TYPE_CHECKING`: with it, a type checker accepts any attribute.
    """

    def __getattr__(self: object, name: str) -> object:  # noqa: N807 - it becomes a method
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises again the error of a property that raised AttributeError
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint_for(name)}")

    return __getattr__


def hints_of_rays(instead_of: Mapping[str, str]) -> Callable[[str], str]:
    """Return the hints for attributes that only Ray's results have: what to do instead of each."""
    return lambda name: f", which is Ray's: {instead_of[name]}" if name in instead_of else ""


def data_frame(rows: Sequence[Mapping[str, Any]], attribute: str, otherwise: str) -> "pd.DataFrame":
    """Return `rows` as a pandas DataFrame, for an `attribute` whose rows the attribute `otherwise` has as well."""
    try:
        import pandas as pd  # noqa: PLC0415 - optional
    except ImportError as exc:
        raise ImportError(f"{attribute} needs pandas: pip install 'prefect-torch[pandas]'; or use .{otherwise}") from exc
    frame: pd.DataFrame = pd.DataFrame(rows)
    return frame
