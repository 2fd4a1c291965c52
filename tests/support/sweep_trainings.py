"""Training functions for the tests of sweeps."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import optuna
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report


def climb(config: dict) -> None:
    """Report `epochs` checkpoints, whose loss falls to the distance of lr from 0.3."""
    start = 0
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            start = json.loads((Path(directory) / "state.json").read_text())["epoch"] + 1
    for epoch in range(start, config.get("epochs", 3)):
        come_to_an_end(config, epoch)
        time.sleep(config.get("pause_s", 0))
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "state.json").write_text(json.dumps({"epoch": epoch}))
            loss = abs(config["lr"] - 0.3) + 1 / (epoch + 1)
            report({"loss": loss, "epoch": epoch}, Checkpoint.from_directory(directory), step=epoch)


def come_to_an_end(config: dict, epoch: int) -> None:
    if config.get("fails") and config["lr"] > config["fails"]:
        raise ValueError(f"lr={config['lr']:g} diverged")
    if config.get("killed_at") == epoch and get_context().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def return_loss(config: dict) -> dict:
    return {"loss": config.get("x", 0) + config.get("y", 0)}


def tell_threads(config: dict) -> dict:
    return {"loss": int(os.environ["OMP_NUM_THREADS"])}


def return_nested(config: dict) -> dict:
    return {"loss": config["nested"]["x"] + config["nested"]["y"]}


def report_apart(config: dict) -> None:
    for step in range(9):
        report({"loss": config["loss"]}, step=step)
        report({"size": step}, step=step)


def report_checkpoint_apart(config: dict) -> None:
    for epoch in range(1, 4):
        report({"loss": config["lr"]}, step=430 * epoch)
        report({"size": 1}, step=430 * epoch, state={"epoch": epoch})


def threshold_pruner():
    return optuna.pruners.ThresholdPruner(upper=10)


def late_threshold_pruner():
    return optuna.pruners.ThresholdPruner(upper=10, n_warmup_steps=4)


def pruner_of_odd_numbers():
    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number % 2 == 1

    return Pruner()


def hyperband_pruner():
    return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)


def report_no_checkpoint(config: dict) -> None:
    for step in range(1, 4):
        report({"loss": config["lr"] / step}, step=step)


def fail_when_stopped(config: dict) -> None:
    """Climb, and fail in the cleanup after a stop."""
    try:
        climb(config)
    except SystemExit:
        raise ValueError("a cleanup that fails") from None


def change_code(config: dict) -> dict:
    """Return what the working directory says, and let it say something else."""
    said = Path("said.txt").read_text()
    (Path(config["project"]) / "said.txt").write_text("2")
    return {"loss": float(said)}
