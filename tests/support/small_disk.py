"""A filesystem that is soon full, where mounting one is permitted."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(folder, options="size=1m"):
    """Mount a filesystem in memory at the new directory `folder`; skip the test where that is not permitted."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a small filesystem is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
