"""Ray Tune's examples as programs: each does what its page says."""

import runpy
import sys
from pathlib import Path

import pytest
from prefect_torch.ckpt import CheckpointStore

EXAMPLES = Path(__file__).parents[3] / "examples/ray_tune"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run an example as a program in an empty directory, and return its names."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        return runpy.run_path(path, run_name="__main__")

    return run


def test_the_five_best_checkpoints_are_kept_and_a_second_start_trains_nothing(execute, tmp_path):
    first = execute("cloud_checkpoints", str(tmp_path / "bucket"))["found"]
    assert [trial.state for trial in first.trials] == ["completed", "completed"]
    for trial in first.trials:
        store = CheckpointStore.open(tmp_path / "bucket", trial.run)
        kept = [manifest.metrics["val-loss"] for manifest in store.list()]
        losses = sorted(trial.result.metrics_dataframe["val-loss"])
        assert len(losses) == 8
        assert set(losses[:5]) <= set(kept)
        assert len(kept) <= 6  # and the latest
    assert execute("cloud_checkpoints", str(tmp_path / "bucket"))["found"] == first


def test_a_trial_goes_on_by_hand_from_its_checkpoint(execute, tmp_path):
    names = execute("manual_restore")
    assert names["result"].return_value == 3
    assert list(names["result"].metrics_dataframe["step"]) == [3, 4, 5]
    assert names["result"].resumed_from == names["found"].best.checkpoint.path
    assert names["result"].metrics["loss"] < names["found"].best.metrics["loss"]


def test_the_worst_of_a_population_goes_on_from_the_best(execute, tmp_path):
    found = execute("pbt")["found"]
    assert [trial.state for trial in found.trials] == ["completed"] * 3
    runs = {path.name for path in (tmp_path / "demo-checkpoints/population").glob("trial-*")}
    cloned = runs - {trial.run.partition("/")[2] for trial in found.trials}
    assert cloned, "no trial has taken over a checkpoint"
    with_checkpoints = [trial for trial in found.trials if trial.checkpoint is not None]
    assert with_checkpoints == [found.best]
    assert not [name for name in cloned if CheckpointStore.open("demo-checkpoints", f"population/{name}").list()]


def test_three_of_four_trials_on_the_digits_pause_after_an_epoch(execute):
    found = execute("asha_digits")["found"]
    assert sorted(trial.state for trial in found.trials) == ["completed", "paused", "paused", "paused"]
    assert found.best.state == "completed"
    assert found.best.checkpoint.step == 4
    assert found.best.metrics["accuracy"] > 0.7
