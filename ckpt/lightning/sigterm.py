"""The action of SIGTERM in this process, saved and restored around a Trainer's own handler."""

import ctypes
import signal
import sys
import threading

_MOST_BYTES = 256  # of a struct sigaction


class SigtermAction:
    """The current action of SIGTERM, also that of a handler in C, such as the one by which a rank survives the first."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)
        self._action = b""
        if sys.platform == "linux":
            action = ctypes.create_string_buffer(_MOST_BYTES)
            ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
            self._action = action.raw

    def restore(self) -> None:
        """Restore the action of SIGTERM; do nothing in another thread than the main one, where no Trainer changes it either."""
        if threading.current_thread() is not threading.main_thread():  # Python refuses it there
            return
        if self._handler is not None:  # Python's own record; None for a handler that C code installed
            signal.signal(signal.SIGTERM, self._handler)
        if self._action:
            ctypes.CDLL(None).sigaction(signal.SIGTERM, self._action, None)
