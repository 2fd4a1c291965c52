"""The command `prefect-torch`: in this process, and as one of its own where exit codes, pipes and terminals count."""

import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from forked_programs import run_program
from prefect.filesystems import LocalFileSystem
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import api_that_answers
from prefect_torch.ckpt import Checkpoint, CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.attempts import claims
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, newest_attempt, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.metrics import from_json
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.tasks.training.unusable_storage import unusable_storage_explained
from ranks import Attempt, folder
from servers import ACCESS_KEY, SECRET_KEY, free_port

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(sys.executable).with_name("prefect-torch"))
LOSSES = [0.9, 0.2, float("nan"), 0.4, 0.5]
ERROR = "rank 1 of attempt 2 failed: ValueError: bad [red]loss\n\nTraceback\nValueError: bad [red]loss\nof two lines\n"


def train(storage, run_name="run", losses=LOSSES, ending="completed"):
    """Leave a run behind as a training does that keeps its best two by loss."""
    store = CheckpointStore.open(storage, run_name)
    attempt = Attempt(store)

    def report(session, rank):
        for step, loss in enumerate(losses):
            size = 100_000 * (step + 1)
            with_files = folder(Path(scratch) / str(step), model=bytes(size), same=b"same")
            session.report({"loss": loss, "nested": {"step": step}}, with_files)

    scratch = Path(os.environ["PYTEST_SCRATCH"]) / run_name
    assert attempt.run(report) == [None]
    history = HistoryWriter(store, attempt.number)
    for manifest in store.list():
        history.append(MetricRecord(1, manifest.step, manifest.metrics, manifest.id, manifest.created_at.isoformat()))
    history.flush()
    settings = asdict(RetentionPolicy(2, "loss", "min"))
    last = claim_attempt(store, Owner.current("a-flow-run"), world_size=2, settings=settings)
    if ending is not None:
        write_outcome(store, Outcome(last.number, ending, "a-flow-run", "user", ERROR))
    return store


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("COLUMNS", "200")


def on_terminal(*arguments, until=b"", typed=b"", signal_number=None, environment=()):
    """Run the script on a terminal; return what it showed and its exit code."""
    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    command = [SCRIPT, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm-256color", **dict(environment)}
    )
    os.close(theirs)
    shown, told = b"", False
    while True:
        if until in shown and not told:
            told = True
            os.write(ours, typed)
            if signal_number is not None:
                process.send_signal(signal_number)
        if not select.select([ours], [], [], 5)[0]:
            if signal_number is not None:  # it came in the moment before the program began to wait for an answer
                process.send_signal(signal_number)
            continue
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other side is closed
            more = b""
        if not more:
            break
        shown += more
    os.close(ours)
    return shown.decode(), process.wait(30)


def test_runs_are_listed(storage, command, as_json):
    train(storage, "one")
    store = train(storage, "two", losses=[1.0], ending=None)
    CheckpointStore.open(storage, "no-run").records.put_json("no-run/notes.json", {})
    code, out, err = command("ls", storage)
    assert (code, err) == (0, "")
    header, one, two = out.splitlines()
    assert header.split() == ["run", "attempts", "latest", "step", "checkpoints", "size", "state"]
    assert one.split() == ["one", "2", "4", "5", "1.4", "MiB", "completed"]
    assert two.split() == ["two", "2", "0", "1", "97.7", "KiB", "running"]
    listed = as_json("ls", storage)
    assert listed[0] == {
        "name": "one",
        "attempts": 2,
        "latest_step": 4,
        "checkpoints": 5,
        "bytes": 1_500_020,
        "state": "completed",
        "began_at": newest_attempt(CheckpointStore.open(storage, "one")).claimed_at,
        "trials": None,
    }
    assert listed[1]["bytes"] == store.latest().total_bytes


def test_listing_runs_reads_no_manifest(local, command, monkeypatch):
    train(local)
    read = []
    get_bytes = LocalStorage.get_bytes
    monkeypatch.setattr(LocalStorage, "get_bytes", lambda storage, key: read.append(key) or get_bytes(storage, key))
    assert command("ls", local)[0] == 0
    assert sorted(key.split("/")[1] for key in read) == ["attempts", "outcomes"]


@pytest.mark.parametrize(
    ("owner", "state"),
    [
        (Owner("f", "elsewhere/boot", 1, 1), "unknown"),
        (Owner("f", Owner.current().host, 2**22 - 1, 1), "lost"),
        (Owner.current("f"), "running"),
    ],
    ids=lambda value: value if isinstance(value, str) else "owner",
)
def test_an_attempt_without_an_outcome_is_told_by_its_process(local, as_json, owner, state):
    claimed = claim_attempt(CheckpointStore.open(local, "run"), owner, world_size=1)
    (summary,) = as_json("ls", local)
    assert (summary["name"], summary["attempts"], summary["latest_step"], summary["checkpoints"]) == ("run", 1, None, 0)
    assert (summary["state"], summary["began_at"]) == (state, claimed.claimed_at)


