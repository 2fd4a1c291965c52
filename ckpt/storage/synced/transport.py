"""The command or function that copies a directory to another place: bounded in time, with its output in the log."""

import base64
import importlib
import logging
import os
import pickle
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.storage.retry import classify, raise_if_ended
from prefect_torch.ckpt.text import name_of, without_login

Copy = Callable[[str, str], object]
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
PLACEHOLDERS = ("{source}", "{target}")
_PICKLED = "pickle:"
_LONGEST_OUTPUT = 4000  # bytes
_LOOK_S = 0.5
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transport:
    """How a directory of this machine is synced, as the options of a StorageSpec hold it.

    Attributes:
        upload: Copies the directory {source} to {target}: a command template, "module:function", or a function that
            `pickled_function` has encoded.
        download: The same, from {source} elsewhere to {target} here.
        target: The place to copy to.
        period_s: The longest time in seconds that small objects may wait for others.
        timeout_s: The seconds that one call may take; a command is then killed.
        late: A regular expression: an object whose whole key matches it may be uploaded late.

    """

    upload: str
    download: str
    target: str
    period_s: str
    timeout_s: str
    late: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Transport | None":
        """Return the transport in the options of a storage; None if it has none."""
        if "upload" not in options:
            return None
        return cls(**{field.name: options[field.name] for field in fields(cls)})

    def options(self) -> dict[str, str]:
        """Return it as options of a storage."""
        return asdict(self)

    def is_late(self, key: str) -> bool:
        """Return whether an object may be uploaded with others."""
        return re.fullmatch(self.late, key) is not None

    def run_upload(self, source: str) -> None:
        """Copy the content of a local directory to the target.

        Raises:
            StorageError: If that failed, or took too long.
            ValueError: If the command or function does not exist.
            OSError: If the command cannot be started for the moment.

        """
        _copy(self.upload, source, self.target, float(self.timeout_s))

    def run_download(self, path: str, target: str) -> None:
        """Copy the content of the target's directory `path` to a local directory; raises as `run_upload`."""
        _copy(self.download, f"{self.target}/{path}/", target, float(self.timeout_s))


def pickled_function(payload: bytes) -> str:
    """Return a pickled function as text."""
    return _PICKLED + base64.b64encode(payload).decode()


def _copy(how: str, source: str, target: str, timeout_s: float) -> None:
    if how.startswith(_PICKLED):
        copy: Copy = pickle.loads(base64.b64decode(how.removeprefix(_PICKLED)))  # noqa: S301 - from the process that started this
        _call(copy, source, target, timeout_s)
    elif FUNCTION.fullmatch(how):
        _call(_imported(how), source, target, timeout_s)
    else:
        _run([word.replace("{source}", source).replace("{target}", target) for word in shlex.split(how)], timeout_s)


def _imported(name: str) -> Copy:
    place, _, function = name.partition(":")
    try:
        found: Copy = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"the function {name!r} that syncs a directory cannot be imported: {exc}") from exc
    return found


def _call(copy: Copy, source: str, target: str, timeout_s: float) -> None:
    """Call a function in a thread, since nothing else bounds its time; a thread that hangs is left behind."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            copy(source, target)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    thread = threading.Thread(target=call, name="sync", daemon=True)
    thread.start()
    ends_s = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := ends_s - time.monotonic()) > 0:
        thread.join(min(left_s, _LOOK_S))
        raise_if_ended()
    name = name_of(copy)
    if thread.is_alive():
        raise StorageError(without_login(f"{name}({source!r}, {target!r}) has not returned after {timeout_s:g} s"))
    if errors:
        raise StorageError(without_login(f"{name}({source!r}, {target!r}) raised {errors[0]!r}")) from errors[0]


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Wait for a process; raise TimeoutExpired after `timeout_s`, and what ends the storage operations of this context."""
    ends_s = time.monotonic() + timeout_s
    while (left_s := ends_s - time.monotonic()) > _LOOK_S:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
            return
        raise_if_ended()
    process.wait(max(0.0, left_s))


def _run(command: list[str], timeout_s: float) -> None:
    started_s, shown = time.monotonic(), without_login(shlex.join(command))
    # A file: a pipe ends with the last process that holds it, such as a shared connection that the command has opened.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all of its processes can be killed
            )
        except OSError as exc:
            if classify(exc) == "transient":  # as at a limit of processes, or on a network disk that has the command
                raise
            raise ValueError(
                f"the command {shown} that syncs a directory cannot be started: {exc}; every node needs it"
            ) from exc
        try:
            _wait(process, timeout_s)
        except BaseException as exc:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
        if process.returncode == 0:
            return
        output.seek(max(0, output.seek(0, os.SEEK_END) - _LONGEST_OUTPUT))
        text = without_login(output.read().decode(errors="replace").strip())
    ended = f"exited with {process.returncode}" if process.returncode > 0 else f"was killed by signal {-process.returncode}"
    # Log each try that failed, since the storage's final error shows only that of the last one.
    _logger.warning("%s %s after %.1f s; its output:\n%s", shown, ended, time.monotonic() - started_s, text)
    raise StorageError(f"{command[0]} {ended} after {time.monotonic() - started_s:.1f} s: {text.rpartition(chr(10))[2]}")
