"""Training functions that README and other pages show, on several ranks."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import RunConfig, ScalingConfig, train
from prefect_torch.tasks import prepare_data_loader
from ranks import Attempt, as_rank
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a program of a page where a training finds it, beside which it stores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write_program(page, name):
        found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        (tmp_path / name).write_text(found[1])

    return write_program


@pytest.mark.parametrize(("page", "name"), [("lightning", "with_lightning"), ("own-training-code", "prepared")])
def test_the_trainings_of_other_pages_run_on_two_ranks(write, page, name):
    if page == "lightning":
        pytest.importorskip("lightning")
    write(f"docs/how-to/{page}.md", f"{name}.py")
    result = train(f"{name}:train_fn", {"epochs": 2}, ScalingConfig(num_workers=2), RunConfig(name="run"))
    assert len(result.history) == 2
    assert "loss" in result.metrics


def test_the_training_with_a_resumable_loader_restarts_behind_the_last_batch_of_an_epoch(write, tmp_path):
    """As after an eviction during that batch: no batch is left of the epoch, whose report comes next."""
    write("docs/how-to/own-training-code.md", "prepared.py")
    store = CheckpointStore.open(tmp_path / "store", "run")

    def evicted(session, _):
        model = torch.nn.Linear(4, 1)
        loader = prepare_data_loader(DataLoader(torch.zeros(64, 4), batch_size=8, shuffle=True), resumable=True)
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        session.report({}, state={"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loader": loader})

    def restarted(session, _):
        with as_rank(session):
            importlib.import_module("prepared").train_fn({"epochs": 2})

    assert Attempt(store).run(evicted) == [None]
    assert Attempt(store).run(restarted) == [None]
    assert [manifest.attempt for manifest in store.list()] == [1, 2, 2]


def test_the_training_resumes_on_another_number_of_ranks(write):
    write("README.md", "my_training.py")
    for ranks, epochs in [(2, 2), (1, 3), (2, 5)]:
        config = {"epochs": epochs, "lr": 0.1}
        result = train("my_training:train_fn", config, ScalingConfig(num_workers=ranks), RunConfig(name="run"))
    assert [(record.attempt, record.step) for record in result.history] == [(1, 0), (1, 1), (2, 2), (3, 3), (3, 4)]
