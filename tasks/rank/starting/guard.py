"""Kills a rank with all its descendants as soon as its supervisor is gone. A program of its own: standard library only.

    python guard.py <lifeline fd> <status fd> <passed fd> <command ...>
    python guard.py <lifeline fd> <status fd> adopt <process>

It starts the command, or adopts a child that it has already, and waits. A "t" on the lifeline sends SIGTERM to the command,
twice if it outlasts the first (`outlast_sigterm`), any other byte STACK_TRACES_SIGNAL, on which the command must print its
stack traces. The end of file of the lifeline, which the kernel delivers however the supervisor died, kills the command and all
its descendants (SIGKILL). The command's return code is written to the status pipe. The guard needs no lock of the command, so
it also kills a rank that hangs in native code. It has few imports, since it starts beside the command, on the same cores.
"""

import os
import signal
import sys
import threading
import time

ADOPT = "adopt"
STACK_TRACES_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # unused by others: Lightning takes SIGUSR1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ZOMBIE = "Z"
_PAUSE_S = 0.01
_PENDING_S, _LOOK_S = 1.0, 0.001
# Helpers of torch and of Python that remove the shared memory of other processes, and end once all of these are gone; scancel;
# and Slurm's srun, which releases its allocation when the agents have ended, as they do without their leader. The seconds that
# each may take; Slurm's own requests, as of scancel, have ten.
_CLEAN_UP_S = {b"torch_shm_manager": 1.0, b"multiprocessing.resource_tracker": 1.0, b"srun\0": 1.0, b"scancel": 12.0}
_START_S = 1.0
_NEVER_S = float("inf")
_SLURM_STEP = "SLURM_STEP_ID"


def main(lifeline: int, status: int, passed: int, command: list[str]) -> None:
    """Run `command` until it or the supervisor exits."""
    import subprocess  # noqa: PLC0415 - not needed to adopt a child

    prepare_guard()
    with subprocess.Popen(
        command,
        pass_fds=[passed],
        start_new_session=True,
        preexec_fn=prepare_command,  # noqa: PLW1509 - this process still has one thread
    ) as child:
        os.close(passed)
        _guard(lifeline, status, _Child(child.pid))


def adopt(lifeline: int, status: int, pid: int) -> None:
    """Wait until the child `pid` or the supervisor exits; `prepare_guard` must have been called before the fork."""
    _guard(lifeline, status, _Child(pid))


def prepare_guard() -> None:
    """Ignore signals that are meant for the command, and inherit its orphaned descendants."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command handles a signal to the whole group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children, where `_kill_descendants` finds them


def prepare_command() -> None:
    """Handle signals as by default, and die with the guard; to be called in the command's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the guard itself is killed


def outlast_sigterm() -> None:
    """Let this process, a rank, outlast one SIGTERM; the next one ends it. Processes that it starts end by the first.

    systemd sends it to all processes of a unit together, also to ranks that have the grace of the flow for a last checkpoint.
    The handler is in C, since one of Python would have to wait for native code, and every program would inherit SIG_IGN.

    In a step of Slurm, it outlasts those that follow, too: at a time limit, Slurm sends two, some hundredths of a second apart.
    There, the first one makes the process, and processes that it starts from then on, ignore the others.
    """
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415 - only ranks need it here

    libc = ctypes.CDLL(None)
    if _SLURM_STEP in os.environ and hasattr(libc, "sigignore"):
        libc.signal(signal.SIGTERM, ctypes.cast(libc.sigignore, ctypes.c_void_p))
        os.register_at_fork(after_in_child=_end_by_sigterm)
    elif hasattr(libc, "sysv_signal"):  # of glibc: the handler is used once, and then the default is restored
        libc.sysv_signal(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))  # which does nothing
        signal.siginterrupt(signal.SIGTERM, False)
        os.register_at_fork(after_in_child=_end_by_sigterm)


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the function has set no handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _guard(lifeline: int, status: int, child: "_Child") -> None:
    threading.Thread(target=_watch, args=(lifeline, child), daemon=True).start()
    returncode = child.wait()
    _kill_descendants()
    os.write(status, str(returncode).encode())


def _watch(lifeline: int, child: "_Child") -> None:
    while order := os.read(lifeline, 1):
        if order == b"t":
            child.terminate()
        else:
            child.send_signal(STACK_TRACES_SIGNAL)
    child.send_signal(signal.SIGKILL)


