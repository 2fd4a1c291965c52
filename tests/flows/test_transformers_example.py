"""The Transformers example, through Prefect, with two ranks."""

import runpy
import sys
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore

EXAMPLE = Path(__file__).parents[2] / "examples/transformers_digits.py"


def test_the_example_learns_the_digits(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--storage", str(tmp_path / "store"), "--epochs", "3"])
    assert main() == 0
    assert "epochs trained: [1.0, 2.0, 3.0]" in capsys.readouterr().out
    store = CheckpointStore.open(tmp_path / "store", "transformers-digits")
    assert store.best(1, "eval_loss", "min")[0].metrics["eval_accuracy"] > 0.85
