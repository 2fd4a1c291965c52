"""`migrate-check`: the names of Ray that files use, and what to write for them here."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from prefect_torch.ckpt.text import show_count
from prefect_torch.deployments.command_line.arguments import json_option
from prefect_torch.deployments.command_line.terminal import print_json, print_table, say

from .equivalents import Equivalents
from .usages import Usage, find_usages

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_STYLES = {"same": "green", "better": "green", "different": "yellow", "refused": "red", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of a name of Ray; the fields are keys of `migrate-check --json`."""

    file: str
    line: int
    column: int
    ray: str
    verdict: str
    here: str
    note: str
    imports: tuple[str, ...]


@click.command("migrate-check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@json_option
def migrate_check(files: Sequence[str], as_json: bool) -> int:
    """List the names of Ray that FILE uses, with their equivalents here.

    Lists all uses of ray.train, ray.tune, ray.data and the rest of Ray, under any imported name: functions, their arguments,
    methods and attributes. The files are read, never imported or run. A use is the same here, better, different (the note
    explains how), refused (an error where it is given) or missing; exits with 1 if one is missing.

    \b
    --json: a list of
      file, line, column, ray (the name), verdict (same, better, different,
      refused, missing), here (what to write), note, imports (names to import)
    """  # noqa: D301 - click's mark for lines that it must not fill
    sources = [(name, _read(name)) for name in files]
    findings = [finding for name, source in sources for finding in _check(name, source)]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return int(any(finding.verdict == "missing" for finding in findings))


def _read(name: str) -> bytes:
    if not name:
        raise click.UsageError("FILE is empty: give a Python file")
    path = Path(name)
    if path.is_dir():
        raise click.UsageError(f"{name} is a directory: give the Python files in it")
    if path.suffix == ".ipynb":
        raise click.UsageError(f"{name} is a notebook: give the output of 'jupyter nbconvert --to script {name}'")
    try:
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise click.UsageError(f"there is no file {name}") from exc


def _check(name: str, source: bytes) -> Iterator[Finding]:
    equivalents = Equivalents()
    for usage in _find(name, source, equivalents):
        row = equivalents.of_argument(usage.name, usage.keyword, usage.value) if usage.keyword else equivalents.of(usage.name)
        if row is not None:
            shown = row.ray if usage.keyword else usage.name
            yield Finding(name, usage.line, usage.column, shown, row.verdict, _plain(row.here), _plain(row.note), row.imports)


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "")


def _find(name: str, source: bytes, equivalents: Equivalents) -> list[Usage]:
    try:
        return find_usages(source, equivalents)
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{name} is not text in {exc.encoding}, as Python expects: {exc.reason}") from exc
    except SyntaxError as exc:
        location = name if exc.lineno is None else f"{name}:{exc.lineno}"
        raise click.UsageError(f"{location} is not valid Python for this interpreter: {exc.msg}") from exc
    except (RecursionError, MemoryError) as exc:
        raise click.UsageError(f"{name} is nested too deeply to be analyzed") from exc
    except ValueError as exc:  # null bytes
        raise click.UsageError(f"{name} is not valid Python: {exc}") from exc


def _print(findings: Sequence[Finding]) -> None:
    if not findings:
        say("no name of Ray is used")
        return
    print_table(
        ["location", "Ray", "", "here", "how it behaves"],
        (
            [
                f"{it.file}:{it.line}:{it.column}",
                it.ray,
                (it.verdict, _STYLES[it.verdict]),
                it.here or None,
                it.note,
            ]
            for it in findings
        ),
    )
    counts = Counter(it.verdict for it in findings)
    say("")
    say(f"{show_count(len(findings), 'use')}: " + ", ".join(f"{counts[it]} {it}" for it in _STYLES if counts[it]))
    for line in _imports(findings):
        say(line)


def _imports(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the import statements for the equivalents."""
    names = sorted({name for finding in findings for name in finding.imports if "." in name})
    for module in sorted({name.rpartition(".")[0] for name in names}):
        of_module = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == module]
        yield f"from {module} import {', '.join(of_module)}"
