"""Ends a process that was not started by `program.py` when the one that started this watcher has ended, however that died.

    python -S -E watcher.py PID

The other end of stdin is in that one alone, which writes a byte to it at a normal exit: end-of-file means that it was killed.
"""

import os
import signal
import sys
from contextlib import suppress

if __name__ == "__main__" and not os.read(sys.stdin.fileno(), 1):
    with suppress(ProcessLookupError):
        os.kill(int(sys.argv[1]), signal.SIGTERM)
