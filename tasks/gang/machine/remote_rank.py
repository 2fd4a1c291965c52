"""A rank on another machine, as the task that supervises it sees it."""

import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prefect_torch.tasks.gang.processes.rank_exit import result_left, result_of_exit
from prefect_torch.tasks.rank.plain_result import decode_result
from prefect_torch.tasks.rank.spec import RankResult
from prefect_torch.tasks.run_logs import get_run_logger

_IDLE_S = 5.0
_WAKE: tuple[Mapping[str, Any], bytes] = ({"type": "wake"}, b"")


class RemoteRank:
    """A rank that an agent has started.

    Args:
        order: Sends an order to the agent: to end the process, to print its stack traces, or, after "read", more of its lines.
        machine: The name of its machine.
        loss: Returns how the rank has ended if it was lost with the machine; may take seconds.
        records_collectives: Whether NCCL keeps a record of the rank's last collectives.

    """

    def __init__(
        self, order: Callable[[str], None], machine: str, loss: Callable[[], RankResult], *, records_collectives: bool
    ) -> None:
        self._order = order
        self._machine = machine
        self._loss = loss
        self._records = records_collectives
        self._messages: queue.SimpleQueue[tuple[Mapping[str, Any], bytes]] = queue.SimpleQueue()
        self._exit: Mapping[str, Any] = {}
        self._result = b""
        self._is_awake = False

    def record(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Record a message of the agent about this rank, or the loss of its machine; called from the thread of the machine."""
        self._messages.put((message, body))

    def wake(self) -> None:
        """Let `lines` yield now, and every `poll_s` from now on."""
        self._is_awake = True
        self._messages.put(_WAKE)

    def lines(self, poll_s: float) -> Iterator[list[str]]:
        """Yield the lines written since the last yield, until the process exits or is lost.

        The process waits once several batches of its lines have not been taken from here, as at a full pipe.
        Yields at least every five seconds, and every `poll_s` once `wake` was called: a thousand ranks that do nothing must not
        occupy the leader.
        """
        while True:
            try:
                message, body = self._messages.get(timeout=poll_s if self._is_awake else _IDLE_S)
            except queue.Empty:
                yield []
                continue
            if message["type"] in {"exit", "lost"}:
                self._exit, self._result = message, body
                return
            yield message.get("lines", [])
            if message["type"] == "lines":
                self._order("read")

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._order("terminate")

    def write_stack_traces(self) -> bool:
        """Have the process print its stack traces, and return whether NCCL writes a record as well, which takes seconds."""
        self._order("write_stack_traces")
        return self._records

    def kill(self) -> None:
        """Kill the process and all its descendants (SIGKILL)."""
        self._order("kill")

    def finish(self) -> RankResult:
        """Kill what is left of the process, and return how it ended; call it after `lines` is exhausted, or in place of it."""
        self.kill()
        for _ in self.lines(1.0) if not self._exit else ():
            pass
        if self._exit["type"] == "lost":
            return self._loss()
        if (record := self._exit["record"]) is not None:
            get_run_logger().warning(
                "the rank's last collectives are in %s on %s: read that of all ranks with torchfrtrace", record, self._machine
            )
        result = result_left(self._result, self._exit["returncode"], decode_result)
        return result or result_of_exit(self._exit["returncode"], oom_killed=self._exit["oom_killed"])
