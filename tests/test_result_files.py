"""Figures of the documentation are those of the files in tests/benchmarks/results, which programs wrote."""

import re
from pathlib import Path

import pytest
from lowest_versions import PYPROJECT, lowest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/benchmarks/results"
HAS_HEADER = [path for path in sorted(RESULTS.glob("*.txt")) if "\ncommit " in path.read_text()]


@pytest.mark.parametrize("path", HAS_HEADER, ids=lambda path: path.stem)
def test_a_result_names_its_program_the_commit_the_machine_and_the_repeats(path):
    command, commit, machine, repeats, *_ = path.read_text().splitlines()
    program = re.match(r"\$ python (\S+)", command)
    assert program, command
    assert (ROOT / program[1]).is_file() or (ROOT / program[1] / "__main__.py").is_file()
    assert re.fullmatch(r"commit [0-9a-f]{10,}\+?", commit)
    assert re.fullmatch(r"Python [\d.]+, \d+ cores, \S+, \S.*", machine)
    assert re.fullmatch(r"\d+ repeats in turns, load average [\d.]+ at the end", repeats)


def test_only_one_module_writes_files_of_results():
    programs = [*sorted((ROOT / "tests/benchmarks").rglob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
    own = re.compile(r'"results"|benchmarks/results/[\w.]+"|platform\.python_version')
    writers = [path.name for path in programs if own.search(path.read_text()) and not path.name.startswith("test_")]
    assert writers == ["result_file.py"]


def test_the_floors_of_the_requirements_are_those_that_were_tried():
    (tried,) = re.findall(r"^lowest versions: (.*)$", (RESULTS / "floors.txt").read_text(), re.MULTILINE)
    assert tried.split(", ") == lowest(PYPROJECT["project"]["dependencies"])


def test_the_requests_of_a_long_run_are_those_that_were_measured():
    text = (RESULTS / "many_checkpoints.txt").read_text()
    listing = re.search(r"^list\(\) +[\d. ]+ (\d+)  \{", text, re.MULTILINE)
    assert listing, text
    assert text.splitlines()[5].startswith("100000 checkpoints, 20 ms a request")
    page = " ".join((ROOT / "docs/design.md").read_text().split())
    assert f"A hundred thousand manifests are listed with {listing[1]} requests." in page