@pytest.mark.parametrize("verb", ["ls", "show"])
def test_an_attempt_that_ends_while_it_is_looked_at_is_not_lost(local, as_json, monkeypatch, verb):
    store = CheckpointStore.open(local, "run")
    claimed = claim_attempt(store, Owner.current("f"), world_size=1)

    def ends(_):
        write_outcome(store, Outcome(claimed.number, "completed"))
        return True

    monkeypatch.setattr(Owner, "is_process_gone", ends)
    (described,) = as_json("ls", local) if verb == "ls" else as_json("show", local, "run")["attempts"]
    assert described["state"] == "completed"


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_documented_command_deletes_the_completed_runs_of_some_time_ago(tmp_path, monkeypatch):
    (commands,) = re.findall(r"```console\n\$ ([^`]*jq [^`]*)```", (ROOT / "docs/how-to/schedule.md").read_text())
    storage = tmp_path / "checkpoints"
    train(str(storage), "new")
    monkeypatch.setattr(claims, "utc_now", lambda: "2020-01-01T00:00:00+00:00")
    train(str(storage), "old")
    train(str(storage), "left", ending="failed")
    programs = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(commands, shell=True, cwd=tmp_path, env=programs, check=True)
    assert sorted(path.name for path in storage.iterdir()) == ["left", "new"]


def test_folders_beside_the_runs_are_not_walked(local, command, monkeypatch):
    train(local)
    private = Path(local, "lost+found")
    private.mkdir()
    Path(local, "other/deep").mkdir(parents=True)
    walked = []
    scan = os.scandir
    at = "/proc/self/fd/{}"
    monkeypatch.setattr(os, "scandir", lambda path: walked.append(Path(at.format(path)).resolve()) or scan(path))
    assert command("ls", local)[0] == 0
    assert Path(local, "run") in walked
    assert not {private, Path(local, "other"), Path(local, "other/deep")} & set(walked)


def test_an_empty_storage_has_no_runs(local, command, as_json):
    assert command("ls", local) == (0, "", f"no runs in {local}\n")
    assert as_json("ls", local) == []
    train(local)
    run = f"{local}/run"
    assert command("ls", run) == (0, "", f"no runs in {run}, which is run 'run' itself: prefect-torch ls {local} run\n")


def test_checkpoints_are_listed_with_why_they_are_kept(storage, command, as_json):
    store = train(storage)
    ids = list(store.ids())
    store.pin(ids[0])
    listed = as_json("ls", storage, "run")
    assert [it["id"] for it in listed] == ids
    assert [it["kept_because"] for it in listed] == [["pinned"], ["best"], [], ["best"], ["latest"]]
    assert [it["pinned"] for it in listed] == [True, False, False, False, False]
    assert listed[2]["metrics"] == {"loss": {"__float__": "nan"}, "nested": {"step": 2}}
    assert str(from_json(listed[2]["metrics"])["loss"]) == "nan"
    _, out, _ = command("ls", storage, "run")
    rows = out.splitlines()[1:]
    assert rows[1].startswith(f"{ids[1]}     1  loss=0.2, nested/step=1")
    assert [row.rpartition("  ")[2] for row in rows] == ["pinned", "best", "nothing", "best", "latest"]


def test_what_a_living_attempt_restores_is_kept(local, as_json, command):
    store = train(local, ending=None)
    restored = next(store.ids())
    attempt = claim_attempt(store, Owner.current("f"), world_size=1, settings=asdict(RetentionPolicy(1)))
    record_resumed_from(store, attempt, f"{store.path}/checkpoints/{restored}")
    assert as_json("ls", local, "run")[0]["kept_because"] == ["in use"]
    assert command("prune", local, "run", "--keep-last", 1, "--yes")[0] == 0
    assert next(store.ids()) == restored


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 - 1], ids=["running", "lost"])
def test_why_checkpoints_are_listed_as_kept_is_why_a_prune_keeps_them(local, as_json, pid):
    store = train(local, ending=None)
    restored = next(store.ids())
    owner = replace(Owner.current("f"), pid=pid)
    attempt = claim_attempt(store, owner, world_size=1, settings=asdict(RetentionPolicy(1)))
    record_resumed_from(store, attempt, f"{store.path}/checkpoints/{restored}")
    listed = {it["id"]: it["kept_because"] for it in as_json("ls", local, "run") if it["kept_because"]}
    kept = {it["id"]: it["kept_because"] for it in as_json("prune", local, "run", "--dry-run")["keep"]}
    assert listed == kept
    assert "in use" in listed[restored]


@pytest.fixture
def reads(monkeypatch):
    """How often each object was read."""
    counted, get_bytes = Counter(), LocalStorage.get_bytes

    def count(self, key):
        counted[key] += 1
        return get_bytes(self, key)

    monkeypatch.setattr(LocalStorage, "get_bytes", count)
    return counted


@pytest.mark.parametrize("arguments", [["ls"], ["prune", "--dry-run"]])
def test_the_status_of_a_run_is_read_once_for_its_policy_and_what_a_prune_keeps(local, command, reads, arguments):
    store = train(local)
    newest = max(store.keys(store.layout.attempts))
    reads.clear()
    verb, *options = arguments
    assert command(verb, local, "run", *options)[0] == 0
    assert reads[newest] == 1


def test_a_prune_reads_each_manifest_once(local, command, reads):
    store = train(local)
    manifests = [store.layout.manifest(checkpoint_id) for checkpoint_id in store.ids()]
    reads.clear()
    code, out, _ = command("prune", local, "run", "--keep", "1", "--metric", "loss", "--order", "min", "--yes")
    assert (code, len(list(store.ids()))) == (0, 2), out
    assert {key: reads[key] for key in manifests} == dict.fromkeys(manifests, 1)


