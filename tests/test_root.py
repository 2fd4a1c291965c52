"""The package's own module: every name, at no cost, as programs, type checkers and Prefect take them from it."""

import importlib
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import prefect_torch
import pytest

FOLDERS = ("ckpt", "ckpt.blocks", "tasks", "flows", "deployments")
RANKS_NAMES = ("Checkpoint", "get_checkpoint", "get_context", "log_metrics", "report", "RandomState", "RankLocal")


def loaded_by(program: str) -> set[str]:
    printed = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"], capture_output=True, check=True
    )
    return set(printed.stdout.decode().split())


@pytest.mark.parametrize("name", prefect_torch.__all__)
def test_a_name_of_the_root_is_that_of_its_folder(name):
    folders = [importlib.import_module(f"prefect_torch.{folder}") for folder in FOLDERS]
    (found,) = {id(getattr(folder, name)) for folder in folders if name in folder.__all__}
    assert id(getattr(prefect_torch, name)) == found


def test_importing_the_root_imports_neither_prefect_nor_torch():
    loaded = loaded_by("import prefect_torch; assert prefect_torch.__version__")
    assert not loaded & {"prefect", "torch", "pydantic", "numpy", "prefect_torch.ckpt"}


def test_what_a_rank_takes_from_the_root_does_not_import_prefect():
    assert not loaded_by(f"from prefect_torch import {', '.join(RANKS_NAMES)}") & {"prefect", "torch"}


def test_windows_is_refused_in_words():
    program = "import sys; sys.platform = 'win32'; import prefect_torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: prefect-torch does not run on Windows: use Linux" in done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'prefect_torch' has no attribute 'nosuch'"):
        _ = prefect_torch.nosuch


def test_type_checkers_see_every_name_where_programs_find_it():
    seen = dict(
        re.findall(
            r"from (prefect_torch\.\S+) import \(?([^)]+?)\)?\n(?=    from|\n__)", Path(prefect_torch.__file__).read_text()
        )
    )
    names = {name: module for module, names in seen.items() for name in re.findall(r"\w+", names)}
    assert names == {name: f"prefect_torch{folder}" for name, folder in prefect_torch._FOLDERS.items()}
    assert sorted(names) == sorted(prefect_torch.__all__)


def test_prefect_finds_the_block_without_an_import_of_ours_and_without_torch():
    collections = entry_points(group="prefect.collections")
    loaded = {entry.name: entry.load() for entry in collections if entry.dist.name == "prefect-torch"}
    assert loaded["prefect_torch"] is prefect_torch
    needed = ("prefect-aws", "prefect-torch")  # the others take seconds
    others = [entry.module.partition(".")[0] for entry in collections if entry.dist.name not in needed]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({others}))
from prefect.blocks.core import Block
print(Block.get_block_class_from_key('checkpoint-storage'))
"""
    found = loaded_by(program)
    assert found >= {"prefect_torch.ckpt.blocks", "prefect_torch.ckpt.storage.specs.blocks"}
    assert "torch" not in found
