"""A row of the tables of Ray Train's names: the name, what to write for it, and how that behaves."""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["same", "better", "different", "missing", "more"]
UNKNOWN = "not in the tables of this version: look at what it does"
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A name of Ray's and what to write for it.

    Attributes:
        ray: A dotted name, "ray.train.report"; with an argument, "ray.train.report(validation=)", and where its value counts,
            "ray.train.ScalingConfig(num_workers=0)"; "ray.data*" for whatever begins so. Empty for what only exists here.
        verdict: "more" is what only exists here.
        here: What to write, in Markdown; empty where there is nothing.
        note: How it behaves, in Markdown.
        imports: The public names that `here` begins with, such as "prefect_torch.ckpt.report".

    """

    ray: str
    verdict: Verdict
    here: str
    note: str
    imports: tuple[str, ...] = ()

    @property
    def plain_here(self) -> str:
        """What to write, as plain text."""
        return _plain(self.here)

    @property
    def plain_note(self) -> str:
        """How it behaves, as plain text."""
        return _plain(self.note)


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page.

    Attributes:
        title: Its heading.
        prefix: What the names in the table leave out.
        rows: Its lines.

    """

    title: str
    prefix: str
    rows: tuple[Equivalent, ...]


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "")
