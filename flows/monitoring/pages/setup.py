"""The part of a summary about the setup of a run: restart, machine, GPUs, config, and how to use its best checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_torch.ckpt.text import as_command, show_bytes, show_count
from prefect_torch.flows.monitoring.restarted import Restart
from prefect_torch.flows.monitoring.text import link_text, plain_text

from .machine import GpuUse

_LONGEST_CONFIG = 4000


@dataclass(frozen=True, slots=True)
class Setup:
    """What a flow run was started with.

    Attributes:
        storage: The storage as commands and Python take it on any machine.
        config: The argument of the training function; None without one.
        machine: The machine that leads the training, in one line.
        restart: The crashed flow run that this one restarts, or None.
        gpus: The GPUs of the ranks on that machine, as far as they were sampled.

    """

    storage: str
    config: Mapping[str, Any] | None
    machine: str
    restart: Restart | None = None
    gpus: Sequence[GpuUse] = ()


def restart_line(restart: Restart) -> str:
    """Return the sentence that links to the crashed flow run."""
    return f"Restart {restart.number} of [{link_text(restart.first_name)}]({restart.url}), which crashed, by an automation."


def write_setup(setup: Setup, world_size: int | None, host: str | None) -> Iterator[str]:
    """Yield the section about the machine and the config."""
    yield from ("## Setup", "")
    ranks = "" if world_size is None else f"{show_count(world_size, 'rank')} led from "
    yield f"{ranks}`{host or 'this machine'}`: {plain_text(setup.machine)}"
    if setup.gpus:
        yield from ("", "| GPU | name | utilization | mean | memory |", "| --: | :-- | --: | --: | --: |")
        yield from map(_gpu_row, setup.gpus)
    if setup.config:
        yield from ("", "```json", _config(setup.config), "```")


def write_use(setup: Setup, run: str, *, has_score: bool) -> Iterator[str]:
    """Yield the lines that load or pull the best checkpoint; without a finite score the latest."""
    which, attribute = ("best", "best_checkpoints[0][0]") if has_score else ("latest", "checkpoint")
    yield from ("", f"The {which} checkpoint in Python, for `load_state` or `as_directory`, and from a shell:", "")
    yield from ("```python", "from prefect_torch.flows import Result")
    yield f"result = Result.from_storage({setup.storage!r}, {run!r})"
    yield from (
        f"checkpoint = result.{attribute}",  # on a line of its own: the UI shows the beginning of a long one
        "```",
        "",
        "```console",
        f"$ {as_command('pull', setup.storage, run, which, './model')}",
        "```",
    )


def _gpu_row(use: GpuUse) -> str:
    now = use.newest
    shares = ("" if share is None else f"{share:.0%}" for share in (now.utilization, use.mean_utilization))
    memory = "" if now.used_bytes is None or now.total_bytes is None else _memory(now.used_bytes, now.total_bytes)
    return f"| {now.index} | {plain_text(now.name)} | {' | '.join(shares)} | {memory} |"


def _memory(used: int, total: int) -> str:
    return f"{show_bytes(used)} of {show_bytes(total)}"


def _config(config: Mapping[str, Any]) -> str:
    text = json.dumps(dict(config), indent=2, default=str, ensure_ascii=False).replace("```", "'''")
    return text if len(text) <= _LONGEST_CONFIG else f"{text[:_LONGEST_CONFIG]}\n…"
