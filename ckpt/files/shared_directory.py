"""The identity of a directory that ranks report, also on several machines: they give one shared directory different numbers.

On a filesystem that other machines may see, inodes and device numbers prove nothing: FUSE numbers the files of each mount
anew. There, the first rank leaves a token in the directory, and the others find it. The name differs from report to report,
also to a repeated one and to that of a restart: a rank that is slow to remove a token does not remove that of the next report,
and what a killed rank has left is not read again.
"""

import secrets
import time
from contextlib import suppress
from pathlib import Path

from prefect_torch.ckpt.storage.machine.mounts import is_local
from prefect_torch.ckpt.storage.machine.scratch import kernel_id
from prefect_torch.ckpt.storage.protocol import RetryPolicy

from .folder import IDENTITY_PREFIX

_LONGEST_WRITE_S = RetryPolicy().deadline_s  # the file server may be away in the middle of it, as one of a storage may


def identity_of(directory: Path, report: str) -> str:
    """Return the identity of a directory, equal on ranks of any machine in one `report` of it, and whatever its path is.

    Costs a stat; on a filesystem that other machines may see, a small file, too, which `forget_identity` removes.

    Args:
        directory: The directory.
        report: A name of the report, equal on all ranks and of no other report.

    Raises:
        OSError: If the directory is gone, or nothing can be written to it.
        TimeoutError: If a rank has created its token and not written it within two minutes.

    """
    if is_local(directory):
        status = directory.stat()
        return f"{kernel_id()} {status.st_dev} {status.st_ino}"
    token, file = secrets.token_hex(16), _token_file(directory, report)
    try:
        with file.open("x") as created:  # atomic on NFS, too
            try:
                created.write(token)
                created.close()  # here a full filesystem may raise
            except BaseException:
                file.unlink(missing_ok=True)
                raise
    except FileExistsError:
        return _read_token(file)
    return token


def forget_identity(directory: Path, report: str) -> None:
    """Remove what `identity_of` left in a directory, once all ranks know its identity, or the report has failed."""
    with suppress(OSError):  # another rank has removed it, or the user the directory
        if not is_local(directory):
            _token_file(directory, report).unlink()


def _token_file(directory: Path, report: str) -> Path:
    return directory / f"{IDENTITY_PREFIX}{report}"


def _read_token(file: Path) -> str:
    deadline_s = time.monotonic() + _LONGEST_WRITE_S
    while not (token := file.read_text()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{file} stays empty: the rank that created it may have been killed; remove it")
        time.sleep(0.01)
    return token
