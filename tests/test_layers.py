"""Which folder may import what, and what an import may cost."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ckpt", "tasks", "flows", "deployments")
DRAWN_IN = ROOT / "docs/design.md"
# What may import torch at all, and prefect: a wing each, by what it is for.
IMPORT_TORCH = (
    *("ckpt.state", "ckpt.framework_folders", "ckpt.lightning", "ckpt.transformers", "ckpt.accelerate"),
    *("tasks", "flows", "deployments"),
)
IMPORT_PREFECT = ("ckpt.blocks", "ckpt.storage.specs.blocks", "tasks", "flows", "deployments")
NEVER_PREFECT = ("tasks.rank", "tasks.prepare")
FRAMEWORKS = ("ckpt.accelerate", "ckpt.lightning", "ckpt.transformers")
_WING = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)*")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def is_in(module: str, wings: tuple[str, ...]) -> bool:
    return any(module == wing or module.startswith(f"{wing}.") for wing in wings)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """Yield every module that `path` imports, anywhere in it or in `tree`, by its absolute name."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree or parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("prefect_torch.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [above, node.module])).removeprefix("prefect_torch.")
            for alias in node.names:
                yield f"{module}.{alias.name}" if f"{module}.{alias.name}" in MODULES else module


def above(module: str) -> set[str]:
    """Return the packages of a module, each of which Python runs before it."""
    parts = module.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports, and the packages above that: not its own, nor those with nothing but a docstring."""
    empty = {name for name, path in MODULES.items() if path.name == "__init__.py" and len(parsed(path).body) <= 1}
    named = {name: set(imports(path)) & MODULES.keys() for name, path in MODULES.items()}
    run = {name: set().union(*map(above, names)) - above(name) - empty for name, names in named.items()}
    return {name: (names | run[name]) - {name} for name, names in named.items()}


@cache
def floors() -> list[list[str]]:
    """Return the wings of each floor, the highest first, as the drawing in docs/design.md has them."""
    drawing = re.search(r"```{ .text #drawn-floors }\n(.*?)```", DRAWN_IN.read_text(), re.DOTALL)
    assert drawing is not None
    return [list(takewhile(_WING.fullmatch, line.split())) for line in drawing[1].splitlines()]


def floor_of(module: str) -> tuple[int, str] | None:
    found = [(number, wing) for number, floor in enumerate(floors()) for wing in floor if is_in(module, (wing,))]
    return max(found, key=lambda it: len(it[1])) if found else None


def test_every_module_has_a_floor():
    roofs = set(FOLDERS)  # a folder's own __init__ names what users import
    assert {module for module in MODULES if module not in roofs and floor_of(module) is None} == set()
    assert {wing for floor in floors() for wing in floor if not any(is_in(module, (wing,)) for module in MODULES)} == set()


def test_a_module_imports_only_its_own_wing_and_what_is_below():
    wrong = []
    for module, names in graph().items():
        if (own := floor_of(module)) is None:
            continue
        for name in names:
            if name in FOLDERS:  # what a folder shows is for the folders above it
                is_below = FOLDERS.index(module.partition(".")[0]) > FOLDERS.index(name.partition(".")[0])
            else:  # without a floor, it is to be imported from where it is defined
                is_below = (other := floor_of(name)) is not None and (other[0] > own[0] or other == own)
            wrong += [] if is_below else [f"{module} imports {name}, which is above or beside it"]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle():
    left = {module: set(names) for module, names in graph().items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


def test_wings_import_each_other_by_absolute_names():
    nodes = ((module, node) for module, path in MODULES.items() for node in ast.walk(parsed(path)))
    assert [module for module, node in nodes if isinstance(node, ast.ImportFrom) and node.level >= 2] == []


def test_only_some_wings_import_torch_and_prefect():
    tops = {module: {name.partition(".")[0] for name in imports(path)} for module, path in MODULES.items()}
    of_torch, of_prefect = ({module for module, names in tops.items() if library in names} for library in ("torch", "prefect"))
    unasked_torch = [module for module in of_torch if not is_in(module, IMPORT_TORCH)]
    unasked_prefect = [module for module in of_prefect if not is_in(module, IMPORT_PREFECT) or is_in(module, NEVER_PREFECT)]
    assert (unasked_torch, unasked_prefect) == ([], [])


@cache
def loads_torch(module: str) -> bool:
    """Return whether the import of `module` imports torch, by the statements at the top of it and of what it imports."""
    at_top = [node for node in parsed(MODULES[module]).body if isinstance(node, ast.Import | ast.ImportFrom)]
    tree = ast.Module(at_top, [])
    names = set(imports(MODULES[module], tree))
    return any(name.partition(".")[0] == "torch" for name in names) or any(map(loads_torch, names & MODULES.keys() - {module}))


def test_torch_is_imported_only_when_it_is_used():
    others = [module for module in MODULES if is_in(module, ("ckpt",)) and not is_in(module, IMPORT_TORCH)]
    assert [module for module in others if loads_torch(module)] == []


def test_frameworks_are_imported_by_their_users_alone():
    pairs = [(module, name) for module, names in graph().items() for name in names]
    uses = [(framework, *pair) for framework in FRAMEWORKS for pair in pairs if is_in(pair[1], (framework,))]
    assert uses
    assert [use for use in uses if not is_in(use[1], (use[0],))] == []


def test_a_folder_shows_a_handful_of_entries():
    """A floor that is full is a wall that is missing."""
    counts = {
        folder: len({module.split(".")[1] for module in MODULES if module.startswith(f"{folder}.")}) for folder in FOLDERS
    }
    assert counts["ckpt"] == 15
    assert counts["tasks"] <= 9
    entries: dict[str, set[str]] = {}
    for parts in (module.split(".") for module in MODULES):
        for depth in range(1, len(parts)):
            entries.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    assert {folder: len(names) for folder, names in entries.items() if len(names) > 18} == {}


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.split())


def test_importing_ckpt_and_random_state_pulls_in_neither_prefect_nor_torch_nor_a_framework():
    loaded = loaded_by("from prefect_torch.ckpt import RandomState")
    assert not loaded & {"prefect", "torch", "fsspec", "obstore", "tenacity", "pydantic", "numpy"}
    assert not loaded & {framework.removeprefix("ckpt.") for framework in FRAMEWORKS}


def test_what_a_rank_imports_from_tasks_does_not_import_prefect():
    modules = [module for module in MODULES if is_in(module, ("tasks.rank",)) and module != "tasks.rank"]

    def loaded(some: list[str]) -> set[str]:
        return loaded_by("\n".join(f"import prefect_torch.{module}" for module in some)) & {"prefect", "torch"}

    if loaded(modules):
        pytest.fail(f"these import prefect or torch: {[module for module in modules if loaded([module])]}")


def test_the_command_line_looks_at_a_folder_without_prefect_and_torch(tmp_path):
    (tmp_path / "run/attempts").mkdir(parents=True)
    (tmp_path / "run/manifests").mkdir()
    program = "from prefect_torch.deployments.command_line.program import run"
    assert not loaded_by(f"{program}\nassert run(['ls', {str(tmp_path)!r}]) == 0") & {"prefect", "torch", "pydantic", "numpy"}


def test_a_program_that_trains_does_not_make_the_forms_of_other_flows():
    others = {f"prefect_torch.flows.{name}" for name in ("evaluation", "planning", "pruning", "sweeping")}
    assert not loaded_by("from prefect_torch.flows import CheckpointConfig, RunConfig, ScalingConfig, train") & others


def import_cpu_s(module: str) -> float:
    program = f"import time; s = time.process_time(); import {module}; print(time.process_time() - s)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)


def test_importing_ckpt_costs_little_more_than_a_module_of_the_standard_library():
    """A tenth of a second on an idle machine; on a busy one, processor time is dearer, for one of the two at a time."""
    took_s, peer_s = [], []
    while len(took_s) < 5 or (min(took_s) >= 2.5 * min(peer_s) and len(took_s) < 30):
        took_s.append(import_cpu_s("prefect_torch.ckpt"))
        peer_s.append(import_cpu_s("unittest.mock"))
    assert min(took_s) < 2.5 * min(peer_s)


def test_the_guard_of_a_rank_needs_nothing_but_the_standard_library():
    names = {name.partition(".")[0] for name in imports(ROOT / "tasks/rank/starting/guard.py")}
    assert names <= set(sys.stdlib_module_names)