def test_a_damaged_manifest_is_left_out_and_told(local, command):
    store = train(local)
    first = next(store.ids())
    Path(local, "run/manifests", f"{first}.json").write_text("{}")
    code, out, err = command("ls", local, "run")
    assert code == 0
    assert first not in out
    assert re.fullmatch(rf"checkpoint {first} of run 'run' is left out: .*{first}\.json is not a manifest: .*\n", err)


def test_a_run_is_shown(storage, command, as_json):
    store = train(storage, ending="failed")
    quarantine(store, next(store.ids()), "model is short")
    shown = as_json("show", storage, "run")
    assert [attempt["state"] for attempt in shown["attempts"]] == ["lost", "failed"]  # no outcome of the first was stored
    assert shown["attempts"][1]["error"] == ERROR
    assert shown["attempts"][1]["flow_run_id"] == "a-flow-run"
    assert shown["reports"] == 5
    loss = next(metric for metric in shown["metrics"] if metric["name"] == "loss")
    assert loss == {"name": "loss", "reports": 5, "first": 0.9, "last": 0.5, "min": 0.2, "max": 0.9}
    assert shown["quarantined"][0]["reason"] == "model is short"
    _, out, _ = command("show", storage, "run")
    assert "flow run a-flow-run, process" in out
    assert "\nuser: rank 1 of attempt 2 failed: ValueError: bad [red]loss\n" in out
    assert "5 reports from 20" in out
    assert "quarantined as damaged: " in out


def test_what_a_logger_recorded_is_no_report(local, as_json):
    store = train(local)
    history = HistoryWriter(store, 2)
    history.append(MetricRecord(2, 900, {"lr": 0.1}, None, "2036-01-01T00:00:00+00:00", is_logged=True))
    history.flush()
    shown = as_json("show", local, "run")
    assert (shown["reports"], shown["last_report_at"] < "2036") == (5, True)
    assert "lr" in [metric["name"] for metric in shown["metrics"]]


def test_a_metric_that_is_a_text_has_no_extremes(local, command):
    store = train(local)
    history = HistoryWriter(store, 2)
    history.append(MetricRecord(2, 9, {"phase": "warm"}, None, "2026-01-01T00:00:00+00:00"))
    history.flush()
    assert re.search(r"^phase +1 +warm +warm +- +-$", command("show", local, "run")[1], re.MULTILINE)


def test_a_run_and_a_checkpoint_fit_on_a_narrow_terminal(tmp_path):
    storage = tmp_path / "store"
    store = train(storage, ending="preempted")
    resumed = claim_attempt(store, Owner.current("0b1c2d3e-0000-4000-8000-000000000001"), world_size=16, lineage=1)
    record_resumed_from(store, resumed, store.path_of(store.latest().id))
    for arguments in (("show", storage, "run"), ("show", storage, "run", "latest"), ("ls", storage)):
        shown, code = on_terminal(*arguments, environment={"COLUMNS": "80"}.items())
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown.splitlines()]
        table = [line for line in lines if not line.startswith((str(tmp_path), " "))]
        assert code == 0, shown
        assert max(map(len, table)) <= 80, shown
        if arguments == ("show", storage, "run"):
            rows = [line.split() for line in lines if re.match(r" +[123] ", line)]
            assert [len(row) for row in rows] == [6, 6, 6], f"no cell is folded: {shown}"
            assert rows[2][-1] == store.latest().id


def test_a_checkpoint_is_shown(storage, command, as_json):
    store = train(storage)
    manifest = store.latest()
    store.checkpoint(manifest).set_metadata({"by": "\x1b[31mme"})
    shown = as_json("show", storage, "run", "latest")
    assert shown["files"] == [asdict(entry) for entry in manifest.files]
    assert (shown["id"], shown["bytes"], shown["pinned"]) == (manifest.id, 500_004, False)
    assert shown["metadata"] == {"by": "\x1b[31mme"}
    _, out, _ = command("show", storage, "run", "latest")
    assert all(entry.digest in out for entry in manifest.files)
    assert "\x1b" not in out


def test_the_best_come_first_by_the_metric_asked_for_or_the_trainings_own(storage, as_json, command):
    train(storage)
    asked = as_json("best", storage, "run", "--metric", "loss", "--order", "min", "-k", 3)
    assert [it["value"] for it in asked] == [0.2, 0.4, 0.5]
    assert as_json("best", storage, "run", "-k", 3) == asked
    assert [it["value"] for it in as_json("best", storage, "run", "-k", 9)][3:] == [0.9, {"__float__": "nan"}]
    assert as_json("best", storage, "run", "--metric", "nested/step", "--order", "max")[0]["step"] == 4
    assert "0.2" in command("best", storage, "run")[1]


def test_a_metric_that_none_has_is_named_with_those_there_are(local, command):
    train(local)
    code, _, err = command("best", local, "run", "--metric", "los", "--order", "min")
    assert code == 1
    assert err == "prefect-torch: no checkpoint of run 'run' has a number as the metric 'los'; they have loss, nested/step\n"
    code, _, err = command("best", local, "run", "--metric", "nested/step")
    assert code == 2
    assert "give --order min or --order max" in err


