"""Which folder may import what, and what an import may cost."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "ckpt": set(),
    "tasks": {"ckpt"},
    "flows": {"ckpt", "tasks"},
    "deployments": {"ckpt", "tasks", "flows"},
}
# What the wings of tasks/ may import of each other; "" are its modules that are in none.
TASKS_MAY_IMPORT = {
    "rank": set(),
    "prepare": set(),
    "options": set(),
    "gang": {"rank"},
    "": {"rank", "gang", "options"},
    "training": {"rank", "gang", "options", ""},
}
MODULES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]
INTEGRATIONS = ("accelerate", "lightning", "transformers")
TASKS = [path for path in sorted((ROOT / "tasks").rglob("*.py")) if path.name != "__init__.py"]
RANK_SIDE = [*(f"rank.{path.stem}" for path in TASKS if path.parent.name == "rank"), "training.job"]
PREPARE = [f"prepare.{path.stem}" for path in TASKS if path.parent.name == "prepare"]


def imports(path: Path, *, only_top: bool = False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.split())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_imports_only_folders_below_it(path):
    for name in imports(path):
        assert not name.startswith(".."), f"{name}: across folders, import from prefect_torch"
        if name.startswith("prefect_torch"):
            own, *_ = path.relative_to(ROOT).parts
            folder = name.split(".")[1]
            is_of_another_wing = tuple(name.split(".")[1:-1]) != path.relative_to(ROOT).parent.parts
            assert folder in MAY_IMPORT[own] or (folder == own and is_of_another_wing), name


@pytest.mark.parametrize("path", TASKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_wing_of_tasks_imports_only_wings_below_it(path):
    wing = "" if path.parent.name == "tasks" else path.parent.name
    for name in imports(path):
        if name.startswith("prefect_torch.tasks."):
            imported = name.split(".")[2]
            assert (imported if imported in TASKS_MAY_IMPORT else "") in TASKS_MAY_IMPORT[wing], name


def test_no_modules_of_tasks_import_each_other_in_a_circle():
    depends = {}
    for path in TASKS:
        package = ".".join(("prefect_torch", *path.relative_to(ROOT).parent.parts))
        depends[f"{package}.{path.stem}"] = {f"{package}{name}" if name.startswith(".") else name for name in imports(path)}
    TopologicalSorter(depends).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "ckpt").glob("*.py")), ids=lambda path: path.name)
def test_only_blocks_imports_prefect_and_only_states_import_torch(path):
    tops = {name.partition(".")[0] for name in imports(path)}
    assert "torch" not in tops or path.name.startswith(("state_", *INTEGRATIONS))
    assert ("prefect" in tops) == (path.name == "blocks.py")


@pytest.mark.parametrize("path", sorted((ROOT / "ckpt").glob("*.py")), ids=lambda path: path.name)
def test_states_are_imported_only_when_used(path):
    tree = ast.parse(path.read_text())
    at_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level}
    assert path.name.startswith("state_") or not any(name.startswith("state_") for name in at_top if name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_integrations_are_imported_by_their_users_alone(path):
    for name in imports(path):
        own = name.removeprefix("prefect_torch.ckpt").removeprefix(".")
        integration = next((it for it in INTEGRATIONS if own.startswith(it) and own != name), None)
        assert integration is None or path.name.startswith(integration), name


def test_importing_ckpt_pulls_in_neither_prefect_nor_torch():
    loaded = loaded_by("import prefect_torch.ckpt")
    assert not loaded & {"prefect", "torch", "fsspec", "obstore", "tenacity", "pydantic", "numpy"}


@pytest.mark.parametrize("module", RANK_SIDE)
def test_what_a_rank_imports_from_tasks_does_not_import_prefect(module):
    loaded = loaded_by(f"import prefect_torch.tasks.{module}")
    assert not loaded & {"prefect", "torch"}


@pytest.mark.parametrize("module", PREPARE)
def test_what_prepares_a_rank_does_not_import_prefect(module):
    assert "prefect" not in loaded_by(f"import prefect_torch.tasks.{module}")


def test_the_command_line_looks_at_a_folder_without_prefect_and_torch(tmp_path):
    (tmp_path / "run/attempts").mkdir(parents=True)
    (tmp_path / "run/manifests").mkdir()
    program = "from prefect_torch.deployments.command_line.program import run"
    assert not loaded_by(f"{program}\nassert run(['ls', {str(tmp_path)!r}]) == 0") & {"prefect", "torch", "pydantic", "numpy"}


def test_blocks_do_not_import_torch():
    assert "torch" not in loaded_by("import prefect_torch.ckpt.blocks")


def test_importing_ckpt_takes_a_tenth_of_a_second():
    program = "import time; s = time.process_time(); import prefect_torch.ckpt; print(time.process_time() - s)"
    runs = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
        for _ in range(5)
    ]
    assert min(runs) < 0.1


def test_the_guard_of_a_rank_needs_nothing_but_the_standard_library():
    names = {name.partition(".")[0] for name in imports(ROOT / "tasks/rank/guard.py")}
    assert names <= set(sys.stdlib_module_names)


def test_nothing_imports_the_server_of_prefect():
    """It costs a second, and with the newest fastapi it cannot be imported: whoever has a remote API needs neither."""
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in MODULES]
    modules = [f"import prefect_torch.{'.'.join(names)}" for names in parts if names[0] != "ckpt" and names[-1] != "__init__"]
    assert not {name for name in loaded_by("\n".join(modules)) if name.startswith("prefect.server")}
