"""Prefect's folder and database, ready for the processes and servers that tests start; imports no Prefect."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import cache
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

PREFECT = str(Path(sys.executable).parent / "prefect")


@cache
def empty_database() -> Path:
    """Return a SQLite file with Prefect's tables, kept in the environment: to make them is half of a first start."""
    kept = Path(sys.prefix, f"prefect-{version('prefect')}.db")
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=sys.prefix) as home:
                made, copy = Path(home, "prefect.db"), Path(home, "copy.db")
                url = {"PREFECT_HOME": home, "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{made}"}
                command = [PREFECT, "server", "database", "upgrade", "--yes"]
                subprocess.run(command, env={**os.environ, **url}, check=True, capture_output=True)
                with closing(sqlite3.connect(made)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)  # with what is still in the journal beside it
                copy.replace(kept)
    return kept


def prepared_home(home: Path) -> Path:
    """Return `home`, a PREFECT_HOME whose server finds the tables of its database there, as at every start but the first."""
    home.mkdir(exist_ok=True)
    if not (home / "prefect.db").exists():
        shutil.copyfile(empty_database(), home / "prefect.db")
    return home
