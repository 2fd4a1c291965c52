"""Output: tables for a terminal, plain columns for a pipe, JSON for programs."""

import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence

import click
from prefect_torch.ckpt.runs.metrics import MetricValue, to_json
from prefect_torch.ckpt.text import printable
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

INTERRUPTED = 130  # the exit status of a shell for a program ended by Ctrl-C
STATUS_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}  # of what doctor and plan find
_GAP = 2  # columns between two cells
_NARROWEST_TEXT = 16  # columns in which a text is folded, but can still be read
_UNBOUNDED = 100_000  # columns: a pipe has no edge at which to fold or cut an id


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError for the caller, instead of exiting."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console with colours and the terminal's width on a terminal, else a plain one; NO_COLOR is respected."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def abandon_output() -> int:
    """Discard the buffered rest of stdout, and return the exit code of a program whose reader has closed the pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return 0


def say(text: str, style: str = "") -> None:
    """Print `text` in one line; it may come from a storage with other writers, so control characters are replaced."""
    console().print(Text(plain(text), style=style))


def say_as_logged(text: str) -> None:
    """Print each line of `text` as it is indented and aligned; other control characters than tabs are replaced."""
    for line in text.split("\n"):
        click.echo("".join(it if it.isprintable() or it == "\t" else " " for it in line.rstrip()))


def note(text: str) -> None:
    """Print one line on stderr, where no program reads it as part of the output."""
    click.echo(plain(text), err=True)


def print_json(value: object) -> None:
    """Print strict JSON."""
    click.echo(json.dumps(to_json(value), indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]], *, right: Collection[str] = ()) -> None:
    """Print rows under their columns' names; a cell may be a (text, style) pair.

    Args:
        columns: The names.
        rows: The rows, each with a cell per column.
        right: The columns with numbers.

    """
    cells = [[_cell(value) for value in row] for row in rows]
    to = console()
    if not to.is_terminal:
        _print_columns([columns, *([text for text, _ in row] for row in cells)], [column in right for column in columns])
        return
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    narrowest = 0
    for number, column in enumerate(columns):
        is_right = column in right
        is_text = number > 0 and not is_right  # a narrow terminal folds texts; names and numbers stay whole
        width = max(cell_len(text) for text in (column, *(row[number][0] for row in cells)))
        narrowest += min(width, _NARROWEST_TEXT) + _GAP if is_text else width + _GAP
        table.add_column(column, justify="right" if is_right else "left", overflow="fold", no_wrap=not is_text)
    for row in cells:
        table.add_row(*(Text(text, style=style) for text, style in row))
    to.width = max(to.width, narrowest - _GAP)  # else rich cuts numbers; a terminal that is narrower folds the lines
    to.print(table)


def _print_columns(lines: Sequence[Sequence[str]], are_right: Sequence[bool]) -> None:
    """Print aligned text; rich prints the same, but takes ten times as long for ten thousand rows."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        aligned = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, are_right, strict=True)
        )
        click.echo("  ".join(aligned).rstrip())


def plain(value: object) -> str:
    """Return `value` as one line of text without control characters."""
    return printable(str(value))


def show_metric(value: MetricValue) -> str:
    """Return a metric as text: floats with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def _cell(value: object) -> tuple[str, str]:
    text, style = value if isinstance(value, tuple) else (value, "")
    return "-" if text is None else plain(text), style
