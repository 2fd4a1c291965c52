"""The finding of a check."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`; the fields are the keys of its --json.

    Attributes:
        check: What was checked.
        status: "ok", "warning" (some trainings are affected) or "wrong" (trainings fail).
        found: What was found.
        advice: What to do; empty if the status is "ok".

    """

    check: str
    status: Status
    found: str
    advice: str = ""
