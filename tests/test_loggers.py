"""The programs of the loggers' page, with the real libraries: a killed training goes on in the same curves."""

import os
import re
import sys
from pathlib import Path

import pytest
from forked_programs import run_program

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/loggers.md").read_text()
DRIVER = ROOT / "tests/support/logged_training.py"


@pytest.fixture
def train(tmp_path):
    """Run a program of the page in `tmp_path`, killed once and resumed."""

    def run(logger, name="first", **environment):
        code = re.search(rf"```python\n(# with_{logger}\.py\n.*?)```", PAGE, re.DOTALL)[1]
        program = tmp_path / f"with_{logger}.py"
        program.write_text(code)
        command = [sys.executable, DRIVER, program, tmp_path / "checkpoints", name]
        done = run_program(
            command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines()[-1:] == ["-9 0 0 1 2 3"], done.stdout + done.stderr
        return done

    return run


def read_back(program, folder, **environment):
    """Return what `program` prints; reading needs the loggers' own modules, whose warnings are theirs."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    return run_program(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout.split()


def test_tensorboard_shows_each_step_of_a_killed_training_once(train, tmp_path):
    train("tensorboard")
    files = list((tmp_path / "tensorboard/first").iterdir())
    assert len(files) == 2
    program = """if True:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        read = EventAccumulator("tensorboard/first").Reload()
        print(*[f"{it.step}:{it.value:.2f}" for it in read.Scalars("loss")])
    """
    assert read_back(program, tmp_path) == ["0:1.00", "1:0.50", "2:0.33", "3:0.25"]


def test_wandb_continues_the_run_of_a_killed_trial(train, tmp_path):
    train("wandb", "sweep/trial-0001-0a1b2c3d", WANDB_MODE="offline", WANDB_SILENT="true")
    program = """if True:
        from pathlib import Path
        from wandb.proto.wandb_internal_pb2 import Record
        for path in sorted(Path().glob("attempt-*/wandb/offline-run-*/run-*.wandb")):
            data, place, name, steps = path.read_bytes(), 7, path.stem, []  # a LevelDB log of one block, after 7 bytes
            while len(data) - place >= 7:  # checksum, length, kind
                size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
                assert kind == 1 and place + 7 + size < 32768
                record = Record.FromString(data[place + 7 : place + 7 + size])
                place += 7 + size
                if record.WhichOneof("record_type") == "run":
                    name = record.run.run_id
                if record.WhichOneof("record_type") == "history":
                    steps += [it.value_json for it in record.history.item if "epoch" in (it.key, *it.nested_key)]
            print(path.parts[0], name, *steps)
    """
    first, second = (steps.split() for steps in " ".join(read_back(program, tmp_path)).split(" attempt-2 "))
    # What W&B has not written when its process is killed is lost, however little that is.
    assert first[0] == "attempt-1"
    assert first[2:] == ["0", "1", "2"][: len(first) - 2]
    assert second == ["sweep-trial-0001-0a1b2c3d", "2", "3"]


def test_mlflow_continues_the_run_of_a_killed_training(train, tmp_path):
    """The folder instead of a database, which would take ten seconds to lay out its tables."""
    server = {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    train("mlflow", **server)
    program = """if True:
        import mlflow
        (run,) = mlflow.search_runs(output_format="list")
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        print(run.info.run_name, run.info.status, *sorted(f"{it.step}:{it.value:.2f}" for it in history))
    """
    found = read_back(program, tmp_path, **server)
    assert found == ["first", "FINISHED", "0:1.00", "1:0.50", "2:0.33", "2:0.33", "3:0.25"]