class _Child:
    """A child process by its id, which no other process can have before `wait` has reaped it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_reaped = False
        self._reaping = threading.Lock()

    def send_signal(self, number: int) -> None:
        """Send a signal; without effect once the process has exited."""
        with self._reaping:
            if not self._is_reaped:
                os.kill(self._pid, number)

    def terminate(self) -> None:
        """Send SIGTERM; then another one if the process handled only the first, or SIGKILL if it ignores the others.

        `outlast_sigterm` makes a rank do either.
        """
        self.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + _PENDING_S
        # Checked immediately, since a handler of the function may remove itself later.
        is_pending, is_caught, is_ignored = True, True, False
        while is_pending and time.monotonic() < until_s:
            is_pending, is_caught, is_ignored = _sigterm_of(self._pid)
            if is_pending:
                time.sleep(_LOOK_S)
        if not is_caught:
            self.send_signal(signal.SIGKILL if is_ignored and _SLURM_STEP in os.environ else signal.SIGTERM)

    def wait(self) -> int:
        """Return its exit code once it has exited; negative for the signal that killed it.

        Its orphans are reaped meanwhile, as init would do: a training may have thousands, and a limit of processes.
        """
        ended = 0
        while ended != self._pid:
            if ended:
                os.waitpid(ended, 0)
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert found is not None  # without WNOHANG
            ended = found.si_pid
        with self._reaping:
            self._is_reaped = True
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _sigterm_of(pid: int) -> tuple[bool, bool, bool]:
    """Return whether a process has yet to handle a SIGTERM, has a handler (also where that is unknown), and ignores it."""
    masks = {b"ShdPnd": 0, b"SigCgt": ~0, b"SigIgn": 0}
    try:
        with open(f"/proc/{pid}/status", "rb") as status:  # noqa: PTH123 - without the import of pathlib
            for line in status:
                name, _, mask = line.partition(b":")
                if name in masks:
                    masks[name] = int(mask, 16)
    except OSError:
        pass
    bit = 1 << (signal.SIGTERM - 1)
    return bool(masks[b"ShdPnd"] & bit), bool(masks[b"SigCgt"] & bit), bool(masks[b"SigIgn"] & bit)


def _kill_descendants() -> None:
    """Kill all descendants, and return once they are gone, apart from those that this user may not kill (`sudo`).

    Helpers that clean up after the others have a second for it, and a cancellation of an allocation has twelve.
    """
    refused: set[int] = set()
    alone_since_s = _NEVER_S
    while _has_children():
        import contextlib  # noqa: PLC0415 - most commands leave no process

        left = {pid: state for pid, state in _descendants().items() if pid not in refused}
        if refused and set(left.values()) <= {_ZOMBIE}:  # their parents keep running
            _warn_of(refused)
            return
        waited_s = time.monotonic() - alone_since_s
        cleaning_up = {pid for pid, state in left.items() if state != _ZOMBIE and waited_s < _clean_up_s(pid)}
        others = left.keys() - cleaning_up
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                refused.add(pid)
        is_alone = all(left[pid] == _ZOMBIE for pid in others)
        alone_since_s = min(alone_since_s, time.monotonic()) if is_alone else _NEVER_S
        waits = bool(others) and not (refused or cleaning_up)
        with contextlib.suppress(ChildProcessError):
            ended, _ = os.waitpid(-1, 0 if waits else os.WNOHANG)
            while ended:
                ended, _ = os.waitpid(-1, os.WNOHANG)
        if not waits:
            time.sleep(_PAUSE_S)


def _clean_up_s(pid: int) -> float:
    """Return for how long a helper may clean up after all others; less than any time for other processes.

    A process has no command line while it executes its program, which may be a helper's.
    """
    import contextlib  # noqa: PLC0415 - most commands leave no process
    from pathlib import Path  # noqa: PLC0415 - most commands leave no process

    with contextlib.suppress(OSError):
        line = Path("/proc", str(pid), "cmdline").read_bytes()
        if not line:
            return _START_S
        return max((longest_s for name, longest_s in _CLEAN_UP_S.items() if name in line), default=-_NEVER_S)
    return -_NEVER_S


def _warn_of(refused: set[int]) -> None:
    import contextlib  # noqa: PLC0415 - most commands leave no process
    from pathlib import Path  # noqa: PLC0415 - most commands leave no process

    names = []
    for pid in sorted(refused):
        with contextlib.suppress(OSError):
            names.append(f"{Path('/proc', str(pid), 'comm').read_text('utf-8', 'replace').strip()} ({pid})")
    with contextlib.suppress(OSError):  # nobody reads the output
        os.write(1, f"WARNING: the rank's {', '.join(names)} goes on: it is another user's\n".encode())


def _has_children() -> bool:
    """Return whether there are descendants: those whose parents are gone have become children of this process."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants() -> dict[int, str]:
    """Return the state of each descendant by its id."""
    import contextlib  # noqa: PLC0415 - most commands leave no process
    from pathlib import Path  # noqa: PLC0415 - most commands leave no process

    known = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Bytes: any process of the machine may have a name that is no text here.
            state, parent, *_ = entry.read_bytes().rpartition(b")")[2].split()
            known[int(entry.parent.name)] = (state.decode(), int(parent))
    found = [os.getpid()]
    for pid in found:
        found.extend(child for child, (_, parent) in known.items() if parent == pid)
    return {pid: known[pid][0] for pid in found[1:]}


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - a guard that adopts its child was prepared before

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    if sys.argv[3] == ADOPT:
        adopt(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
