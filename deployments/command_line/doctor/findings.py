"""What a check found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`; the fields are the keys of its --json.

    Attributes:
        check: What was looked at.
        status: "ok", "warning" (some trainings will miss it) or "wrong" (trainings will fail).
        found: What was there.
        advice: What to do, empty when all is well.

    """

    check: str
    status: Status
    found: str
    advice: str = ""