def test_two_checkpoints_are_compared_also_of_two_runs(storage, as_json, command):
    train(storage, "one")
    train(storage, "two", losses=[0.1])
    difference = as_json("diff", storage, "one", "best", "latest")
    assert difference["metrics"][0] == {"name": "loss", "from": 0.2, "to": 0.5, "change": pytest.approx(0.3)}
    assert [(it["path"], it["status"], it["from_bytes"]) for it in difference["files"]] == [
        ("model", "changed", 200_000),
        ("same", "same", 4),
    ]
    difference = as_json("diff", storage, "one", "latest", "two/latest")
    assert "/two/checkpoints/" in difference["to"]
    assert command("diff", storage, "one", "best", "latest")[1].count("changed") == 1


@pytest.mark.parametrize("level", ["size", "digest"])
def test_whole_checkpoints_verify(storage, as_json, level):
    store = train(storage)
    verdicts = as_json("verify", storage, "run", "--level", level)
    assert verdicts == [{"level": level, "id": it, "whole": True, "damage": None} for it in store.ids()]
    assert len(as_json("verify", storage, "run", "latest")) == 1


def test_damage_is_named(local, command):
    store = train(local)
    short, changed, _, manifestless, _ = list(store.ids())
    Path(local, "run/checkpoints", short, "model").write_bytes(b"short")
    file = Path(local, "run/checkpoints", changed, "same")
    file.write_bytes(b"SAME")
    Path(local, "run/manifests", f"{manifestless}.json").write_text("{}")
    code, out, err = command("verify", local, "run")
    assert code == 1
    assert err.startswith(f"prefect-torch: 3 of 5 checkpoints damaged, the first is {short}: ")
    assert f"checkpoints/{short}/model has 5 bytes instead of 100000" in err
    assert f"checkpoints/{changed}/same differs from what rank 0 committed" in out
    assert f"{manifestless}.json is not a manifest" in out
    code, out, _ = command("verify", local, "run", "--level", "size", "--json")
    assert code == 1
    assert [it["whole"] for it in json.loads(out)] == [False, True, True, False, True]
    assert command("verify", local, "run", manifestless)[0] == 1


def test_a_manifest_that_is_a_link_out_of_the_storage_is_damaged(local, command, tmp_path):
    linked, *others = train(local).ids()
    manifest = Path(local, "run/manifests", f"{linked}.json")
    manifest.rename(tmp_path / "elsewhere.json").chmod(0o644)
    manifest.symlink_to(tmp_path / "elsewhere.json")
    code, out, err = command("verify", local, "run", "--level", "size", "--json")
    assert code == 1
    assert [(it["id"], it["whole"]) for it in json.loads(out)] == [(linked, False), *((it, True) for it in others)]
    assert f"1 of 5 checkpoints damaged, the first is {linked}: " in err
    assert f"{linked}.json leads out of the storage" in err


def test_a_prune_without_a_terminal_wants_a_yes(local, command):
    store = train(local)
    code, out, err = command("prune", local, "run", "--keep", 1, "--metric", "loss", "--order", "min")
    assert (code, len(list(store.ids()))) == (2, 5)
    assert "2 stay, 3 go" in out
    assert "give --yes to delete, or --dry-run to look" in err


def test_a_prune_says_what_stays_and_why_and_what_goes(storage, as_json, command):
    store = train(storage)
    ids = list(store.ids())
    options = ("--keep", 1, "--metric", "loss", "--order", "min", "--keep-last", 2, "--every", 2)
    planned = as_json("prune", storage, "run", *options, "--dry-run")
    assert [(it["step"], it["kept_because"]) for it in planned["keep"]] == [
        (0, ["every"]),
        (1, ["best"]),
        (2, ["every"]),
        (3, ["last"]),
        (4, ["latest", "last", "every"]),
    ]
    planned = as_json("prune", storage, "run", "--dry-run")  # what the training itself keeps
    assert [it["step"] for it in planned["drop"]] == [0, 2]
    assert planned["dropped_bytes"] == 400_008
    assert all(it["reasons"] == it["kept_because"] for it in planned["keep"])  # the name that it had
    assert list(store.ids()) == ids
    code, out, _ = command("prune", storage, "run", "--yes")
    assert code == 0
    assert [line.rpartition("  ")[2] for line in out.splitlines()[1:6]] == [
        "goes",
        "stays: best",
        "goes",
        "stays: best",
        "stays: latest",
    ]
    assert out.splitlines()[-1] == "deleted 2 checkpoints, 390.6 KiB"
    assert list(store.ids()) == [ids[1], ids[3], ids[4]]
    assert command("prune", storage, "run")[0] == 0  # nothing goes, so nobody is asked


def test_a_prune_beside_a_training_spares_what_alone_remembers_a_report(local, command, as_json):
    store = train(local, ending=None)
    scratch = Path(os.environ["PYTEST_SCRATCH"])
    claimed = newest_attempt(store)
    with_files = folder(scratch / "more", model=b"m")
    session = Attempt(store).session()  # of an attempt whose reports are not in the history yet
    for loss in (0.8, 0.7, 0.6):
        session.report({"loss": loss}, with_files)
    unrecorded = list(store.ids())[-3:]
    assert command("prune", local, "run", "--keep", 1, "--metric", "loss", "--order", "min", "--yes")[0] == 0
    assert list(store.ids())[-3:] == unrecorded
    assert len(list(store.ids())) == 4
    kept = {row["id"]: row["kept_because"] for row in as_json("prune", local, "run", "--dry-run")["keep"]}
    assert all("recent" in kept[it] for it in unrecorded)
    write_outcome(store, Outcome(claimed.number + 1, "completed"))
    assert command("prune", local, "run", "--keep", 1, "--metric", "loss", "--order", "min", "--yes")[0] == 0
    assert len(list(store.ids())) == 2  # the best and the latest


