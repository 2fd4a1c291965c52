"""Installs what is measured beside this package into an environment of its own, once for each content of requirements.txt.

python tests/benchmarks/peers/install.py          takes some minutes the first time; prints the path of its Python
"""

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
FOLDER = Path(__file__).parents[3] / "build" / "peers-venv"


def install():
    """Return the interpreter that has the peers; of several processes that ask, one installs."""
    python, done = FOLDER / "bin" / "python", FOLDER / REQUIREMENTS.name
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{FOLDER}.lock"):
        if not done.exists() or done.read_text() != REQUIREMENTS.read_text():
            subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
            torch = os.environ.get("TORCH", "torch==2.13.0").split()  # as the Makefile's: another index, where that is wanted
            for packages in (torch, ["-r", REQUIREMENTS]):
                subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
            done.write_text(REQUIREMENTS.read_text())
    return python


if __name__ == "__main__":
    print(install())
