"""Validity of keys: keys read from a storage decide where files are written, so they are checked first."""

import re
import secrets

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")  # as narrow as possible: a name that matches is no object
# https://github.com/torvalds/linux/blob/v6.12/fs/nfs/unlink.c (nfs_sillyrename), fs/afs/dir_silly.c, and libfuse's lib/fuse.c
# (hidden_name); OpenAFS' names are those of fs/afs.
_KEPT_OPEN = re.compile(r"\.nfs[0-9a-f]{24}|\.__afs[0-9A-F]+|\.fuse_hidden[0-9a-f]{16}")
_REFUSED = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\\\x00-\x1f\ud800-\udfff]")


def temporary_name() -> str:
    """Return a name, unused in any directory, for an unfinished file."""
    return f".tmp-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return whether `name` has the form of `temporary_name`; no object may have it."""
    return _TEMPORARY.fullmatch(name) is not None


def is_kept_open(name: str) -> bool:
    """Return whether `name` is one by which the client of a file server keeps a deleted file for a process that has it open.

    It removes the file with the last such process. Until then a deletion fails, or only gives the file another such name.
    """
    return _KEPT_OPEN.fullmatch(name) is not None


def is_unlisted(name: str) -> bool:
    """Return whether listings leave out a file of this name: it is unfinished, or deleted and still open."""
    return is_temporary(name) or is_kept_open(name)


def is_key(key: str) -> bool:
    """Return whether `check_key` accepts `key`; a listing also holds names that other programs have chosen."""
    return _REFUSED.search(key) is None


def check_key(key: str) -> str:
    """Return `key`, one or more names joined with "/" that stay below any path they are joined to.

    Raises:
        ValueError: If it is empty or absolute, or holds "..", ".", an empty name, a backslash, a control character, or a
            surrogate, which no text in UTF-8 has.

    """
    if not is_key(key):
        raise ValueError(f"{key!r} cannot be a storage key: use plain names joined with '/'")
    return key
