"""The Transformers example, and an Accelerator, through Prefect, with two ranks."""

import runpy
import sys
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import RunConfig, ScalingConfig, train

EXAMPLE = Path(__file__).parents[2] / "examples/transformers_digits.py"


def test_the_example_learns_the_digits(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--storage", str(tmp_path / "store"), "--epochs", "3"])
    assert main() == 0
    assert "epochs trained: [1.0, 2.0, 3.0]" in capsys.readouterr().out
    store = CheckpointStore.open(tmp_path / "store", "transformers-digits")
    assert store.best(1, "eval_loss", "min")[0].metrics["eval_accuracy"] > 0.85


def test_an_accelerator_counts_the_ranks_without_being_told_that_there_are_no_gpus(tmp_path):
    run = RunConfig(name="run", storage=str(tmp_path))
    assert train("trainings:count_ranks_of_an_accelerator", {}, ScalingConfig(num_workers=2), run).return_value == 2
