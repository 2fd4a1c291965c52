"""`doctor`: whether trainings can run on this machine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TypeAlias

import click
from prefect_torch.ckpt.storage.probe import ListingOrder, StorageUnfitError, probe_storage
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.deployments.command_line.arguments import json_option, open_named_storage
from prefect_torch.deployments.command_line.terminal import STATUS_STYLES, console, plain, print_json
from rich.text import Text

from .cluster_checks import check_cluster
from .findings import Finding
from .gpu_checks import check_collective, check_copies, check_gpus, check_locked_memory
from .machine_checks import (
    SHARED_MEMORY,
    check_backends,
    check_loopback,
    check_open_files,
    check_shared_memory,
    check_temporary_files,
    check_torch,
)
from .software_checks import FASTAPI, SQLALCHEMY, check_api, check_prefect, check_python, check_server_library

_ORDERS: dict[ListingOrder, str] = {
    "keys": "in the order of keys",
    "folders": "directory by directory",
    "none": "in no known order, so that the latest of more than a thousand checkpoints is found by listing them all",
}
_KEPT_BY_GOOGLE = (
    Finding(
        "storage",
        "warning",
        "Google keeps the parts of interrupted uploads, and bills them, until a rule of the bucket deletes them",
        "add a lifecycle rule AbortIncompleteMultipartUpload, such as after a day, unless the bucket has one",
    ),
    Finding(
        "storage",
        "warning",
        "Google keeps pruned checkpoints for seven days, and bills them, unless the bucket's soft delete is off or shorter",
        "switch it off, by `gcloud storage buckets update --clear-soft-delete gs://BUCKET`, unless the bucket is to have it",
    ),
)
_Check: TypeAlias = Callable[[], Iterable[Finding]]


@click.command
@click.argument("storage", metavar="[STORAGE]", required=False)
@click.option("--cluster", metavar="CLUSTER", help="Check its machines, too: torch-cluster/NAME, JSON, or a file with JSON.")
@click.option("--ranks", type=click.IntRange(min=1), help="The number of ranks on the cluster; one for each host by default.")
@json_option
def doctor(storage: str | None, cluster: str | None, ranks: int | None, as_json: bool) -> int:
    """Check what trainings need on this machine, and on those of a cluster.

    With STORAGE, also write, read, list and delete small objects and one of 8 MiB there. With --cluster, agents are started as
    by a training, and each machine reports its versions and GPUs, its free shared memory, whether it reaches this machine and
    the others and sees the same STORAGE, and the time of its clock. The status of each check is ok, warning (some trainings
    are affected) or wrong (trainings fail), with advice; exits with 1 if something is wrong.

    \b
    --json: a list of
      check, status (ok, warning, wrong), found, advice
    """  # noqa: D301 - click's mark for lines that it must not fill
    if ranks is not None and cluster is None:
        raise click.UsageError("--ranks needs --cluster")
    findings = []
    for finding in _run(_checks(storage, cluster, ranks)):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    return int(any(finding.status == "wrong" for finding in findings))


def _checks(storage: str | None, cluster: str | None, ranks: int | None) -> Iterator[tuple[str, _Check]]:
    yield "python", check_python
    yield "prefect", check_prefect
    for library in (FASTAPI, SQLALCHEMY):
        yield library.name, partial(check_server_library, library)
    yield "prefect api", check_api
    yield "torch", check_torch
    yield "gpus", check_gpus
    yield "copies", check_copies
    yield "backends", check_backends
    yield "collective", check_collective
    yield "locked memory", check_locked_memory
    yield "loopback", check_loopback
    yield SHARED_MEMORY, check_shared_memory
    yield "temporary files", check_temporary_files
    yield "open files", check_open_files
    if storage is not None:
        yield "storage", partial(_check_storage, storage)
    if cluster is not None:
        yield "cluster", partial(check_cluster, cluster, ranks, storage)


def _check_storage(text: str) -> Iterator[Finding]:
    """Write, list, read and delete small objects and one of 8 MiB under an unused name; nothing remains."""
    try:
        storage = open_named_storage(text)
    except Exception as exc:  # noqa: BLE001 - any error is a finding
        yield Finding("storage", "wrong", str(exc), "correct that, or give another location")
        return
    try:
        probe = probe_storage(storage)
    except StorageUnfitError as exc:
        yield Finding("storage", "wrong", exc.found, exc.advice)
        return
    found = f"{probe.url}: wrote, listed, read and deleted in {probe.total_s:.2f} s; lists {_ORDERS[probe.order]}"
    yield Finding("storage", "ok", found)
    if canonical(probe.url).startswith("gs://"):
        yield from _KEPT_BY_GOOGLE


def _run(checks: Iterable[tuple[str, _Check]]) -> Iterator[Finding]:
    """Yield the findings of all checks; the error of a check is a finding, and the other checks run."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as exc:  # noqa: BLE001 - a broken installation raises anything
            yield Finding(name, "wrong", f"{type(exc).__name__}: {exc}", "this should not happen: see the error")


def _print(finding: Finding) -> None:
    advice = f" -> {finding.advice}" if finding.advice else ""
    line = Text.assemble(
        (f"{finding.status:<9}", STATUS_STYLES[finding.status]), f"{finding.check:<15} ", plain(f"{finding.found}{advice}")
    )
    console().print(line)
