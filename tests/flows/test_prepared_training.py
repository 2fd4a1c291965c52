"""Two real ranks with prepare_model and prepare_data_loader, and with Lightning."""

import json
import os
import sys
from pathlib import Path

from forked_programs import run_program
from prefect.settings import PREFECT_API_URL
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import ScalingConfig, train

TWO = ScalingConfig(num_workers=2)
EXAMPLE = Path(__file__).parents[2] / "examples/lightning_digits.py"


def test_prepared_models_and_loaders_train_as_one_process_would(run):
    told = train("prepared_trainings:prepare_everything", {}, TWO, run).return_value
    assert told == {
        "share": True,
        "device": "cpu",
        "ddp": True,
        "blocks of ddp": [],
        "fsdp2": True,
        "blocks of fsdp2": ["0", "2"],
        "given mesh": True,
        "blocks of given mesh": ["0", "2"],
        "own blocks": True,
        "blocks of own blocks": ["2"],
    }


def test_a_training_ended_in_the_middle_of_epochs_uses_every_sample_once_also_with_fewer_ranks(run, tmp_path):
    """Killed on two ranks in epoch 0, resumed on two, ended in epoch 1, and resumed on one."""
    config = {"samples": 60, "epochs": 2, "told": str(tmp_path)}
    killed = train("prepared_trainings:use_samples", {**config, "stop_after": 6}, TWO, run)
    assert (killed.attempts, killed.return_value["epoch"], killed.return_value["used"]) == (2, 0, 24)
    alone = train("prepared_trainings:use_samples", config, ScalingConfig(num_workers=1), run)
    assert (alone.return_value["epoch"], alone.return_value["used"]) == (1, 24)
    told = {path.stem: json.loads(path.read_text()) for path in sorted(tmp_path.glob("*-*.json"))}
    assert list(told) == ["1-0", "1-1", "2-0", "2-1", "3-0"]
    epochs = {0: [], 1: []}
    for reports in told.values():
        for epoch, used in reports:
            epochs[epoch] += used
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))


def test_a_killed_lightning_training_of_two_ranks_continues_to_the_same_weights(run):
    killed = train("prepared_trainings:train_with_lightning", {"kill": True}, TWO, run)
    assert killed.attempts == 2
    assert killed.return_value["resumed"]
    assert killed.return_value["ranks"] == (2, 0)
    undisturbed = train(
        "prepared_trainings:train_with_lightning", {"kill": False}, TWO, run.model_copy(update={"name": "undisturbed"})
    )
    assert killed.return_value["weights"] == undisturbed.return_value["weights"]
    frame = killed.metrics_dataframe
    assert list(zip(frame["attempt"], frame["step"], strict=True)) == [(1, 2), (1, 4), (2, 6), (2, 8)]
    for manifest in CheckpointStore.open(run.storage, "run").list():
        owners = [(entry.path, entry.rank) for entry in manifest.files]
        assert owners == [("checkpoint.ckpt", 0), ("rng_state_0.pth", 0), ("rng_state_1.pth", 1)]


def test_the_example_learns_the_digits(tmp_path):
    done = run_program(
        [sys.executable, str(EXAMPLE), "--storage", str(tmp_path / "store"), "--epochs", "3"],
        env={**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "epochs trained: [0, 1, 2]" in done.stdout
