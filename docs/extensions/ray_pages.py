"""Write the pages about Ray Train from their tested sources.

    python docs/extensions/ray_pages.py

The tables of docs/how-to/from-ray-train.md are the rows of `prefect-torch migrate-check`, of which README has the
totals; docs/how-to/ray-behaviours.md and the table in docs/how-to/ray-comparison.md are made of the decorators in
tests/test_ray_behaviours.py.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prefect_torch.deployments.command_line.ray.equivalents import Section, sections

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests/test_ray_behaviours.py"
_VERDICTS = ("same", "better", "different", "refused", "missing")
# With empty lines around the table, else Markdown parses it as a part of the comment.
_BEGIN, _END = "<!-- {}: written by docs/extensions/ray_pages.py -->\n\n", "\n<!-- end -->"

_INTRODUCTION = """# Ray Train's behaviours

The tables list what the documentation of Ray Train 2.60 promises about reports, checkpoints, retention, restores and results,
what Tune adds to the function of a trial, and what happens here. Each row is a test in
[tests/test_ray_behaviours.py](../../tests/test_ray_behaviours.py), from which this page is generated.
[Moving from Ray Train](from-ray-train.md) lists what to write for each name.
"""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A behaviour that Ray documents, and the one here, as a test declares them."""

    api: str
    documented: str
    verdict: str
    reason: str = ""
    short: str = ""


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    moving, comparison = ROOT / "docs/how-to/from-ray-train.md", ROOT / "docs/how-to/ray-comparison.md"
    behaviours = read_behaviours(TESTS)
    return {
        ROOT / "README.md": with_totals((ROOT / "README.md").read_text()),
        moving: _filled(moving.read_text(), {section.title: _section_table(section) for section in sections()}),
        ROOT / "docs/how-to/ray-behaviours.md": _behaviours_page(behaviours),
        comparison: _filled(comparison.read_text(), {"behaviours": summary(behaviours), "migrate-check": names_by_verdict()}),
    }


def read_behaviours(path: Path) -> list[Behaviour]:
    """Return the `behaviour` decorators of a test file, in its order; nothing is imported."""
    tests = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    marks = (mark for test in tests for mark in test.decorator_list if isinstance(mark, ast.Call))
    return [_read(mark) for mark in marks if isinstance(mark.func, ast.Name) and mark.func.id == "behaviour"]


def summary(behaviours: Sequence[Behaviour]) -> str:
    """Return the table of the number of behaviours by verdict, with the notable ones."""
    rows = [
        [f"`{api}`", *(str(count) for count in _counts(of_api)), "; ".join(it.short for it in of_api if it.short)]
        for api, of_api in _by_api(behaviours)
    ]
    rows.append(["all", *(str(count) for count in _counts(behaviours)), ""])
    return _table(["", *_VERDICTS, "notable"], rows)


def names_by_verdict() -> str:
    """Return the table of the number of Ray's names by what migrate-check says of them."""
    counts = _name_counts()
    by_verdict = [[verdict, str(count)] for verdict, count in counts.items()]
    return _table(["migrate-check", "names"], [*by_verdict, ["all", str(counts.total())]])


def with_totals(text: str) -> str:
    """Return README with the number of Ray's names by what migrate-check says of them, in a sentence."""
    counts = _name_counts()
    *others, last = (f"{count} {verdict}" for verdict, count in counts.items())
    sentence = f"of the {counts.total()} names that it knows, {', '.join(others).replace(' ', ' are ', 1)} and {last} here."
    written, replaced = re.subn(r"of the \d+ names that it knows, .* here\.", sentence, text)
    if replaced != 1:
        raise ValueError("README has no sentence, or several, about the names that migrate-check knows")
    return written


def _name_counts() -> Counter[str]:
    verdicts = sorted(row.verdict for section in sections() for row in section.rows if row.ray)
    return Counter(verdicts)


def _read(mark: ast.Call) -> Behaviour:
    given: dict[str, Any] = {str(it.arg): ast.literal_eval(it.value) for it in mark.keywords}
    return Behaviour(*(ast.literal_eval(it) for it in mark.args), **given)


def _by_api(behaviours: Iterable[Behaviour]) -> Iterator[tuple[str, list[Behaviour]]]:
    positions: dict[str, int] = {}
    for it in behaviours:
        positions.setdefault(it.api, len(positions))
    in_order = sorted(behaviours, key=lambda it: positions[it.api])
    return ((api, list(of_api)) for api, of_api in groupby(in_order, key=lambda it: it.api))


def _counts(behaviours: Iterable[Behaviour]) -> list[int]:
    counts = Counter(it.verdict for it in behaviours)
    return [counts[verdict] for verdict in _VERDICTS]


def _behaviours_page(behaviours: Sequence[Behaviour]) -> str:
    page = _INTRODUCTION
    for api, of_api in _by_api(behaviours):
        rows = ([it.documented, it.verdict, it.reason] for it in of_api)
        page += f"\n## {api}\n\n{_table(['Ray Train', 'here', ''], rows)}"
    return page


def _section_table(section: Section) -> str:
    rows = (
        [
            f"`{row.ray.removeprefix(section.prefix).replace('*', '…')}`" if row.ray else "",
            row.here,
            row.verdict,
            row.note,
        ]
        for row in section.rows
    )
    return _table([f"`{section.prefix.rstrip('.') or 'ray'}`", "Here", "", "How it behaves"], rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(re.sub(" +", " ", f"| {' | '.join(line)} |\n") for line in lines)


def _filled(text: str, tables: dict[str, str]) -> str:
    """Return `text` with each table between the comments with its name."""
    for name, table in tables.items():
        begin = _BEGIN.format(name)
        if begin not in text:
            raise ValueError(f"a page has no comment {begin!r} for its table")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}{_END}{rest.partition(_END)[2]}"
    return text


if __name__ == "__main__":
    main()
