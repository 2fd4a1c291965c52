"""Machines that a command reaches, such as `ssh {host}`."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from .agent_process import AGENT
from .cluster import Agents, Cluster, MachineRequest


class Hosts(Cluster):
    """Machines by name, on each of which a command starts a program."""

    kind: Literal["hosts"] = "hosts"
    hosts: list[str] = Field(min_length=1, title="Hosts", description="The names of the machines.")
    command: str = Field(
        default="ssh {host}",
        title="Command",
        description="The command that runs a program on a machine: the program is appended, or takes the place of {agent}.",
    )
    ranks_per_host: int | None = Field(
        default=None,
        ge=1,
        title="Ranks per host",
        description="For how many ranks a machine has room. When empty, as many as it has GPUs; without GPUs, so many that "
        "all ranks are spread evenly over all hosts.",
    )
    python: str | None = Field(
        default=None, title="Python", description="The interpreter on the machines. The path of the flow's own when empty."
    )

    def __init__(self, hosts: list[str] | None = None, /, **fields: Any) -> None:
        super().__init__(**(fields if hosts is None else {"hosts": hosts, **fields}))

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: list[str]) -> list[str]:
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"hosts has {', '.join(map(repr, twice))} twice: name a machine once, and give ranks_per_host")
        return hosts

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Run the command for every host that is not to be avoided."""
        slots = wanted.slots_of_each(len(self.hosts) - len(wanted.in_use), self.ranks_per_host)
        for host in self.hosts:
            if host not in wanted.avoid:
                program = [self.python or sys.executable, "-m", AGENT, *agents.arguments(host, slots)]
                agents.run(self._command(host, shlex.join(program)), [host])
        yield

    def _command(self, host: str, program: str) -> str:
        template = self.command if "{agent}" in self.command else f"{self.command} {{agent}}"
        if Path(template.split(maxsplit=1)[0]).name == "ssh" and template.endswith(" {agent}"):
            program = shlex.quote(program)  # ssh joins its arguments, and the other machine's shell splits the text again
        return template.replace("{host}", shlex.quote(host)).replace("{agent}", program)
