"""What Ray Train documents, said beside the test of how it is here; docs/extensions/ray_pages.py makes tables of it."""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

Verdict: TypeAlias = Literal["same", "better", "different", "refused", "missing"]
F = TypeVar("F", bound=Callable[..., object])


def behaviour(api: str, documented: str, *, verdict: Verdict, reason: str = "", short: str = "") -> Callable[[F], F]:
    """Mark a test as the proof of what happens here where Ray Train's documentation promises something.

    Args:
        api: The function or class of Ray's, such as "ray.train.report".
        documented: What its documentation says.
        verdict: How it is here; refused: an error where it is given, so that nobody relies on it.
        reason: In which way it is not the same; empty where it is.
        short: What docs/how-to/ray-comparison.md says of it; empty where it says nothing.

    """
    assert documented
    assert bool(reason) == (verdict != "same"), f"{api}: a verdict other than same has a reason"
    assert reason or not short

    def mark(test: F) -> F:
        return test

    return mark
