"""An example of Ray's documentation as the program that it is: it fails on purpose, is restarted, and prints its result."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/ray_train/pytorch_resume.py"


def test_the_program_fails_on_purpose_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path(str(EXAMPLE), run_name="__main__")["result"]
    assert "continued at epoch 2 in attempt 2; Checkpoint(" in capsys.readouterr().out
    frame = result.metrics_dataframe
    assert list(zip(frame["attempt"], frame["step"], strict=True)) == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4)]
    assert (tmp_path / "demo-checkpoints/diabetes").is_dir()
