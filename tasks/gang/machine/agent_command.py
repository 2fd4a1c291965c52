"""A command on this machine that brings agents, such as ssh."""

import os
import re
import threading
from collections import deque
from collections.abc import Callable

from prefect_torch.tasks.gang.process import RankProcess

_ROOM = re.compile(r"room for (\d+): .*")
_LAST_LINES = 3


class AgentCommand:
    """A shell command under a guard, which kills it with all its descendants when this process is gone.

    Args:
        command: The command.
        key: The key that the agents read from its stdin.
        ended: Called with the end of the command in words, whenever that is.

    Attributes:
        room: A line "room for 3: …" that the command wrote, and for how many ranks there is room; None without such a line.

    """

    def __init__(self, command: str, key: str, ended: Callable[[str], None]) -> None:
        self._process = RankProcess(["sh", "-c", command], dict(os.environ), f"{key}\n".encode())
        self.room: tuple[str, int] | None = None
        self._ended = ended
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self, longest_s: float) -> None:
        """Kill the command, unless it ends by itself within `longest_s`."""
        self._thread.join(longest_s)
        self._process.kill()
        self._thread.join()

    def _follow(self) -> None:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        for lines in self._process.lines(1.0):
            last.extend(lines)
            for counted in filter(None, map(_ROOM.fullmatch, lines)):
                self.room = counted[0], int(counted[1])
        returncode = self._process.reap().returncode
        said = f": {' / '.join(last)}" if last else ""
        self._ended(f"its command ended with {returncode}{said}")
