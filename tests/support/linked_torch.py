"""Lends an environment the torch of this interpreter, which is gigabytes, and nothing else of what is installed here."""

import re
from importlib.metadata import distribution
from pathlib import Path


def link_torch(environment: Path, folder: Path) -> None:
    """Let `environment` find this interpreter's torch, and the CUDA libraries that it may need, by links in `folder`."""
    folder.mkdir()
    needed = [re.split(r"[^\w-]", line)[0] for line in distribution("torch").requires or ()]
    for name in ["torch", *(name for name in needed if name.startswith(("nvidia", "cuda", "triton")))]:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(found.locate_file(top))
    (site_packages,) = (environment / "lib").glob("python*/site-packages")
    (site_packages / "torch-of-the-tests.pth").write_text(str(folder))
