"""The pages about Ray Train are those that the command's data and the tests generate."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs/extensions/ray_pages.py"
RESULTS = Path(__file__).parent / "benchmarks/results"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("ray_pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_as_their_sources_have_them(script):
    for path, text in script.pages().items():
        assert path.read_text() == text, f"python {SCRIPT} writes {path}"


def test_only_names_of_ray_are_counted(script):
    assert set(script._name_counts()) == {"same", "better", "different", "refused", "missing"}  # what `migrate-check` prints


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


def measured(name):
    """Return the goodput in percent and the median restart in seconds of each way in a result file, in its order."""
    row = r"^(\w+) +\d+ +\d+ +([\d.]+)% +\S+ / \S+ +([\d.]+) s / "
    found = re.findall(row, (RESULTS / name).read_text(), re.MULTILINE)
    return [(way, int(float(goodput) + 0.5), float(restart_s)) for way, goodput, restart_s in found]


def test_the_figures_of_the_comparison_are_those_that_were_measured():
    page = (SCRIPT.parents[1] / "how-to/ray-comparison.md").read_text()
    kills = measured("goodput.txt")
    peers = {name: [row for row in kills if row[0].startswith(name)] for name in ("ray", "ours")}

    def span(name, column, unit):
        values = sorted({row[column] for row in peers[name]})
        return f"{' to '.join(str(each) for each in dict.fromkeys((values[0], values[-1])))} {unit}"

    assert f"| {span('ray', 2, 's')} | {span('ours', 2, 's')}, including" in page
    assert f"| {span('ray', 1, '%')} | {span('ours', 1, '%')} |" in page
    ours, rays, ours_loud, rays_loud = (row[1] for row in measured("goodput_machines.txt"))
    assert f"| {rays} %, {rays_loud} % | {ours} %, {ours_loud} % |" in page


def test_what_a_killed_training_resumes_from_is_what_was_measured():
    text = (RESULTS / "durable_reports.txt").read_text()
    assert "killed after report 3 had returned" in text
    assert re.search(r"^ours   3: \d+$", text, re.MULTILINE)
    assert re.search(r"^ray  (  [012]: \d+)+$", text, re.MULTILINE)
    page = (SCRIPT.parents[1] / "how-to/ray-comparison.md").read_text()
    assert "| no: a rank killed after its third report resumed from an earlier one | yes |" in page
    assert "durable_reports.txt" in page


def test_the_figures_of_lost_machines_are_those_that_were_measured():
    page = (SCRIPT.parents[1] / "how-to/several-machines.md").read_text()
    rows = measured("goodput_machines.txt")
    assert [way for way, _, _ in rows] == ["ours", "ray", "ours", "ray"]
    for (_, goodput, restart_s), (_, rays, rays_s) in (rows[:2], rows[2:]):
        assert f"| {goodput} % | {rays} % | {restart_s:.0f} s | {rays_s:.0f} s |" in page
