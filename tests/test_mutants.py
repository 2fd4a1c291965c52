"""Each small change that a test must fail for can still be made."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/benchmarks"))
    return importlib.import_module("mutants").MUTANTS


def test_what_a_mutant_changes_is_in_its_file(mutants):
    assert [str(mutant) for mutant in mutants if mutant.old not in (ROOT / mutant.path).read_text()] == []


def test_the_tests_of_a_mutant_exist(mutants):
    files = {word for mutant in mutants for word in mutant.tests if word.endswith(".py")}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
