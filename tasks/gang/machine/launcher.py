"""The command on this machine that launches agents, such as ssh or srun."""

import os
import re
import threading
from collections.abc import Callable

from prefect_torch.tasks.gang.processes.process import RankProcess

_ROOM = re.compile(r"room for (\d+): .*")
_LAST_LINES = 3


class AgentLauncher:
    """A shell command that launches agents, under a guard, which kills it with all its descendants when this process is gone.

    Args:
        command: The command.
        key: The key that the agents read from its stdin.
        ended: Called with a description of the command's exit once it has exited.

    Attributes:
        room: A line "room for 3: …" that the command wrote, and for how many ranks there is room; None without such a line.
        last_lines: The last lines that the command wrote.

    """

    def __init__(self, command: str, key: str, ended: Callable[[str], None]) -> None:
        self._process = RankProcess(["sh", "-c", command], dict(os.environ), f"{key}\n".encode())
        self.room: tuple[str, int] | None = None
        self.last_lines: tuple[str, ...] = ()
        self._ended = ended
        self._thread = threading.Thread(target=self._follow, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process has no thread left
            self._process.reap()
            raise

    def end(self, longest_s: float) -> None:
        """Kill the command, unless it ends by itself within `longest_s`."""
        self._thread.join(longest_s)
        self._process.kill()
        self._thread.join()

    def _follow(self) -> None:
        for lines in self._process.lines(1.0):
            self.last_lines = (*self.last_lines, *lines)[-_LAST_LINES:]
            for counted in filter(None, map(_ROOM.fullmatch, lines)):
                self.room = counted[0], int(counted[1])
        returncode = self._process.reap().returncode
        self._ended(f"its command ended with {returncode}{self.said}")

    @property
    def said(self) -> str:
        """The last lines, to be appended to a message."""
        return f": {' / '.join(self.last_lines)}" if self.last_lines else ""
