"""`doctor`: what would keep trainings from running here."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import click
from prefect_torch.deployments.command_line.parameters import json_option
from prefect_torch.deployments.command_line.terminal import console, plain, print_json
from rich.text import Text

from .findings import STYLES, Check, Finding, run_checks
from .machine_checks import SHARED_MEMORY, check_open_files, check_shared_memory
from .software_checks import FASTAPI, SQLALCHEMY, check_api, check_prefect, check_python, check_server_library
from .storage_check import check_storage
from .torch_checks import check_backends, check_loopback, check_torch


@click.command
@click.argument("storage", metavar="[STORAGE]", required=False)
@json_option
def doctor(storage: str | None, as_json: bool) -> int:
    """Check what trainings need here.

    Also that STORAGE can be written, read, listed and deleted in, with a small object that does not stay. Each line is ok, a
    warning, which some trainings will feel, or wrong, and then says what to do; exits with 1 when something is wrong.

    \b
    --json: a list of
      check, status (ok, warning, wrong), found, advice
    """  # noqa: D301 - click's mark for lines that it must not fill
    findings = []
    for finding in run_checks(_checks(storage)):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    return int(any(finding.status == "wrong" for finding in findings))


def _checks(storage: str | None) -> Iterator[tuple[str, Check]]:
    yield "python", check_python
    yield "prefect", check_prefect
    for library in (FASTAPI, SQLALCHEMY):
        yield library.name, partial(check_server_library, library)
    yield "prefect api", check_api
    yield "torch", check_torch
    yield "backends", check_backends
    yield "loopback", check_loopback
    yield SHARED_MEMORY, check_shared_memory
    yield "open files", check_open_files
    if storage is not None:
        yield "storage", partial(check_storage, storage)


def _print(finding: Finding) -> None:
    advice = f" -> {finding.advice}" if finding.advice else ""
    line = Text.assemble(
        (f"{finding.status:<9}", STYLES[finding.status]), f"{finding.check:<13}", plain(f"{finding.found}{advice}")
    )
    console().print(line)
