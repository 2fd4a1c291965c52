"""The database of Prefect's embedded server, which all flows of one home directory share."""

import fcntl
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prefect
from prefect.settings import get_current_settings
from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks

if TYPE_CHECKING:
    import subprocess

_VERSIONS = "server/database/_migrations/versions/sqlite"  # of Prefect: a file for each revision
_REVISION = re.compile(r"^(down_)?revision = .(\w+)", re.MULTILINE)
_LONGEST_S = 120.0
_POLL_S = 0.2


def newer_database() -> tuple[str, str] | None:
    """Return that a newer Prefect has used the database in Prefect's home directory, and the advice; None if none has.

    Environments of one user share that directory. Prefect cannot migrate a database from a revision that it does not have.
    """
    database = _shared_database()
    if database is None:
        return None
    found, migrations = _revisions_in(database), _migrations()
    if not migrations or all(any(revision in source for source in migrations) for revision in found):
        return None
    why = f"{database} was used by a newer Prefect than {version('prefect')}, whose server cannot read it any longer"
    return why, "set PREFECT_HOME to another directory in this environment, upgrade prefect, or set PREFECT_API_URL"


def migrated_by_one(start: Callable[[], "subprocess.Popen[Any]"]) -> "subprocess.Popen[Any]":
    """Return the server that `start` starts, once no other server migrates the same database.

    Prefect takes no lock: of several flows that begin at the same time with a new database, or with that of an older Prefect,
    some find that a "table ... already exists", and never begin. The wait is here, before the timeout of the server's start
    begins. If the lock cannot be taken, as on a filesystem without locks, the server starts without it.
    """
    database = _shared_database()
    lock = None if database is None else _lock(database)
    if database is None or lock is None:
        return start()
    try:
        server = start()
    except BaseException:
        close_here(lock)
        raise
    threading.Thread(target=_release, args=(lock, database, server), name="migration", daemon=True).start()
    return server


def _shared_database() -> Path | None:
    """Return the database in Prefect's home directory; None if its server has another one."""
    settings = get_current_settings()
    database, url = settings.home.absolute() / "prefect.db", settings.server.database.connection_url
    return database if url is not None and url.get_secret_value().endswith(str(database)) else None


def _lock(database: Path) -> int | None:
    """Return a descriptor with the lock on the database's migration; None if nothing is to be migrated, or without a lock."""
    if _is_migrated(database):
        return None
    deadline_s = time.monotonic() + _LONGEST_S
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(database.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    close_in_forks(lock)
    try:
        while time.monotonic() < deadline_s and not _is_migrated(database):
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            time.sleep(_POLL_S)
    except OSError:
        pass
    except BaseException:
        close_here(lock)
        raise
    close_here(lock)
    return None


def _release(lock: int, database: Path, server: "subprocess.Popen[Any]") -> None:
    while server.poll() is None and not _is_migrated(database):
        time.sleep(_POLL_S)
    close_here(lock)


def _is_migrated(database: Path) -> bool:
    newest = _newest_revision()
    return newest is None or newest in _revisions_in(database)


def _revisions_in(database: Path) -> list[str]:
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            return [str(row[0]) for row in connection.execute("SELECT version_num FROM alembic_version")]
    except sqlite3.Error:  # there is none yet
        return []


@cache
def _newest_revision() -> str | None:
    named: dict[str, set[str]] = {"": set(), "down_": set()}
    for source in _migrations():
        for previous, revision in _REVISION.findall(source):
            named[previous].add(revision)
    newest = named[""] - named["down_"]
    return newest.pop() if len(newest) == 1 else None


def _migrations() -> list[str]:
    """Return the sources of Prefect's migrations."""
    return [path.read_text() for path in (Path(prefect.__file__).parent / _VERSIONS).glob("*.py")]
