"""Process ids of this machine."""

import os


def is_alive(pid: int) -> bool:
    """Return whether there is a process with that id, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
