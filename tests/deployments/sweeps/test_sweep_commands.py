"""`ls`, `show` and `best` know sweeps, whose trials are runs of their own."""

import re
from pathlib import Path
from threading import Barrier

import pytest
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, newest_attempt, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage import parallel
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.deployments.command_line import program
from prefect_torch.deployments.command_line.runs import selection
from prefect_torch.deployments.command_line.sweeps import sweep_records
from prefect_torch.deployments.command_line.upkeep import copy_command
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.journal.journal import list_parts
from ranks import Attempt, folder
from stored_runs import store_run
from stored_sweeps import store_sweep, trial_run
from waiting_storage import WaitingStorage


@pytest.fixture
def swept(local, tmp_path):
    """Store a sweep, the best trial of which has a checkpoint, beside a training."""
    store_sweep(local, ending="completed")
    for name in (trial_run(3), "alone"):
        files = folder(tmp_path / name.replace("/", "-"), model=b"x" * 2048)
        store = CheckpointStore.open(local, name)
        assert Attempt(store).run(lambda session, rank, files=files: session.report({"loss": 0.5}, files)) == [None]
    return local


def test_a_sweep_is_one_line_among_the_runs_with_its_trials_and_all_their_bytes(swept, command, as_json):
    code, out, err = command("ls", swept)
    assert (code, err) == (0, "")
    header, alone, digits = [line.split() for line in out.splitlines()]
    assert header == ["run", "trials", "attempts", "latest", "step", "checkpoints", "size", "state"]
    assert digits == ["digits", "5", "1", "-", "1", "2.0", "KiB", "completed"]
    assert alone[:3] == ["alone", "-", "1"]
    assert [(it["name"], it["trials"], it["bytes"]) for it in as_json("ls", swept)] == [
        ("alone", None, 2048),
        ("digits", 5, 2048),
    ]


def test_every_trial_of_a_very_large_sweep_is_read(swept, as_json, monkeypatch):
    """Of more than the 200 that a page shows, the others had no attempts, and no step."""
    trials = {number: TrialRecord(number, trial_run(0), {}, number) for number in range(201)}
    monkeypatch.setattr(sweep_records, "read_known_trials", lambda _: (trials, None))
    found = as_json("ls", swept, "digits")
    assert (len(found), {(it["attempts"], it["step"]) for it in found}) == (201, {(1, 2)})


def test_runs_without_a_sweep_are_listed_as_ever(local, tmp_path, command):
    store = CheckpointStore.open(local, "alone")
    files = folder(tmp_path / "alone", model=b"x")
    assert Attempt(store).run(lambda session, rank: session.report({"loss": 0.5}, files)) == [None]
    assert "trials" not in command("ls", local)[1]


def test_the_trials_of_a_sweep_are_listed_with_config_score_and_rung(swept, command, as_json):
    header, *rows = command("ls", swept, "digits")[1].splitlines()
    assert header.split() == ["trial", "config", "state", "loss", "step", "rung"]
    assert rows[1].split() == ["1", "lr=0.01,", "net/width=32", "paused", "2", "1", "at", "1"]
    assert [row.split()[3] for row in rows] == ["completed", "paused", "failed", "completed", "running"]
    third = as_json("ls", swept, "digits")[3]
    assert third["run"] == trial_run(3)
    assert (third["config"], third["value"], third["metric"], third["mode"]) == (
        {"lr": 0.0001, "net/width": 64},
        0.5,
        "loss",
        "min",
    )


def test_a_sweep_is_shown_with_its_best_trial_first_and_the_reasons_of_failures(swept, command, as_json):
    lines = command("show", swept, "digits")[1].splitlines()
    assert lines[0].endswith("/digits")
    assert lines[1] == "sweep of train_digits:train_fn, completed"
    assert lines[2] == "5 trials: 1 running, 2 completed, 1 paused, 1 failed; best loss 0.5 in trial 3"
    assert [line.split()[0] for line in lines[5:10]] == ["3", "4", "0", "1", "2"]
    assert "trial 2 failed: ValueError: the loss | is NaN" in lines
    assert lines[-1] == f"best run: {trial_run(3)}"
    shown = as_json("show", swept, "digits")
    assert (shown["best"], shown["state"], len(shown["trials"])) == (3, "completed", 5)


@pytest.mark.parametrize("name", ["ls", "show", "best"])
def test_of_a_sweep_that_has_lost_an_entry_what_is_known_is_printed(swept, command, name):
    run = Run.open(swept, "digits")
    run.storage.delete([list_parts(run)[1].key])
    arguments = ("-k", "9") if name == "best" else ()
    code, out, err = command(name, swept, "digits", *arguments)
    assert {number for number in range(5) if re.search(rf"^ *{number} ", out, re.MULTILINE)} >= {3, 4}
    assert (code, "cannot be read, so trials may be missing" in err, "entry 1 of the journal" in err) == (1, True, True)
    assert command(name, swept, "digits", "--json", *arguments)[0] == 1


def change_definition(storage, change):
    run = Run.open(storage, "digits")
    stored = run.records.get_json(run.layout.sweep)
    del stored["digest"]
    run.records.put(run.layout.sweep, stored | change)


@pytest.mark.parametrize("name", ["ls", "show", "best"])
@pytest.mark.parametrize("change", [{"metrics": []}, {"modes": []}, {"metrics": ["loss", "size"]}, {"modes": ["MIN"]}])
def test_a_definition_whose_metrics_do_not_have_a_mode_each_is_told_by_its_name(swept, capsys, name, change):
    change_definition(swept, change)
    assert program.run([name, swept, "digits"]) == 1
    assert "digits/sweep.json is not what a sweep searches: its metrics [" in capsys.readouterr().err


