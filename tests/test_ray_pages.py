"""The pages about Ray Train are those that the command's data and the tests generate."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs/extensions/ray_pages.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("ray_pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_as_their_sources_have_them(script):
    for path, text in script.pages().items():
        assert path.read_text() == text, f"python {SCRIPT} writes {path}"


def test_every_test_of_a_behaviour_says_which(script):
    tests = script.TESTS.read_text().count("\ndef test_")
    assert len(script.read_behaviours(script.TESTS)) == tests >= 50


def test_a_page_without_a_place_for_its_table_is_refused(script):
    with pytest.raises(ValueError, match="has no comment"):
        script._filled("# A page", {"behaviours": "| a |\n"})


def test_a_callback_for_any_loop_has_ten_lines():
    page = (SCRIPT.parents[1] / "how-to/own-training-code.md").read_text()
    program = ast.parse(re.search(r"```python\n# any_loop.py\n(.*?)```", page, re.DOTALL)[1])
    (callback,) = (node for node in program.body if isinstance(node, ast.ClassDef) and node.name == "ReportEveryEpoch")
    assert len(ast.unparse(callback).replace("\n\n", "\n").splitlines()) <= 10
