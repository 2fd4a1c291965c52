"""What SIGTERM does to this process, while a Trainer has a handler of its own."""

import ctypes
import signal
import sys

_MOST_BYTES = 256  # of a struct sigaction


class SigtermAction:
    """What SIGTERM does to this process now, also by a handler in C, such as that with which a rank outlasts the first one."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)
        self._action = b""
        if sys.platform == "linux":
            action = ctypes.create_string_buffer(_MOST_BYTES)
            ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
            self._action = action.raw

    def restore(self) -> None:
        """Let SIGTERM do that again."""
        if self._handler is not None:  # Python's own record; None for a handler in C from before Python
            signal.signal(signal.SIGTERM, self._handler)
        if self._action:
            ctypes.CDLL(None).sigaction(signal.SIGTERM, self._action, None)
