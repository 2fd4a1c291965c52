"""The interface of a cluster to a training: it starts node agents on its machines, and releases the machines afterwards."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """The ranks of one attempt that need machines.

    Attributes:
        fewest: The smallest number of ranks with which the attempt can start.
        most: The number of ranks that it has if the machines suffice.
        use_gpu: Whether each rank needs a GPU.
        avoid: The names of machines that must not be lent: they were lost or failed some minutes ago, or are in use.
        in_use: The machines of `avoid` that the training already uses; a cluster that tracks free resources may lend the rest
            of them.
        avoids_for_s: After how many seconds a lost machine may be lent again: the request is not waited for any longer.

    """

    fewest: int
    most: int
    use_gpu: bool
    avoid: frozenset[str]
    in_use: frozenset[str] = frozenset()
    avoids_for_s: float = math.inf

    def slots_of_each(self, num_machines: int, given: int | None) -> int | None:
        """Return the number of ranks that each of `num_machines` machines takes: `given`, or an even share of all ranks.

        If ranks have GPUs and `given` is None, return None: each agent counts the GPUs of its machine.
        """
        if given is not None or self.use_gpu:
            return given
        return math.ceil(self.most / max(1, num_machines))


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """Why an agent has ended, as its cluster says.

    Attributes:
        reason: The reason.
        is_out_of_memory: Whether its processes used too much memory, which says nothing against its machine.

    """

    reason: str
    is_out_of_memory: bool = False


class Agents(Protocol):
    """The leader's side of the agents that a cluster starts: their commands, and which agents to expect.

    Attributes:
        address: "HOST:PORT", where the leader waits for the agents.
        key: The secret of the agents of this attempt. Pass it on stdin or in the variable PREFECT_TORCH_AGENT_KEY, never on a
            command line, which every user of a machine can read.
        is_over: Whether no agent is awaited any longer, so that nobody reads why one has not come.

    """

    address: str
    key: str
    is_over: bool

    def arguments(self, name: str | None = None, slots: int | None = None) -> list[str]:
        """Return the arguments of the agent's command, to come after "prefect-torch agent" or "python -m …".

        Args:
            name: The machine's name in messages, and in `MachineRequest.avoid`; its host name if None.
            slots: The most ranks that the machine takes; None for all of them, or 1 without GPUs. With GPUs, it takes no more
                ranks than it has free GPUs.

        """
        ...

    def run(self, command: str, names: list[str]) -> None:
        """Run a shell command on this machine that starts one agent for each of `names`; its stdin is the key.

        It is killed, with all its descendants, when the machines are released or this process is gone. If it exits before its
        agents have connected, its last lines are reported as the reason. A line "room for 3: …" states the number of ranks that
        the cluster has room for, so that the leader waits for as many, and not for more.
        """
        ...

    def expect(self, name: str) -> None:
        """Expect an agent that the cluster has started in another way."""
        ...

    def fail(self, name: str, reason: str) -> None:
        """Stop expecting an agent on the machine `name`, for this reason."""
        ...

    def delay(self, reasons: Mapping[str, str]) -> None:
        """Say why some agents have not come yet, by their names, in place of what was said before.

        The reasons are logged, and are part of the error if the agents never come.
        """
        ...

    def late(self) -> set[str]:
        """Return the names of the agents that were expected and have not come: once `is_over`, nobody has a use for them."""
        ...

    def announce(self, names: Collection[str]) -> None:
        """Say which agents are on their way, by their names, in place of what was said before.

        An attempt that may have fewer ranks waits for them as long as for the fewest, and for others for seconds only. Those
        of a command that states the room of its cluster need no announcement.
        """
        ...

    def explain_ends(self, explain: Callable[[str], AgentEnd | None]) -> None:
        """Have `explain` asked, with the name of an agent that came and has closed its connection, why it has ended.

        No attempt follows until it answers, so it is to do so within seconds: with None if the cluster does not say.
        """
        ...


class Cluster(BaseModel, ABC):
    """Machines that a cluster lends to a training, each with one node agent that starts its ranks.

    Each kind of cluster has a field `kind`, by which JSON names it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    # Variables of the process that starts an agent which ranks must not inherit, such as Ray's OMP_NUM_THREADS=1.
    not_for_ranks: ClassVar[tuple[str, ...]] = ()
    # Whether a request waits up to `wait_s` for machines, as in a queue; otherwise `wait_s` begins after the first request.
    waits_itself: ClassVar[bool] = False
    _usual_wait_s: ClassVar[float] = 60.0

    wait_s: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        title="Wait (seconds)",
        description="How long to wait for machines while there is room for too few ranks. When empty, a minute; in Kubernetes, "
        "ten, images included; in Slurm's queue, a day.",
    )
    leader_address: str | None = Field(
        default=None,
        title="Leader's address",
        description="The host name or address of the flow's machine by which the others reach it. That of its default route "
        "when empty.",
    )
    leader_port: int = Field(
        default=0, ge=0, le=65535, title="Leader's port", description="The port for node agents. A free one when 0."
    )
    environment: dict[str, str] = Field(
        default={}, title="Environment", description="Variables of the ranks, in addition to those of their machine."
    )

    def model_post_init(self, _: Any, /) -> None:
        """Count `kind` as given, so that JSON of what was given names it."""
        self.model_fields_set.add("kind")

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"environment has {name!r}, which no process can have: a name is text without '='")
        return variables

    @property
    def longest_wait_s(self) -> float:
        """How long to wait for the machines of one request."""
        return self.asks_for_s

    @property
    def asks_for_s(self) -> float:
        """How long to request machines again from a cluster that has answered with too few."""
        return self._usual_wait_s if self.wait_s is None else self.wait_s

    @abstractmethod
    def lend(self, wanted: MachineRequest, agents: Agents) -> AbstractContextManager[None]:
        """Start one agent on each of several machines, and release the machines at the end of the context.

        Called for each attempt. More agents than are needed may be started: the first that come and have room for
        `wanted.most` ranks are used, and the others end.

        Raises:
            NotEnoughMachinesError: If it is already known that there is room for fewer than `wanted.fewest` ranks.

        """

    def expected_name(self, agent: str) -> str:
        """Return the name by which `lend` expects the agent of this name: another one where the machine is chosen later."""
        return agent

    def machine_of(self, agent: str) -> str:
        """Return the name of the machine on which the agent of this name runs: another one where agents share machines."""
        return agent
