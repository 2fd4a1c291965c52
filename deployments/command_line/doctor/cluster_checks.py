"""Checks of the machines of a cluster, each a finding of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_torch.ckpt.text import show_bytes, show_count, show_some

from .findings import Finding, Status
from .machine_checks import DOCKERS_SHM_BYTES

if TYPE_CHECKING:
    from prefect_torch.tasks.gang.engines.cluster import Cluster
    from prefect_torch.tasks.gang.machine.inspection import InspectedMachine

_MOST_AHEAD_S = 2.0


def check_cluster(named: str, num_ranks: int | None, storage: str | None) -> Iterator[Finding]:
    """Request the machines of the cluster, and check each; one whose agent does not connect is wrong, with the reason.

    Args:
        named: "torch-cluster/NAME", JSON, or a file with JSON.
        num_ranks: The number of ranks for which machines are requested; None for one on each host.
        storage: The storage of trainings, which each machine must see.

    """
    from prefect_torch.ckpt.storage.opening import parse_storage  # noqa: PLC0415 - for clusters only
    from prefect_torch.tasks.gang.machine.inspection import inspect_machines  # noqa: PLC0415 - for clusters only
    from prefect_torch.tasks.gang.machine.versions import versions  # noqa: PLC0415 - for clusters only
    from prefect_torch.tasks.rank.errors import NotEnoughMachinesError  # noqa: PLC0415 - for clusters only
    from pydantic import ValidationError  # noqa: PLC0415 - for clusters only

    try:
        cluster = _cluster(named)
    except ValidationError as exc:
        said = [f"{'.'.join(map(str, it['loc']))}: {it['msg'].removeprefix('Value error, ')}" for it in exc.errors()]
        yield Finding("cluster", "wrong", "; ".join(said), f"see prefect_torch.flows.{exc.title} for its fields")
        return
    except (OSError, ValueError) as exc:
        yield Finding("cluster", "wrong", str(exc), "give torch-cluster/NAME, JSON, or a file with JSON")
        return
    hosts = getattr(cluster, "hosts", [None])
    try:
        found = inspect_machines(cluster, num_ranks or len(hosts), None if storage is None else parse_storage(storage))
    except (ImportError, NotEnoughMachinesError, ValueError) as exc:  # no client, no machines, a wrong address
        yield Finding("cluster", "wrong", str(exc))
        return
    if not found:
        yield Finding("cluster", "wrong", "it provided no machine", "check its free resources, and the leader's address")
    shared = ", ".join(f"{name} {version}" for name, version in versions().items())
    for machine in found:
        yield _finding(machine, shared, storage, num_others=sum(it.problem is None for it in found) - 1)


def _cluster(named: str) -> "Cluster":
    from prefect_torch.tasks.gang.engines.choice import check_cluster as of_kind  # noqa: PLC0415 - imports prefect
    from prefect_torch.tasks.gang.engines.cluster_block import load_cluster  # noqa: PLC0415 - imports prefect

    if named.startswith("torch-cluster/"):
        return load_cluster(named)
    text = named if named.lstrip().startswith("{") else Path(named).read_text("utf-8")
    described = json.loads(text)
    if not isinstance(described, dict):
        raise ValueError(f"{text.strip()} is no JSON object")  # noqa: TRY004 - as other JSON that describes no cluster
    cluster: Cluster = of_kind(described)
    return cluster


def _finding(machine: "InspectedMachine", versions: str, storage: str | None, *, num_others: int) -> Finding:
    name = f"machine {machine.name}"
    if machine.problem is not None:
        return Finding(name, "wrong", machine.problem, "start its agent by hand to see more")
    report = machine.report
    gpus, memory = report["gpus"], report["shared_memory"]
    facts = [
        versions + (f", nccl {report['nccl']}" if report["nccl"] else ""),
        f"room for {machine.slots}",
        f"{show_count(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(gpus))})" if gpus else "no GPU",
        "no /dev/shm" if memory is None else f"{show_bytes(memory)} free in /dev/shm",
        f"clock {machine.clock_ahead_s:+.2f} s",
        *([] if storage is None or report["storage"] else ["sees the storage"]),
        *([] if report["leader"] else ["reaches this machine"]),
        *([] if report["machines"] or not num_others else ["reaches the other machines"]),
    ]
    problems = list(_problems(machine))
    status: Status = "ok"
    if problems:
        status = "wrong" if any(problem == "wrong" for problem, _, _ in problems) else "warning"
    found = "; ".join([*facts, *(text for _, text, _ in problems)])
    return Finding(name, status, found, "; ".join(advice for _, _, advice in problems))


def _problems(machine: "InspectedMachine") -> Iterator[tuple[Status, str, str]]:
    report = machine.report
    if report["leader"]:
        yield (
            "wrong",
            f"does not reach this machine at {report['leader']}",
            "open its ports to the machines, or give leader_address",
        )
    if report["machines"]:
        unreached = show_some([f"{name} at {reason}" for name, reason in report["machines"].items()])
        yield (
            "wrong",
            f"does not reach machine {unreached}",
            "let the machines connect to each other on any port (a firewall, a security group, a wrong interface)",
        )
    if report["storage"]:
        yield "wrong", f"does not see the storage: {report['storage']}", "mount it there under the same path, or give a URL"
    if report["shared_memory"] is None or report["shared_memory"] <= DOCKERS_SHM_BYTES:
        yield "warning", "little shared memory", "give it more, for data loaders and NCCL"
    if abs(machine.clock_ahead_s) > _MOST_AHEAD_S:
        yield "warning", "its clock is wrong", "synchronize the clocks (NTP): logs are sorted by them"
