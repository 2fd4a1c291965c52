"""The private names of Prefect that this package uses are listed in docs/supported.md, and the installed Prefect has them."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from prefect.blocks.core import Block
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_version import IS_3_9

ROOT = Path(__file__).parents[1]
SUPPORTED = (ROOT / "docs/supported.md").read_text()
LISTED = dict(re.findall(r"^\| `(prefect\.[\w.]+)`(?:, (since|before) 3\.9)? \|", SUPPORTED, re.MULTILINE))
OF_BLOCKS = {name for name in vars(Block) if name.startswith("_") and not name.startswith("__")}
OF_BLOCKS |= {*Block.__private_attributes__, *Block.__annotations__} - set(Block.model_fields)


def trees():
    for folder in ("package", "ckpt", "tasks", "flows", "deployments"):
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def imported():
    """Yield the imported names of Prefect with a private part."""
    for tree in trees():
        for node in ast.walk(tree):
            modules = [f"{node.module}.{it.name}" for it in node.names] if isinstance(node, ast.ImportFrom) else []
            modules += [it.name for it in node.names] if isinstance(node, ast.Import) else []
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value)
            modules += [node.value] if is_text else []
            yield from (it for it in modules if it.split(".")[0] == "prefect" and any(map(is_private, it.split("."))))


def attributes():
    """Return the private attributes that are looked up on anything but self, cls and super()."""
    return {
        node.attr
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def test_every_private_import_is_listed():
    assert set(imported()) == {it for it in LISTED if any(map(is_private, it.split(".")[:-1]))}


def test_every_private_name_of_blocks_and_of_the_embedded_server_is_listed():
    module = importlib.import_module("prefect.server.api.server")
    theirs = OF_BLOCKS | {name for name in vars(module.SubprocessASGIServer) if is_private(name)}
    ours = {name for name in vars(CheckpointStorage) if is_private(name)} - OF_BLOCKS
    listed = {it.rpartition(".")[2] for it in LISTED}
    assert (attributes() - ours) & theirs <= listed
    assert {it for it in listed if is_private(it)} <= attributes() | {"_logo_url"}


@pytest.mark.parametrize("name", LISTED)
def test_the_installed_prefect_has_it(name):
    assert has(name) == {"": True, "since": IS_3_9, "before": not IS_3_9}[LISTED[name]]


def has(name):
    path, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, kind = path.rpartition(".")
        owner = getattr(importlib.import_module(module), kind, None)
    return hasattr(owner, attribute) or attribute in {
        *getattr(owner, "__private_attributes__", ()),
        *getattr(owner, "__annotations__", ()),
    }
