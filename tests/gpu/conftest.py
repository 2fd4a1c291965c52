"""Tests that need GPUs: `make gpu` runs them and writes one file, gpu-results.json, with what to send.

Each is skipped where there are fewer GPUs than `@pytest.mark.gpus(n)` says, and where tests run side by side, since their
load would be measured.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_results import Results
from prefect_torch.flows import RunConfig

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "gpu-results.json"
_results = Results()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(n): needs n GPUs")


def pytest_collection_modifyitems(config, items):
    present = torch.cuda.device_count()
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))  # a new driver's warning must not cost the results
        marker = item.get_closest_marker("gpus")
        assert marker is not None, f"{item.nodeid}: say with pytest.mark.gpus how many GPUs it needs"
        (needed,) = marker.args
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {present}"))
        elif hasattr(config, "workerinput"):
            item.add_marker(pytest.mark.skip(reason="measures, so it needs the machine for itself: make gpu"))


def pytest_runtest_logreport(report):
    if "tests/gpu/" in report.nodeid:
        reason = report.longrepr[2] if report.skipped else report.longreprtext[-4000:] if report.failed else ""
        _results.record(report.nodeid, report.outcome, report.duration, reason)


def pytest_sessionfinish(session):
    if _results.ran():
        _results.write(RESULTS)


def pytest_terminal_summary(terminalreporter):
    if _results.ran():
        terminalreporter.write_line(f"what was found, to be sent: {RESULTS}")


@pytest.fixture
def figure(request):
    """Records a figure: figure("stall of a report", 0.012, "s")."""

    def record(name, value, unit):
        _results.figures.setdefault(request.node.nodeid, {})[name] = f"{value:.4g} {unit}"

    return record


@pytest.fixture
def timed(figure):
    """Measures its body between two synchronizations, and records the seconds under a name."""

    @contextmanager
    def measure(name):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        measured = {}
        yield measured
        torch.cuda.synchronize()
        measured["s"] = time.perf_counter() - started_s
        figure(name, measured["s"], "s")

    return measure


@pytest.fixture(autouse=True)
def an_empty_gpu():
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def run(prefect_server, tmp_path, monkeypatch):
    support = FOLDER.parent / "support"
    monkeypatch.setenv("PYTHONPATH", f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return RunConfig(name="run", storage=str(tmp_path / "store"))