def test_a_prune_spares_what_came_while_it_asked(local, monkeypatch, command):
    store = train(local)

    def answer(*_args, **_options):
        Attempt(store).run(lambda session, rank: session.report({"loss": 0.0}, folder(Path(local, "../new"), model=b"new")))
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", answer)
    assert command("prune", local, "run", "--keep", 1)[0] == 0
    assert [manifest.step for manifest in store.list()] == [1, 4, 5]


@pytest.mark.parametrize(
    "options",
    [("--metric", "loss"), ("--keep-last", 1, "--order", "min"), ("--keep", 0), ("--keep", 1, "--metric", "nested/step")],
)
def test_a_prune_that_is_not_clear_is_wrong_usage(local, command, options):
    store = train(local)
    assert command("prune", local, "run", *options, "--yes")[0] == 2
    assert len(list(store.ids())) == 5


def test_a_prune_by_a_metric_that_none_has_is_refused(local, command):
    store = train(local)
    assert command("prune", local, "run", "--keep", 1, "--metric", "los", "--order", "min", "--yes")[0] == 1
    assert len(list(store.ids())) == 5


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 3), (b"n\n", 1, 5), (b"\x04", 1, 5)])
def test_a_prune_asks_on_a_terminal(local, answer, code, left):
    store = train(local)
    shown, exit_code = on_terminal("prune", local, "run", until=b"for good?", typed=answer)
    assert "Delete 2 checkpoints for good? [y/N]" in shown
    assert (exit_code, len(list(store.ids()))) == (code, left)


def test_ctrl_c_exits_with_130(local):
    store = train(local)
    shown, code = on_terminal("prune", local, "run", until=b"for good?", signal_number=signal.SIGINT)
    assert code == 130
    assert "prefect-torch: interrupted" in shown
    assert len(list(store.ids())) == 5


def test_pins(storage, command):
    store = train(storage)
    first = next(store.ids())
    assert command("pin", storage, "run", first[:18]) == (0, f"{first} is pinned\n", "")
    assert store.pinned() == {first}
    assert command("unpin", storage, "run", first)[0] == 0
    assert store.pinned() == frozenset()


@pytest.mark.parametrize("name", ["show", "verify", "pin", "pull"])
def test_a_checkpoint_in_quarantine_is_not_said_to_be_pruned(local, command, tmp_path, name):
    store = train(local)
    damaged = next(store.ids())
    quarantine(store, damaged, "model differs")
    code, _, err = command(name, local, "run", damaged, *([tmp_path / "target"] if name == "pull" else []))
    assert code == 1
    assert f"{damaged} of run 'run' is in quarantine" in err
    assert f"prefect-torch restore {local} run {damaged}" in err


def test_a_pin_of_a_checkpoint_in_quarantine_is_taken_back_by_its_whole_id(local, command):
    store = train(local)
    first = next(store.ids())
    store.pin(first)
    quarantine(store, first, "model differs")
    assert "pinned and not deleted: prefect-torch unpin first" in command("delete", local, "run", "--yes")[2]
    assert command("unpin", local, "run", first) == (0, f"{first} is not pinned\n", "")
    assert command("delete", local, "run", "--yes")[0] == 0
    assert command("unpin", local, "run", first)[0] == 1


def test_a_restore_brings_back_what_is_whole_and_says_why_not(storage, command):
    store = train(storage)
    first, second, *_ = store.ids()
    quarantine(store, first, "model differs")
    quarantine(store, second, "model differs")
    store.storage.delete([store.layout.data(second, "model")])
    assert command("restore", storage, "run", first) == (0, f"{first} is whole, and in run run again\n", "")
    assert first in store.ids()
    code, _, err = command("restore", storage, "run", second)
    assert (code, second in store.ids()) == (1, False)
    assert f"{second} stays in quarantine, since it is damaged" in err
    assert "model is missing" in err


@pytest.mark.parametrize(("chosen", "step"), [((), 4), (("latest",), 4), (("best",), 1)])
def test_a_pull_is_a_whole_verified_checkpoint(storage, command, tmp_path, chosen, step):
    store = train(storage)
    target = tmp_path / "new/target"
    code, out, _ = command("pull", storage, "run", *chosen, target)
    assert code == 0
    assert f"step {step}: 2 files" in out
    assert sorted(path.name for path in target.iterdir()) == ["model", "same"]
    assert (target / "model").read_bytes() == bytes(100_000 * (step + 1))
    assert len(store.list()) == 5


def test_a_pull_of_a_damaged_checkpoint_leaves_nothing(storage, command, tmp_path):
    store = train(storage)
    store.storage.put_bytes(store.layout.data(store.latest().id, "same"), b"SAME")
    code, _, err = command("pull", storage, "run", tmp_path / "target")
    assert code == 1
    assert "same differs from what rank 0 committed" in err
    assert list((tmp_path / "target").iterdir()) == []


