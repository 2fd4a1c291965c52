"""Process ids of this machine."""

import os


def is_alive(pid: int) -> bool:
    """Return whether a process of any user has the id `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
