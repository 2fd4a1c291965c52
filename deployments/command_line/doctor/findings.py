"""What a check found, and what to do about it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "wrong"]
STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


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


Check: TypeAlias = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield what each check finds; one that raises is wrong itself, and does not keep the others from looking."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as exc:  # noqa: BLE001 - a broken installation raises anything
            yield Finding(name, "wrong", f"{type(exc).__name__}: {exc}", "this should not happen: see the error")
