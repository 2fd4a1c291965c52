"""Descriptors whose closing others wait for: pipes to guards, sockets of fork servers, locks.

A process that user code forks from this one (multiprocessing, workers of a DataLoader) has copies of all descriptors, and may
outlive this one: ranks of a killed flow would keep running, and its GPUs would stay taken. The kernel closes descriptors when
a program is executed, but not in a fork.
"""

import os

_closed_in_forks: set[int] = set()


def close_in_forks(*descriptors: int) -> None:
    """Let processes that are forked from now on not have `descriptors` open, each of which is closed by `close_here`."""
    _closed_in_forks.update(descriptors)


def close_here(descriptor: int) -> None:
    """Close a descriptor of this process that `close_in_forks` was given, or another one."""
    _closed_in_forks.discard(descriptor)
    os.close(descriptor)


def _close_in_this_fork() -> None:
    # Their numbers stay in use: copies of objects in this process may close them, and another file must not have them then.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _closed_in_forks:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _closed_in_forks.clear()


os.register_at_fork(after_in_child=_close_in_this_fork)
