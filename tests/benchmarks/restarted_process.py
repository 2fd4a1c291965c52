"""A process that is started again, whenever it has ended otherwise, until it completes."""

import signal
import subprocess
from pathlib import Path


class RestartedProcess:
    """Runs a command until it exits with 0.

    Args:
        command: The command, the same at each start.
        log: The file that all of its output is appended to.

    Attributes:
        process: The newest process.
        starts: How often it was started.
        ended_by_itself: The exit codes of those that nobody killed.

    """

    process: subprocess.Popen

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self.log = log
        self.starts = 0
        self.ended_by_itself: list[int] = []

    def start(self) -> None:
        """Start the process."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def completed(self) -> bool:
        """Say whether it has exited with 0; start it again if it has ended otherwise."""
        code = self.process.poll()
        if code is None or code == 0:
            return code == 0
        if code != -signal.SIGKILL:
            self.ended_by_itself.append(code)
        self.start()
        return False
