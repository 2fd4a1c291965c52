"""The line that `ps` shows of a process."""

import ctypes
from pathlib import Path


def set_process_title(title: str) -> None:
    """Let `ps` show `title`, cut to the length of the command with which the process was started; without effect beyond Linux.

    Overwrites the arguments in place, as PostgreSQL does: the kernel shows text up to the first null byte if the last byte of
    the arguments is not null (https://github.com/torvalds/linux/blob/v6.6/fs/proc/base.c, get_mm_cmdline).
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), after the name in parentheses
    length = end - start
    if start == 0 or length < 2:  # noqa: PLR2004 - a byte of text and its end
        return
    text = title.encode(errors="surrogateescape")[: length - 2]
    ctypes.memmove(start, text.ljust(length - 1, b"\0") + b"\1", length)
