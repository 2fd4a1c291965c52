"""`metrics` and `watch`: what a run has reported, and what it reports now."""

import csv
import io
import math
import os
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import ranks
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome, newest_attempt, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.metrics import flatten_metrics
from prefect_torch.deployments.command_line.reports import watch_command
from prefect_torch.deployments.command_line.reports.sparkline import sparkline
from prefect_torch.deployments.command_line.reports.watch_command import MetricLines, Watcher, news, steps_per_s
from rich.console import Console
from stored_runs import store_run


def record(step, seconds=0, **metrics):
    return MetricRecord(1, step, metrics, None, f"2026-01-01T00:00:{seconds:02d}+00:00")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0], "█▁"),
        ([3.0], "▄"),
        ([2.0, 2.0], "▄▄"),
        ([], ""),
        ([0.0, math.nan, 1.0], "▁ █"),
        ([math.inf, -math.inf], "  "),
        ([0.0, 0.0, 1.0, 1.0, 4.0, 4.0, 8.0, 8.0], "▁▂▅█"),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_a_curve_in_a_line(values, expected, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert sparkline(values, 4 if len(values) == 8 and values[1] == 0 else 8) == expected


def test_a_terminal_without_blocks_gets_ascii(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert sparkline([0, 7], 8) == "_%"


def test_the_overview_has_a_line_for_each_metric_and_fits_80_columns(local, command, tmp_path):
    store_run(local, tmp_path / "scratch")
    code, out, err = command("metrics", local, "run")
    assert (code, err) == (0, "")
    header, loss, text = out.splitlines()
    assert header.split() == ["metric", "reports", "last", "min", "max", "curve"]
    assert loss.split()[:5] == ["loss", "3", "0.333333", "0.333333", "1"]
    assert text.split() == ["nested/text", "3", "x", "-", "-"]
    assert max(map(len, out.splitlines())) <= 80


def test_integers_that_no_float_holds_are_shown_and_compared(local, command, as_json, tmp_path):
    store = CheckpointStore.open(local, "run")
    attempt = ranks.Attempt(store)
    history = HistoryWriter(store, attempt.number)
    for step, value in enumerate([10**400, 0.5, 3]):
        attempt.session().report({"n": value}, ranks.folder(tmp_path / str(step), m="x"), step=step)
        history.append(replace(record(step, n=value), checkpoint=store.latest().id))
    history.flush()
    first, second, third = store.ids()
    assert command("show", local, "run")[0] == 0
    assert command("metrics", local, "run")[0] == 0
    assert command("watch", local, "run", "--once")[::2] == (1, "")  # it is running
    assert as_json("diff", local, "run", first, third)["metrics"][0]["change"] == 3 - 10**400
    assert as_json("diff", local, "run", second, third)["metrics"][0]["change"] == 2.5
    assert command("diff", local, "run", first, second)[0] == 0


def test_named_metrics_are_printed_report_by_report(local, command, tmp_path):
    store_run(local, tmp_path / "scratch")
    code, out, _ = command("metrics", local, "run", "loss", "--last", "2")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [["attempt", "step", "loss"], ["1", "1", "0.5"], ["1", "2", "0.333333"]],
    )
    code, _, err = command("metrics", local, "run", "nosuch")
    assert (code, err) == (1, "prefect-torch: run 'run' has no metric 'nosuch'; it has loss, nested/text\n")


def test_csv_and_json_have_every_report(local, command, as_json, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    _, out, _ = command("metrics", local, "run", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["step"], row["nested/text"]) for row in rows] == [("0", "x"), ("1", "x"), ("2", "x")]
    assert [float(row["loss"]) for row in rows] == [1, 1 / 2, 1 / 3]
    assert rows[2]["checkpoint"] == store.latest().id
    assert [it["metrics"]["loss"] for it in as_json("metrics", local, "run")] == [1, 1 / 2, 1 / 3]
    assert command("metrics", local, "run", "--csv", "--json")[0] == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_csv_has_texts_as_they_are_but_nothing_that_a_terminal_would_obey(local, command, tmp_path, monkeypatch, is_terminal):
    store, text = CheckpointStore.open(local, "run"), "a\x1b[2Jb"
    ranks.Attempt(store).session().report({"text": text, "loss": 0.5}, ranks.folder(tmp_path / "c", model="x"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    _, out, _ = command("metrics", local, "run", "--csv")
    (row,) = csv.DictReader(io.StringIO(out, newline=""))
    assert (row["text"], row["loss"]) == ("a [2Jb" if is_terminal else text, "0.5")


def test_a_watch_without_a_terminal_prints_what_is_new_and_ends_with_the_training(local, command, tmp_path, monkeypatch):
    store = store_run(local, tmp_path / "scratch", ending=None)
    number = newest_attempt(store).number
    waits = []

    def go_on(_):
        waits.append(1)
        if len(waits) == 1:
            history = HistoryWriter(store, number)
            history.append(MetricRecord(number, 3, {"loss": 0.1}, None, "2026-01-01T00:00:00+00:00"))
            history.flush()
        else:
            write_outcome(store, Outcome(number, "completed", None, None, None))

    monkeypatch.setattr(watch_command.time, "sleep", go_on)
    code, out, err = command("watch", local, "run")
    assert (code, err, len(waits)) == (0, "", 2)
    lines = out.splitlines()
    assert lines[0].startswith("attempt 1, step 2: loss=0.333333"), "of what was reported before, the newest"
    assert lines[1:] == [
        f"checkpoint {max(store.ids())}",
        f"attempt {number} is running",
        f"attempt {number}, step 3: loss=0.1",
        f"attempt {number} is completed",
    ]


def test_a_watch_prints_the_reports_that_come_with_the_end(local, command, tmp_path, monkeypatch):
    store = store_run(local, tmp_path / "scratch", ending=None)
    number, reads = newest_attempt(store).number, []

    def reading(read, *args):
        reads.append(read)
        if len(reads) == 2:  # the training ends between the two reads of the first look
            history = HistoryWriter(store, number)
            history.append(MetricRecord(number, 3, {"loss": 0.1}, None, "2026-01-01T00:00:00+00:00"))
            history.flush()
            write_outcome(store, Outcome(number, "completed", None, None, None))
        return read(*args)

    for name in ("read_status", "read_records"):
        monkeypatch.setattr(watch_command, name, partial(reading, getattr(watch_command, name)))
    monkeypatch.setattr(watch_command.time, "sleep", lambda _: None)
    code, out, _ = command("watch", local, "run")
    lines = out.splitlines()
    assert (code, lines.count(f"attempt {number}, step 3: loss=0.1"), lines[-1]) == (0, 1, f"attempt {number} is completed")


def test_a_watch_outlives_an_outage_of_the_storage(local, command, tmp_path, monkeypatch):
    store = store_run(local, tmp_path / "scratch", ending=None)
    number, looks = newest_attempt(store).number, []

    def read(run):
        looks.append(run)
        if len(looks) in (2, 3):
            raise StorageError("the bucket does not answer")
        if len(looks) == 4:
            write_outcome(store, Outcome(number, "completed", None, None, None))
        return read_status(run)

    read_status = watch_command.read_status
    monkeypatch.setattr(watch_command, "read_status", read)
    monkeypatch.setattr(watch_command.time, "sleep", lambda _: None)
    code, out, err = command("watch", local, "run")
    assert (code, len(looks)) == (0, 4)
    assert out.splitlines()[-2:] == [f"attempt {number} is running", f"attempt {number} is completed"]
    assert err == "prefect-torch: the bucket does not answer; it is watched again once it answers\n"


def test_a_watch_outlives_an_attempt_that_is_begun_again(local, command, tmp_path, monkeypatch):
    store = store_run(local, tmp_path / "scratch", ending="failed")  # led by this process
    failed = newest_attempt(store)

    def go_on(_):
        if newest_attempt(store) == failed:
            claim_attempt(store, Owner.current(), world_size=1)
        else:
            write_outcome(store, Outcome(failed.number + 1, "completed"))

    monkeypatch.setattr(watch_command.time, "sleep", go_on)
    code, out, _ = command("watch", local, "run")
    assert (code, out.splitlines()[-3:]) == (
        0,
        ["attempt 2 is failed; it may begin again", "attempt 3 is running", "attempt 3 is completed"],
    )


@pytest.mark.parametrize(
    ("outcome", "lives", "waits"),
    [
        (Outcome(2, "failed", kind="user"), True, True),
        (Outcome(2, "preempted"), True, True),
        (Outcome(2, "failed", kind="final"), True, False),
        (Outcome(2, "cancelled"), True, False),
        (Outcome(2, "failed", kind="user"), False, False),
    ],
)
def test_only_what_may_begin_again_is_awaited_and_not_forever(outcome, lives, waits, monkeypatch):
    process = os.getpid() if lives else 2**22 - 1
    attempt = Attempt(2, "token", replace(Owner.current(), pid=process), 1, None, 1, "2026-01-01T00:00:00+00:00")
    status = AttemptStatus(attempt, outcome, attempt.owner.is_process_gone())
    view, settling = watch_command.View(status, (), ()), watch_command.Settling(90.0)
    now_s = 1000.0
    monkeypatch.setattr(watch_command.time, "monotonic", lambda: now_s)
    assert settling.has_ended(view) is not waits
    now_s += 90.0
    assert settling.has_ended(replace(view))


def test_a_training_that_may_have_been_killed_elsewhere_is_awaited_while_it_reports(monkeypatch):
    attempt = Attempt(2, "token", replace(Owner.current(), host="elsewhere"), 1, None, 1, "2026-01-01T00:00:00+00:00")
    view = watch_command.View(AttemptStatus(attempt, None, attempt.owner.is_process_gone()), [record(1)], ())
    assert view.state == "unknown"
    settling, without_limit = watch_command.Settling(0.0, 900.0), watch_command.Settling(0.0)
    now_s = 1000.0
    monkeypatch.setattr(watch_command.time, "monotonic", lambda: now_s)
    assert not settling.has_ended(view)
    now_s += 899.0
    assert not settling.has_ended(replace(view))
    view = replace(view, history=[record(1), record(2)])
    assert not settling.has_ended(view)
    now_s += 899.0
    assert not settling.has_ended(replace(view))
    now_s += 1.0
    assert settling.has_ended(replace(view))
    assert not without_limit.has_ended(view)
    assert not settling.has_ended(replace(view, status=replace(view.status, is_process_gone=False)))


def test_no_time_in_which_the_storage_was_away_is_silence_of_a_training(monkeypatch):
    attempt = Attempt(2, "token", replace(Owner.current(), host="elsewhere"), 1, None, 1, "2026-01-01T00:00:00+00:00")
    view = watch_command.View(AttemptStatus(attempt, None, attempt.owner.is_process_gone()), [record(1)], ())
    settling, now_s = watch_command.Settling(0.0, 900.0), 1000.0
    monkeypatch.setattr(watch_command.time, "monotonic", lambda: now_s)
    assert not settling.has_ended(view)
    for _ in range(3):  # a look that fails shows the same view again
        now_s += 899.0
        assert not settling.has_ended(view)
    now_s += 899.0
    assert not settling.has_ended(view := replace(view))
    now_s += 1.0
    assert settling.has_ended(replace(view))


def test_a_watch_ends_with_1_after_silence_from_another_machine(local, command, tmp_path, monkeypatch):
    monkeypatch.setattr(Owner, "is_process_gone", lambda _: None)
    store_run(local, tmp_path / "scratch", ending=None)
    assert command("watch", local, "run", "--silent", "0")[0] == 1


@pytest.mark.parametrize(("ending", "expected"), [("completed", 0), ("failed", 1), ("cancelled", 1), (None, 1)])
def test_a_single_look_tells_whether_the_training_completed(local, command, tmp_path, ending, expected):
    store_run(local, tmp_path / "scratch", ending=ending)
    assert command("watch", local, "run", "--once")[0] == expected


def test_the_last_line_and_the_picture_say_why_an_attempt_ended(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch", ending=None)
    number = newest_attempt(store).number
    error = f"rank 1 of attempt {number} failed: ValueError: no\x1b[2J labels"
    write_outcome(store, Outcome(number, "failed", None, "final", f"{error}\nTraceback"))
    shown = f"rank 1 of attempt {number} failed: ValueError: no [2J labels"
    assert command("watch", local, "run")[1].splitlines()[-1] == f"attempt {number} is failed: {shown}"
    console = Console(width=40, file=io.StringIO())
    console.print(watch_command._picture("run", Watcher(store).look(), MetricLines(), 40))
    assert shown in " ".join(console.file.getvalue().split())


def test_of_a_killed_attempt_it_says_that_its_process_is_gone_and_what_continues(local, command, tmp_path, monkeypatch):
    monkeypatch.setattr(Owner, "is_process_gone", lambda _: True)
    store_run(local, tmp_path / "scratch", ending=None)
    last = command("watch", local, "run")[1].splitlines()[-1]
    assert last == "attempt 2 is lost: its process is gone; the next training of this name continues"


def test_the_last_reports_of_a_killed_leader_are_those_of_its_checkpoints(local, command, tmp_path, monkeypatch):
    store = CheckpointStore.open(local, "run")
    attempt = ranks.Attempt(store)
    for step in range(2):  # no report is stored: the leader is killed before
        attempt.session().report({"loss": step}, ranks.folder(tmp_path / str(step), m="x"), step=step)
    assert Watcher(store).look().history == []
    monkeypatch.setattr(Owner, "is_process_gone", lambda _: True)
    lines = command("watch", local, "run")[1].splitlines()
    assert [line for line in lines if "loss" in line][-1] == "attempt 1, step 1: loss=1"
    assert [record.step for record in Watcher(store).look().history] == [0, 1]


def test_a_look_reads_no_chunk_again(local, tmp_path, monkeypatch):
    watcher = Watcher(store_run(local, tmp_path / "scratch", ending=None))
    assert len(watcher.look().history) == 3
    read = []
    get_bytes = type(watcher.store.storage).get_bytes
    monkeypatch.setattr(type(watcher.store.storage), "get_bytes", lambda self, key: read.append(key) or get_bytes(self, key))
    assert len(watcher.look().history) == 3
    assert [key for key in read if "/metrics/" in key] == []


def test_the_picture_fits_any_width(local, tmp_path):
    view = Watcher(store_run(local, tmp_path / "scratch", ending=None)).look()
    for width in (40, 80, 200):
        console = Console(width=width, file=io.StringIO())
        console.print(watch_command._picture("run", view, MetricLines(), width))
        shown = console.file.getvalue().splitlines()
        assert max(map(len, shown)) <= width
        assert any("loss" in line for line in shown)
        assert any("3 checkpoints" in line for line in shown)


def test_each_record_is_looked_at_once_for_all_pictures(monkeypatch):
    """Each look went through the whole history: a core of the machine for one of a million records."""
    flattened = []
    monkeypatch.setattr(watch_command, "flatten_metrics", lambda it: flattened.append(it) or flatten_metrics(it))
    lines = MetricLines()
    for count in (1, 3, 3):
        view = watch_command.View(None, [record(step, loss=3 - step, acc=step) for step in range(count)], ())
        console = Console(width=80, file=io.StringIO())
        console.print(watch_command._picture("run", view, lines, 80))
    assert flattened == [{"loss": 3 - step, "acc": step} for step in range(3)]
    assert re.search(r"^loss +1 +\S{3} *\nacc +2 +\S{3} *$", console.file.getvalue(), re.MULTILINE)


def test_a_record_of_an_earlier_attempt_that_comes_late_is_shown_and_no_other_twice():
    """Its chunk may not have been readable, or its leader stored it after it was overtaken."""
    early, late, last, next_one = record(0, loss=9), record(1, loss=math.nan), record(5, 5, loss=1), record(6, 6, loss=0)
    last, next_one = (replace(it, attempt=2) for it in (last, next_one))
    histories = [[early, last], [early, late, last], [early, late, last, next_one]]
    lines = MetricLines()
    for history in histories:
        lines.add(history)
    whole = MetricLines()
    whole.add(histories[-1])
    assert [*lines.shown(80)] == [*whole.shown(80)]
    views = [watch_command.View(None, (), ()), *(watch_command.View(None, history, ()) for history in histories)]
    told = [line for before, now in pairwise(views) for line in news(before, now)]
    assert [line.partition(":")[0].partition("step ")[2] for line in told] == ["0", "5", "1", "6"]


def test_news_are_each_told_once():
    before, now = watch_command.View(None, [record(1)], ["a"]), watch_command.View(None, [record(1), record(2, x=1.5)], ["a"])
    assert list(news(before, now)) == ["attempt 1, step 2: x=1.5"]
    assert list(news(now, now)) == []


def test_the_speed_is_that_of_the_newest_reports():
    assert steps_per_s([record(0, 0), record(100, 50)]) == 2
    assert steps_per_s([record(1, 1)]) is None
    assert steps_per_s([record(step, step) for step in range(30)]) == 1


def test_the_step_and_the_speed_are_those_of_reports_not_of_a_logger():
    history = [
        record(0, 0),
        replace(record(500, 5, lr=1), is_logged=True),
        record(1, 10),
        replace(record(999, 19), is_logged=True),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(watch_command._picture("run", watch_command.View(None, history, ()), MetricLines(), 80))
    assert re.search(r"^step 1, .* ago, 0\.1 steps/s *$", console.file.getvalue(), re.MULTILINE)
