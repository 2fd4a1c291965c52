"""The equivalents of Ray's names: the one source of `migrate-check` and of the tables in the documentation.

The rows are in equivalents.json, one per line, with the arguments and the results of Ray's calls and Ray's former names.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["same", "better", "different", "refused", "missing", "more"]

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
_UNKNOWN = "not in the tables of this version: look at what it does"

# The arguments of Ray's functions and classes, in order: for positional ones, and to recognize new ones. An argument without a
# row of its own has the same name here.
PARAMETERS: dict[str, list[str]] = _DATA["parameters"]
# The classes of the return values of calls, and of attributes, with "[]" for each list or tuple around them.
RETURNS: dict[str, str] = _DATA["returns"]
ATTRIBUTES: dict[str, str] = _DATA["attributes"]
# The classes of the items of classes that are iterated over and indexed.
ITEMS: dict[str, str] = _DATA["items"]
# Patterns of former names, and of Tune's names for parts of a training, with their replacements.
_OLDER = [(re.compile(pattern), replacement) for pattern, replacement in _DATA["older"].items()]


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A name of Ray's and what to write for it.

    Attributes:
        ray: A dotted name, "ray.train.report"; with an argument, "ray.train.report(validation=)", and where its value counts,
            "ray.train.ScalingConfig(num_workers=0)"; "ray.data*" for all names with this beginning. Empty if `here`
            exists only here.
        verdict: "more" if `here` exists only here.
        here: What to write, in Markdown; empty if there is nothing.
        note: How it behaves, in Markdown.
        imports: The public names that `here` begins with, such as "prefect_torch.ckpt.report".

    """

    ray: str
    verdict: Verdict
    here: str
    note: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page.

    Attributes:
        title: Its heading.
        prefix: The prefix that the names in the table omit.
        rows: Its lines.

    """

    title: str
    prefix: str
    rows: tuple[Equivalent, ...]


def sections() -> Iterator[Section]:
    """Yield all tables, in the page's order."""
    for table in _DATA["sections"]:
        yield Section(table["title"], table["prefix"], tuple(map(_row, table["rows"])))


class Equivalents:
    """Finds what to write for a name of Ray's."""

    def __init__(self) -> None:
        rows = [row for section in sections() for row in section.rows if row.ray]
        rows += [Equivalent(f"{package}.*", "missing", "", _UNKNOWN) for package in ("ray.train", "ray.air")]
        self._named = {row.ray: row for row in rows if not row.ray.endswith("*")}
        self._covering = sorted((row for row in rows if row.ray.endswith("*")), key=lambda row: -len(row.ray))

    def of(self, name: str) -> Equivalent:
        """Return the row of a dotted name that begins with "ray"."""
        covering = (row for row in self._covering if name.startswith(row.ray.rstrip(".*")))
        return self._named.get(name) or next(covering)

    def of_argument(self, name: str, keyword: str, value: str) -> Equivalent | None:
        """Return the row of an argument of `name`; None if nothing needs to change.

        Args:
            name: The dotted name of the called function or class.
            keyword: The argument.
            value: Its value as Python writes it; "(…)" for any tuple.

        """
        for argument in (f"{name}({keyword}={value})", f"{name}({keyword}=)"):
            if argument in self._named:
                return self._named[argument]
        if keyword in PARAMETERS.get(name, (keyword,)):
            return None
        return Equivalent(f"{name}({keyword}=)", "missing", "", _UNKNOWN)

    def has(self, name: str) -> bool:
        """Return whether `name` has a row of its own."""
        return name in self._named

    def leads_on(self, name: str) -> bool:
        """Return whether there are rows for names inside `name`: a module, or a class with rows for its methods."""
        return any(known.startswith(f"{name}.") for known in self._named)

    def words(self) -> set[str]:
        """Return every part of the dotted names that have rows."""
        return {word for name in self._named for word in name.partition("(")[0].split(".")}


def modern(name: str) -> str:
    """Return the current name of a function or class of Ray's."""
    for pattern, replacement in _OLDER:
        name = pattern.sub(replacement, name)
    return name


def _row(fields: dict[str, Any]) -> Equivalent:
    return Equivalent(**{"ray": "", "here": "", "note": "", **fields, "imports": tuple(fields.get("imports", ()))})
