"""NCCL's flight recorder, which records which collectives each rank has started and which it has completed."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prefect_torch.ckpt.storage.machine.scratch import make_scratch, remove_scratch

_PIPE, _FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
# ProcessGroupNCCL opens the pipe only where a size is given; the second name is that of versions before 2.9.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_SIZE = "2000"


class FlightRecorder:
    """The flight recorder of one rank, in a scratch directory, which cleaners of the temporary directory may spare.

    Args:
        rank: The rank.
        environment: The environment of its process; what it says of the recorder stays.

    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self._folder = make_scratch()
        defaults = dict.fromkeys((_PIPE, _FILE), str(self._folder / "rank-")) | dict.fromkeys(_SIZES, _SIZE)
        self.environment = {name: environment.get(name, default) for name, default in defaults.items()}
        self._pipe = f"{self.environment[_PIPE]}{rank}.pipe"
        self._file = Path(f"{self.environment[_FILE]}{rank}")
        self._before = _modified(self._file)

    def request(self) -> bool:
        """Request the rank's record, and return whether the rank listens: not without NCCL, or before it has a group."""
        try:
            descriptor = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(descriptor, "wb", buffering=0) as pipe:
                pipe.write(b"1")
        except OSError:  # also of a rank that exits just now: it has closed the pipe before it is written to
            return False
        return True

    def close(self) -> Path | None:
        """Return the record if one was written, on request or by NCCL's own watchdog; call it after the process has exited.

        None as well if the record cannot be kept, as where a cleaner has removed it: that is no failure of the rank.
        """
        with contextlib.suppress(OSError):
            Path(self._pipe).unlink()
        is_new = _modified(self._file) not in (None, self._before)
        record = self._file if is_new else None
        if is_new and self._file.is_relative_to(self._folder):
            record = _kept(self._file)
        remove_scratch(self._folder)
        return record


def _kept(file: Path) -> Path | None:
    """Move a record to a directory that stays when this process ends, and return its path there; None if that is impossible."""
    try:
        return file.replace(Path(tempfile.mkdtemp(prefix="prefect-torch-nccl-")) / file.name)
    except OSError:
        return None


def _modified(file: Path) -> int | None:
    """Return when a file was last modified; None if it cannot be seen. It may be old if the user has chosen its name."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