def test_a_pull_into_a_full_directory_wants_force(local, command, tmp_path):
    train(local)
    (tmp_path / "target").mkdir()
    (tmp_path / "target/mine").write_text("mine")
    (tmp_path / "target/same").write_text("other")
    code, _, err = command("pull", local, "run", tmp_path / "target")
    assert code == 1
    assert "is not empty" in err
    assert command("pull", local, "run", tmp_path / "target", "--force")[0] == 0
    assert {path.name: path.read_bytes()[:4] for path in (tmp_path / "target").iterdir()} == {
        "mine": b"mine",
        "same": b"same",
        "model": bytes(4),
    }


def test_a_pull_over_another_checkpoint_leaves_nothing_of_its_metadata(local, command, tmp_path):
    store = train(local)
    first = store.list()[0]
    store.checkpoint(first).set_metadata({"epoch": 1})
    assert command("pull", local, "run", first.id, tmp_path / "target")[0] == 0
    assert Checkpoint(tmp_path / "target").get_metadata() == {"epoch": 1}
    assert command("pull", local, "run", tmp_path / "target", "--force")[0] == 0
    assert Checkpoint(tmp_path / "target").get_metadata() == {}


def begin_pull(local, target):
    """Return a process of `prefect-torch pull` that waits for a file, once it has downloaded another one."""
    program = """
    import time
    from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
    from prefect_torch.deployments.command_line.program import main
    get_file = LocalStorage.get_file
    LocalStorage.get_file = lambda *args: time.sleep(60) if args[1].endswith("/model") else get_file(*args)
    main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), "pull", local, "run", str(target)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (target.exists() and list(target.glob(".prefect-torch-scratch-*/*/same"))):
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_pull_that_is_interrupted_leaves_nothing(local, tmp_path):
    train(local)
    target = tmp_path / "target"
    process = begin_pull(local, target)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "prefect-torch: interrupted; nothing was pulled\n")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_pull_that_is_ended_is_repeated_by_the_same_command(command, local, tmp_path, how):
    train(local)
    target = tmp_path / "target"
    process = begin_pull(local, target)
    beside = subprocess.run([SCRIPT, "pull", local, "run", str(target)], check=False, capture_output=True, text=True)
    assert (beside.returncode, "is not empty" in beside.stderr) == (1, True)
    process.send_signal(how)
    process.communicate(timeout=30)
    assert command("pull", local, "run", target)[0] == 0
    assert sorted(path.name for path in target.iterdir()) == ["model", "same"]


@pytest.mark.parametrize(("name", "told"), [("copy", "interrupted; the same command continues"), ("verify", "interrupted")])
def test_an_interrupted_command_does_not_wait_for_what_it_reads(local, tmp_path, name, told):
    program = """
    import sys
    import time
    from pathlib import Path
    from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
    from prefect_torch.deployments.command_line.program import main
    begun = Path(sys.argv.pop())
    def never_ends(self, *given):
        begun.touch()
        time.sleep(60)
    LocalStorage.digest = LocalStorage.get_file = LocalStorage.put_file = never_ends
    main()
    """
    train(local)
    begun = tmp_path / "begun"
    to = [str(tmp_path / "copy")] if name == "copy" else []
    command = [sys.executable, "-c", textwrap.dedent(program), name, local, "run", *to, str(begun)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.lstrip()) == (130, f"prefect-torch: {told}\n")


def test_an_id_may_be_the_beginning_of_one(local, command):
    store = train(local)
    ids = list(store.ids())
    assert ids[1] in command("show", local, "run", ids[1][:16])[1]
    code, _, err = command("show", local, "run", "000001")
    assert code == 1
    assert err.startswith(f"prefect-torch: the ids of 5 checkpoints begin with '000001': {ids[0]}, ")
    code, _, err = command("show", local, "run", "9")
    assert code == 1
    assert "no checkpoint whose id begins with '9'; give an id as listed by ls, latest or best" in err


@pytest.mark.parametrize(
    "arguments",
    [("delete", "", "--yes"), ("pin", ""), ("copy", "", "to"), ("pull", "", "to"), ("pull", "latest", ""), ("pull", "")],
)
def test_a_shell_variable_without_a_value_names_nothing(local, command, arguments, tmp_path, monkeypatch):
    store = train(local, losses=[0.5])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    name, *rest = arguments
    code, _, err = command(name, local, "run", *rest)
    assert code > 0
    assert re.search("(ID|DIRECTORY) is empty: give ", err)
    assert len(list(store.ids())) == 1
    assert not any(file for file in (tmp_path / "here").rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ls", "/nowhere"), 1, "there is no directory /nowhere"),
        (("ls", "nosuch://x"), 1, "nosuch:// cannot be a storage"),
        (("ls", "sftp:///srv/x"), 1, "missing a required argument: 'host'. Give it in the URL, as in sftp://host/path"),
        (("ls", "s3://"), 1, "s3:// names no bucket: write s3://bucket/prefix"),
        (("ls", "s3://a b/x"), 1, "s3://a b/x cannot be opened: invalid domain character"),
        (("ls", "{local}", "../run"), 1, "run name '../run': use"),
        (("ls", "{local}", "none"), 1, "there is no run 'none' in"),
        (("ls",), 2, "Missing argument 'STORAGE'; see prefect-torch ls --help"),
        (("execute",), 2, "no flow run: give its id, or set PREFECT__FLOW_RUN_ID; see prefect-torch execute --help"),
        (("nosuch",), 2, "No such command 'nosuch'"),
        (("show", "{local}", "run", "--jsn"), 2, "No such option"),
        (("pull", "{local}", "run"), 2, "give DIRECTORY, or ID and DIRECTORY"),
        (("best", "{local}", "run", "-k", "0"), 2, "0 is not in the range x>=1"),
        (("pin", "{local}", "run", "000009-00000001-00000000"), 1, "it was pruned or never committed"),
        (("best", "{local}", "empty"), 2, "give --metric"),
        (("show", "{local}", "empty", "latest"), 1, "has no checkpoint yet"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(local, command, arguments, code, said):
    train(local)
    claim_attempt(CheckpointStore.open(local, "empty"), Owner.current(), world_size=1)
    got, out, err = command(*(argument.format(local=local) for argument in arguments))
    assert (got, out) == (code, "")
    assert err.startswith("prefect-torch: ")
    assert said in err


def test_a_refusal_has_one_advice(local, command, tmp_path):
    train(local)
    Path(local, "run", "attempts").rename(tmp_path / "elsewhere")
    Path(local, "run", "attempts").symlink_to(tmp_path / "elsewhere")
    code, _, err = command("show", local, "run")
    assert (code, "leads out of the storage" in err) == (1, True)
    assert err.endswith(": give that as the storage\n")


def test_a_storage_that_refuses_is_one_line(moto, monkeypatch, command):
    for name, value in moto.options().items():
        monkeypatch.setenv(name.upper(), value)
    code, _, err = command("ls", "s3://no-such-bucket-here/x")
    assert code == 1
    assert "no-such-bucket-here" in err


def test_a_block_names_a_storage(command, local, prefect_server):
    train(local)
    LocalFileSystem(basepath=local).save("of-a-test")
    assert command("ls", "local-file-system/of-a-test")[1].splitlines()[1].startswith("run ")
    code, _, err = command("ls", "local-file-system/none")
    assert code == 1
    assert "none" in err


def test_a_block_whose_server_is_away_is_one_line(command):
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        code, _, err = command("ls", "s3-bucket/none")
    assert code == 1
    assert "is PREFECT_API_URL the server that has it?" in err


def test_a_proxys_page_in_the_place_of_a_block_or_a_deployment_is_one_line(command):
    with api_that_answers(200, b"<html>under maintenance</html>"):
        code, _, ls = command("ls", "s3-bucket/none")
        assert (code, "is PREFECT_API_URL the server that has it?" in ls) == (1, True)
        code, _, plan = command("plan", "train/none")
        assert (code, "does not give deployment 'train/none': " in plan) == (1, True)


def test_an_embedded_server_that_does_not_start_is_one_line(command, monkeypatch):
    tied = []

    def timed_out(*_, **__):
        raise RuntimeError("Timed out while attempting to connect to ephemeral Prefect API server.")

    monkeypatch.setattr("prefect_torch.deployments.planning.get_client", timed_out)
    monkeypatch.setattr("prefect.blocks.core.Block.load", timed_out)
    monkeypatch.setattr("prefect_torch.tasks.prefect_api.embedded_server.tying.tie_new_servers", lambda: tied.append(True))
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code, _, plan = command("plan", "train/none")
        assert code == 1
        code, _, ls = command("ls", "s3-bucket/none")
        assert code == 1
    assert re.search("^prefect-torch: a Prefect server that was started here does not give .*; set PREFECT_API_URL", plan)
    assert "API server; is PREFECT_API_URL" in ls
    assert tied == [True], "it would have Prefect's 20 s"


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(401)

    def log_message(self, *words):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scaling": {"num_workers": "x"}}, "invalid parameters: scaling.num_workers: Input should be a valid integer"),
        ({"scalin": {}}, r"train\(\) got an unexpected keyword argument 'scalin'; it takes train_fn, config, scaling, "),
        ({"num_workers": 2}, r"'num_workers'; give scaling=ScalingConfig\(num_workers=\.\.\.\)"),
    ],
)
def test_parameters_that_are_refused_are_one_line_and_no_log(given, said):
    words = ["plan", "--params", json.dumps({"train_fn": "os:getcwd", **given})]
    program = f"import sys; from prefect_torch.deployments.command_line.program import run; sys.exit(run({words!r}))"
    done = run_program([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert re.search(said, done.stderr)


def test_a_plan_whose_server_is_away_or_refuses_is_one_line(command):
    with HTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, args=(0.02,), daemon=True).start()
        for port, why in ((free_port(), "refused"), (refusing.server_port, "401")):
            with temporary_settings({PREFECT_API_URL: f"http://me:secret@127.0.0.1:{port}/api"}):
                code, _, err = command("plan", "train/none")
            assert (code, "secret" in err) == (1, False)
            assert re.search(f"/api does not give deployment 'train/none': .*{why}.*PREFECT_API_AUTH_STRING", err)
        refusing.shutdown()


def test_every_key_of_json_is_named_in_the_help(local, as_json, command):
    train(local)
    for arguments in [
        ("ls", local),
        ("ls", local, "run"),
        ("show", local, "run"),
        ("show", local, "run", "latest"),
        ("best", local, "run"),
        ("diff", local, "run", "best", "latest"),
        ("verify", local, "run"),
        ("prune", local, "run", "--dry-run"),
    ]:
        words = set(re.findall(r"\w+", command(arguments[0], "--help")[1]))
        printed = as_json(*arguments)
        levels = [printed] if isinstance(printed, dict) else printed
        levels += [it for level in levels for value in level.values() if isinstance(value, list) for it in value]
        keys = {key for level in levels if isinstance(level, dict) for key in level}
        assert keys <= words, arguments


def test_every_command_has_help_and_none_means_help(command):
    code, out, _ = command()
    assert code == 0
    assert command("--help")[1] == out
    for name in re.findall(r"^  (\w+)  ", out.partition("Commands:")[2], re.MULTILINE):
        assert f"Usage: prefect-torch {name}" in command(name, "--help")[1]
    assert re.fullmatch(r"prefect-torch, version \d.*\n", command("--version")[1])


def test_a_local_listing_takes_less_than_half_a_second_of_cpu(local):
    train(local)
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([SCRIPT, "ls", local], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_has_seen_enough_is_no_error(local, options):
    store = train(local)
    manifest = store.latest()
    for number in range(2000):  # more than a pipe holds
        other = manifest.id.replace("00000004", f"{number + 5:08d}")
        Path(local, "run/manifests", f"{other}.json").write_bytes(replace(manifest, id=other, step=number + 5).encode())
    process = subprocess.Popen([SCRIPT, "ls", local, "run", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(("verb", "argument"), [("pull", "DIRECTORY"), ("copy", "TARGET")])
def test_a_checkpoint_in_the_place_of_a_directory_is_refused(command, local, monkeypatch, tmp_path, verb, argument):
    """The latest was written into a directory of the name of the best."""
    checkpoint = train(local).latest().id
    monkeypatch.chdir(tmp_path)
    for name in ("best", "latest", checkpoint):
        code, _, err = command(verb, local, "run", name)
        assert (code, f"{name} is a checkpoint, and {argument} is missing; a directory of this name is ./{name}" in err) == (
            2,
            True,
        )
    assert command(verb, local, "run", "./best")[0] == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_error(local, tmp_path, closed):
    train(local)
    pull = f'exec "$0" pull "$1" run latest "$2" {closed}'
    done = subprocess.run(["sh", "-c", pull, SCRIPT, local, tmp_path / "pulled"], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert (tmp_path / "pulled/same").read_bytes() == b"same"


def test_colours_are_for_terminals(local):
    train(local)
    shown, code = on_terminal("ls", local)
    assert code == 0
    assert "\x1b[32mcompleted" in shown
    plain, _ = on_terminal("ls", local, environment=[("NO_COLOR", "1")])
    assert "\x1b[32m" not in plain
    piped = subprocess.run([SCRIPT, "ls", local], check=True, capture_output=True, text=True).stdout
    assert "\x1b" not in piped


def test_bars_are_for_terminals(local, tmp_path):
    train(local)
    shown, code = on_terminal("pull", local, "run", tmp_path / "one")
    assert code == 0
    assert re.search(r"pulling.*━.*488\.3/488\.3 KiB", shown)
    assert "5/5" in on_terminal("verify", local, "run")[0]
    piped = subprocess.run([SCRIPT, "pull", local, "run", str(tmp_path / "two")], check=True, capture_output=True, text=True)
    assert piped.stderr == ""


def test_a_narrow_terminal_folds_and_cuts_nothing(local):
    store = train(local)
    shown, _ = on_terminal("ls", local, "run", environment=[("COLUMNS", "64")])
    words = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "…" not in words
    assert all(f"{checkpoint_id} " in words for checkpoint_id in store.ids())


def test_a_command_in_an_error_can_be_copied_though_its_storage_has_a_space(tmp_path, command):
    storage = str(tmp_path / "my runs")
    train(storage)
    quoted = f"'{storage}'"
    assert f"prefect-torch ls {quoted} lists the runs" in command("ls", storage, "none")[2]
    assert f"prefect-torch ls {quoted} run" in command("ls", f"{storage}/run")[2]
    with (
        pytest.raises(NotADirectoryError, match=f"`prefect-torch doctor {quoted}` tries"),
        unusable_storage_explained(storage, ""),
    ):
        raise NotADirectoryError(20, "Not a directory", storage)


def test_numbers_are_whole_on_a_terminal_that_is_too_narrow_for_them(local):
    train(local, "a-run-with-a-name-that-takes-a-whole-line-of-the-terminal")
    for arguments in (("ls", local), ("show", local, "a-run-with-a-name-that-takes-a-whole-line-of-the-terminal")):
        narrow, wide = (on_terminal(*arguments, environment=[("COLUMNS", it), ("NO_COLOR", "1")])[0] for it in ("30", "400"))
        assert set(re.findall(r"\d[\d.]*", wide)) <= set(re.findall(r"\d[\d.]*", narrow)), narrow


def test_keys_of_the_s3_server_are_never_shown(moto, monkeypatch, command):
    for name, value in moto.options().items():
        monkeypatch.setenv(name.upper(), value)
    storage = f"s3://{moto.new_bucket()}/folder"
    train(storage)
    for arguments in (("ls", storage), ("show", storage, "run"), ("show", storage, "run", "latest", "--json")):
        _, out, err = command(*arguments)
        assert ACCESS_KEY not in out + err
        assert SECRET_KEY not in out + err
