"""The identity of a directory that ranks report, also on several machines: they give one shared directory different numbers.

On a filesystem that other machines may see, inodes and device numbers prove nothing: FUSE numbers the files of each mount
anew. There, the first rank leaves a token in the directory, and the others find it. The name differs from report to report,
so that a rank that is slow to remove a token does not remove that of the next report.
"""

import secrets
import time
from pathlib import Path

from prefect_torch.ckpt.storage.machine.mounts import is_local
from prefect_torch.ckpt.storage.machine.scratch import kernel_id

from .folder import IDENTITY_PREFIX

_LONGEST_WRITE_S = 10.0


def identity_of(directory: Path, step: int) -> str:
    """Return the identity of a directory, equal on ranks of any machine that report it at `step`, and whatever its path is.

    Costs a stat; on a filesystem that other machines may see, a small file, too, which `forget_identity` removes.

    Raises:
        OSError: If the directory is gone, or nothing can be written to it.
        TimeoutError: If a rank has created its token and not written it within ten seconds.

    """
    if is_local(directory):
        status = directory.stat()
        return f"{kernel_id()} {status.st_dev} {status.st_ino}"
    token, file = secrets.token_hex(16), _token_file(directory, step)
    try:
        with file.open("x") as created:  # atomic on NFS, too
            created.write(token)
    except FileExistsError:
        return _read_token(file)
    return token


def forget_identity(directory: Path, step: int) -> None:
    """Remove what `identity_of` left in a directory, once all ranks know its identity."""
    _token_file(directory, step).unlink(missing_ok=True)


def _token_file(directory: Path, step: int) -> Path:
    return directory / f"{IDENTITY_PREFIX}{step}"


def _read_token(file: Path) -> str:
    deadline_s = time.monotonic() + _LONGEST_WRITE_S
    while not (token := file.read_text()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{file} stays empty: the rank that created it may have been killed; remove it")
        time.sleep(0.01)
    return token
