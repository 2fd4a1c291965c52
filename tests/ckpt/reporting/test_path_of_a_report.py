"""The path of a report, as docs/design.md draws it, against a trace of a real one."""

import re
import sys
from pathlib import Path

import prefect_torch.ckpt
import pytest
import torch
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, TrainContext, report
from prefect_torch.tasks.rank.rendezvous import Rendezvous, connect
from ranks import Attempt, Session, as_rank, folder

DESIGN = Path(__file__).parents[3] / "docs/design.md"
CKPT = Path(prefect_torch.ckpt.__file__).parent
BELOW = ("storage", "reporting.exchange", "errors", "text", "context")  # objects and messages under keys, and the ground


def drawn(name):
    """Return the modules of a drawing in docs/design.md, in its order."""
    (drawing,) = re.findall(rf"^```{{ .text #drawn-{name} }}\n(.*?)^```", DESIGN.read_text(), re.DOTALL | re.MULTILINE)
    return [line.split()[0] for line in drawing.splitlines()]


class Trace:
    """The modules of ckpt whose functions run in this thread, one after another."""

    def __init__(self):
        self.modules = []

    def __call__(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CKPT):
            module = ".".join(path.relative_to(CKPT).with_suffix("").parts)
            if not module.startswith(BELOW) and self.modules[-1:] != [module]:
                self.modules.append(module)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class EndsAtTheManifest(MemoryStorage):
    """It stops a trace once the manifest is stored."""

    def put_bytes(self, key, data):
        super().put_bytes(key, data)
        if "/manifests/" in key:
            sys.setprofile(None)


@pytest.fixture
def session():
    """Rank 0 of one, connected to the TCPStore that a real rank has."""
    store = CheckpointStore.open(EndsAtTheManifest(), "run")
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    context = TrainContext(0, 0, 0, 1, 1, "run", Attempt(store).number)
    yield Session(context, store, connect(rendezvous.address))
    del served


def traced(session, *arguments, **options):
    with as_rank(session):
        report({"loss": 2.0}, *arguments, **options)  # the first one also makes what later ones use
        session.wait_for_commits()
        with Trace() as trace:
            report({"loss": 1.0}, *arguments, **options)
    session.finish()
    return trace.modules


def test_a_report_of_a_directory_goes_the_drawn_way(session, tmp_path):
    modules = traced(session, folder(tmp_path, model=b"weights"))
    assert list(dict.fromkeys(modules)) == drawn("report")
    assert len(drawn("report")) <= 12


def test_a_report_of_a_state_goes_the_drawn_way(session):
    modules = set(traced(session, state={"model": torch.nn.Linear(3, 3), "epoch": 1}, upload="sync"))
    assert modules - set(drawn("report")) - {"runs.records.fields"} == set(drawn("state"))
    assert [module for module in drawn("report") if module not in modules] == ["files.folder"]


def test_a_report_enters_the_session_once(session, tmp_path):
    assert traced(session, folder(tmp_path, model=b"weights")).count("reporting.session") == 1
