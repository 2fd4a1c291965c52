"""The file that `make gpu` writes on a machine with GPUs; here, everything is skipped and none is written."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from forked_programs import run_program
from gpu_results import Results

ROOT = Path(__file__).parents[1]


def test_outcomes_figures_and_what_they_depend_on_are_written(tmp_path):
    results = Results()
    for phase in ("setup", "call", "teardown"):
        results.record("one", "passed", 0.5)
        results.record("two", "failed" if phase == "call" else "passed", 0.25, "because" if phase == "call" else "")
    results.figures["one"] = {"stall": "0.1 s"}
    results.write(tmp_path / "results.json")
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["outcomes"] == {"one": "passed", "two": "failed"}
    assert written["seconds"] == {"one": 1.5, "two": 0.75}
    assert written["reasons"] == {"two": "because"}
    assert written["figures"] == {"one": {"stall": "0.1 s"}}
    assert written["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert len(written["gpus"]) == torch.cuda.device_count()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has GPUs: make gpu")
def test_without_a_gpu_every_test_is_skipped_with_a_reason_and_nothing_is_written(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    ended = run_program(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    skipped = [line for line in ended.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert all("torch sees 0" in line for line in skipped), ended.stdout
    assert "passed" not in ended.stdout.splitlines()[-1]
    assert not (ROOT / "gpu-results.json").exists()