def test_a_number_of_trials_that_is_none_is_not_shown(swept, command):
    change_definition(swept, {"search": {"num_trials": "9", "scheduler": []}})
    code, out, err = command("show", swept, "digits")
    assert (code, err) == (0, "")
    assert "\n5 trials: " in out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("watch", ()), ("metrics", ()), ("verify", ()), ("prune", ("--dry-run",)), ("show", ("best",))),
        *((name, ("latest",)) for name in ("pin", "unpin", "restore", "delete")),
        *((name, ("latest", "x")) for name in ("pull", "copy", "diff")),
    ],
)
def test_commands_on_reports_and_checkpoints_ask_for_a_trial(swept, command, name, arguments):
    code, _, err = command(name, swept, "digits", *arguments)
    assert (code, f"digits is a sweep: give one of its trials, as prefect-torch best {swept} digits names them" in err) == (
        2,
        True,
    )


def test_the_best_trials_come_with_their_checkpoints_and_a_trial_is_a_run(swept, command, as_json):
    first, second = as_json("best", swept, "digits", "-k", "2")
    assert (first["number"], second["number"], second["checkpoint"]) == (3, 4, None)
    newest = CheckpointStore.open(swept, trial_run(3)).latest().id
    assert first["checkpoint"] == newest
    assert command("best", swept, "digits")[1].splitlines()[1].split() == ["3", trial_run(3), "0.5", "2", newest]
    assert newest in command("ls", swept, trial_run(3))[1]
    code, _, err = command("best", swept, "digits", "--metric", "loss")
    assert (code, "give neither --metric nor --order" in err) == (2, True)


@pytest.fixture
def ended(swept):
    """The sweep, each of whose trials has an outcome."""
    for number in range(5):
        trial = CheckpointStore.open(swept, trial_run(number))
        write_outcome(trial, Outcome(newest_attempt(trial).number, "completed", None))
    return swept


def stored(storage, run="digits"):
    store = CheckpointStore.open(storage, run)
    return {info.key: store.storage.get_bytes(info.key) for info in store.storage.list(f"{run}/")}


def test_a_sweep_is_copied_with_its_trials_and_goes_on_from_the_copy(ended, command, as_json, tmp_path):
    trial = CheckpointStore.open(ended, trial_run(3))
    trial.storage.put_bytes(f"{trial.layout.logs(1)}rank-0.0.log", b"a line")
    target = str(tmp_path / "copied")
    code, out, err = command("copy", ended, "digits", target)
    assert (code, err) == (0, "")
    assert out.startswith(f"5 trials of run digits in {target}: 2.0 KiB copied")
    original = stored(ended)
    original.pop(f"{trial_run(3)}/latest.json", None)
    assert stored(target) == original
    assert [it["number"] for it in as_json("best", target, "digits", "-k", "2")] == [3, 4]
    assert "0 B copied, 2.0 KiB was there" in command("copy", ended, "digits", target)[1]


def test_a_sweep_is_deleted_with_its_trials_unless_one_of_them_has_a_pin_or_is_trained(ended, command):
    trial = CheckpointStore.open(ended, trial_run(3))
    trial.pin(trial.latest().id)
    before = stored(ended)
    code, _, err = command("delete", ended, "digits", "--yes")
    assert (code, f"of run '{trial_run(3)}' is pinned and not deleted" in err) == (1, True)
    assert stored(ended) == before
    trial.unpin(trial.latest().id)
    trial.pin(trial.latest().id, trial_run(2)[-8:])  # as pbt does, whose trial 2 began from there, and failed
    assert command("delete", ended, "digits", "--yes")[0] == 0
    assert stored(ended) == {}
    assert "digits" not in command("ls", ended)[1]


def test_trials_are_deleted_and_checkpoints_verified_at_the_same_time(ended, command, tmp_path, monkeypatch):
    store_run(ended, tmp_path / "scratch", steps=4)
    opened = []

    def open_existing(path):
        opened.append(WaitingStorage(LocalStorage(Path(path)), "checkpoints", ""))
        return opened[-1]

    monkeypatch.setattr(selection, "open_existing_storage", open_existing)
    assert command("verify", ended, "run", "--level", "size")[1].count("whole") == 4
    assert command("delete", ended, "digits", "--yes")[0] == 0
    verifying, deleting = (storage.most for storage in opened)
    assert verifying["checkpoints"] == 4
    assert max(deleting.values()) >= 4


@pytest.mark.parametrize("name", ["check_not_live", "check_same_run"])
def test_the_trials_to_copy_are_checked_at_the_same_time(ended, command, tmp_path, monkeypatch, name):
    two, check = Barrier(2, timeout=60), getattr(copy_command, name)

    def meet(*args, **kwargs):
        two.wait()
        return check(*args, **kwargs)

    monkeypatch.setattr(copy_command, name, meet)
    assert command("copy", ended, "digits", tmp_path / "copied")[0] == 0


def test_the_newest_checkpoints_of_the_best_trials_are_read_at_the_same_time(swept, as_json, monkeypatch):
    two, latest = Barrier(2, timeout=60), CheckpointStore.latest

    def meet(store):
        two.wait()
        return latest(store)

    monkeypatch.setattr(parallel, "_FEW", 0)
    monkeypatch.setattr(CheckpointStore, "latest", meet)
    assert len(as_json("best", swept, "digits", "-k", "2")) == 2


def test_a_trial_that_is_trained_keeps_its_sweep(ended, command):
    claim_attempt(CheckpointStore.open(ended, trial_run(0)), Owner.current(), world_size=1)
    before = stored(ended)
    code, _, err = command("delete", ended, "digits", "--yes")
    assert (code, f"run '{trial_run(0)}' is being trained by process" in err) == (1, True)
    assert stored(ended) == before
