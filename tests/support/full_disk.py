"""What copies a folder to a disk that becomes full: a module that ranks import faster than the tests that use it."""

import subprocess
from pathlib import Path


def copy_until_the_second_manifest(source: str, target: str) -> None:
    if list(Path(source).rglob("manifests/*-00000001-*.json")):
        raise OSError("the disk there is full")
    subprocess.run(["rsync", "-a", source, target], check=True)
