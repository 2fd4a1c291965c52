"""The page of a storage: its runs side by side."""

import base64
import json
import re
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.flows.monitoring.pages import runs_page
from prefect_torch.flows.monitoring.pages.drawing.sparkline import draw_sparkline
from prefect_torch.flows.monitoring.pages.runs_page import read_runs, write_runs
from prefect_torch.flows.monitoring.text import page_url
from prefect_torch.flows.sweeps.journal.journal import list_parts
from prefect_torch.tasks.options.storage import configured_storage
from stored_sweeps import store_sweep

FLOW_RUN = "0b1c2d3e-0000-4000-8000-000000000001"
BY_LOSS = RetentionPolicy(2, "loss", "min")


@pytest.fixture
def storage(tmp_path):
    return configured_storage(tmp_path / "store")


def leave_run(storage, name, losses, *, ending="completed", policy=BY_LOSS, attempts=1):
    store = CheckpointStore.open(storage, name)
    for _ in range(attempts):
        attempt = claim_attempt(store, Owner.current(FLOW_RUN), world_size=2, lineage=1, settings=asdict(policy))
    history = HistoryWriter(store, attempt.number)
    for step, loss in enumerate(losses):
        history.append(MetricRecord(attempt.number, step, {"loss": loss}, None, "2026-01-01T00:00:00+00:00"))
    history.close()
    if ending is not None:
        write_outcome(store, Outcome(attempt.number, ending, FLOW_RUN))


def test_runs_stand_side_by_side_the_newest_first(storage, opened):
    leave_run(storage, "older", [3.0, 0.5, 1.0], attempts=2)
    leave_run(storage, "un_scored", [2.0, 4.0], ending="failed", policy=RetentionPolicy())
    leave_run(storage, "evaluated", [2.0, 1.0, 3.0], policy=RetentionPolicy(2, "eval/error", "min"))
    leave_run(storage, "silent", [], ending=None)
    opened.clear()
    page = write_runs(storage.url, *read_runs(storage), now_s=0.0)
    assert opened == [storage.url]
    url = page_url("flow-run", UUID(FLOW_RUN))
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert [re.sub(r"\(data:[^)]*\)|\d\d-\d\d \d\d:\d\d", "…", row) for row in rows] == [
        f"| [silent]({url}) | running |  |  |  | 1 | … |",
        f"| [evaluated]({url}) | completed | 2 | loss 3 (last) | ![loss]… | 1 | … |",
        f"| [un_scored]({url}) | failed | 1 | loss 4 (last) | ![loss]… | 1 | … |",
        f"| [older]({url}) | completed | 2 | loss 0.5 | ![loss]… | 2 | … |",
    ]
    pictures = re.findall(r"base64,([^)]*)\)", page)
    assert [ET.fromstring(base64.b64decode(picture)).tag for picture in pictures] == ["{http://www.w3.org/2000/svg}svg"] * 3


def test_long_names_are_cut_so_that_every_column_has_room(storage):
    """The UI breaks a name at its hyphens alone."""
    leave_run(storage, "n" * 100, [1.0], policy=RetentionPolicy(2, "loss" * 30, "min"))
    (row,) = read_runs(storage)[0]
    names = ["n" * 100, "resnet_50_with_lr_0.1_and_seed_42", "-".join(["word"] * 12), f"{'word-' * 20}lr-0.2"]
    page = write_runs(storage.url, [replace(row, name=name, metric="loss" * 30, best=1.0) for name in names], 0, 0.0)
    assert [text.replace("\\", "") for text in re.findall(r"^\| \[(.*?)\]\(", page, re.MULTILINE)] == [
        f"{'n' * 14}…{'n' * 15}",
        "resnet_50_with…0.1_and_seed_42",
        names[2],
        f"{('word-' * 6)[:29]}…{names[3][-30:]}",
    ]
    assert f"| {('loss' * 8)[:29]}… 1 |" in page


def test_a_sweep_is_a_row_with_its_trials_and_the_best_value(storage):
    store_sweep(storage, ending="completed")
    (row,) = [line for line in write_runs(storage.url, *read_runs(storage), now_s=0.0).splitlines() if line.startswith("| [")]
    assert row.startswith(f"| [digits]({page_url('flow-run', UUID(FLOW_RUN))}) | completed | 5 trials | loss 0.5 |  | 1 |")


def test_a_sweep_that_has_lost_an_entry_of_its_journal_hides_no_run(storage):
    run, _ = store_sweep(storage, ending="completed")
    run.storage.delete([list_parts(run)[1].key])
    page = write_runs(storage.url, *read_runs(storage), now_s=0.0)
    assert "| completed | 4 trials | loss 0.5 |" in page


def test_a_run_whose_records_cannot_be_read_hides_no_other(storage, caplog):
    leave_run(storage, "good", [1.0, 2.0])
    for name in ("odd_time", "odd_leader", "odd_history"):
        leave_run(storage, name, [1.0, 2.0])
    by_name = {name: CheckpointStore.open(storage, name) for name in ("odd_time", "odd_leader", "odd_history")}
    change_claim(by_name["odd_time"], claimed_at="x")
    change_claim(by_name["odd_leader"], owner={**asdict(Owner.current("x"))})
    (chunk,) = by_name["odd_history"].keys(by_name["odd_history"].layout.metrics)
    by_name["odd_history"].storage.put_bytes(chunk, b"{")
    page = write_runs(storage.url, *read_runs(storage), now_s=0.0)
    assert "| odd\\_leader | completed | 1 | loss 1 |" in page
    assert "[odd_history]" in page
    assert "[good]" in page
    assert "odd_time" not in page


def change_claim(store, **changes):
    """Change a claim as version 0.1 wrote it, without a digest."""
    (key,) = store.keys(store.layout.attempts)[:1]
    body = store.records.get_json(key)
    body.pop("digest", None)
    store.storage.put_bytes(key, json.dumps({**body, **changes}).encode())


def test_more_runs_than_rows_are_counted_and_slow_reads_leave_curves_out(storage, monkeypatch):
    for number in range(4):
        leave_run(storage, f"run-{number}", [1.0, 2.0])
    monkeypatch.setattr(runs_page, "_MAX_ROWS", 3)
    times = iter([0.0, 1.0, 9.0, 11.0])  # of a storage that is slow
    rows, num_left_out = read_runs(storage, clock=lambda: next(times))
    assert [(row.name, len(row.points)) for row in rows] == [("run-3", 2), ("run-2", 2), ("run-1", 0)]
    assert num_left_out == 1
    page = write_runs("/data/my runs", rows, num_left_out, 0.0)
    assert "Not shown: 1 other run; see `prefect-torch ls '/data/my runs'`" in page


def test_the_metrics_of_few_runs_are_read_at_once(storage, monkeypatch):
    """Those of 32 were, in 32 threads each: the end of a training took gigabytes, and far longer than the ten seconds."""
    for number in range(16):
        leave_run(storage, f"run-{number:02}", [1.0, 2.0])
    read, all_are_read = runs_page.read_history, threading.Condition()
    num_reading = most = 0

    def read_slowly(store, *, since):
        nonlocal num_reading, most
        with all_are_read:
            num_reading += 1
            most = max(most, num_reading)
            all_are_read.notify_all()
            all_are_read.wait_for(lambda: most > 4, 0.2)
            num_reading -= 1
        return read(store, since=since)

    monkeypatch.setattr(runs_page, "read_history", read_slowly)
    rows, _ = read_runs(storage)
    assert [len(row.points) for row in rows] == [2] * 16
    assert most <= 4


def test_of_very_many_runs_the_last_by_name_are_looked_at(storage, monkeypatch):
    for day in (1, 2, 3):
        leave_run(storage, f"2026-01-0{day}", [1.0, 2.0])
    monkeypatch.setattr(runs_page, "_MAX_RUNS", 2)
    rows, num_left_out = read_runs(storage)
    assert ([row.name for row in rows], num_left_out) == (["2026-01-03", "2026-01-02"], 1)


def test_a_storage_without_runs_has_no_page(storage):
    assert read_runs(storage) == ([], 0)


def test_a_line_needs_two_points_and_holds_forty():
    assert draw_sparkline([(0, 1.0)]) is None
    picture = ET.fromstring(draw_sparkline([(step, 1 / (step + 1)) for step in range(1000)]))
    assert len(picture[0].get("points").split()) <= 40


@pytest.mark.parametrize(("configured", "made"), [(7, 2), (0, 0)])
def test_an_end_does_not_wait_for_minutes_to_refresh_the_page(storage, monkeypatch, configured, made):
    tried = []
    monkeypatch.setattr(runs_page, "flow_run", SimpleNamespace(id=FLOW_RUN))
    monkeypatch.setattr(runs_page, "publish_runs", lambda *_, **__: tried.append(PREFECT_CLIENT_MAX_RETRIES.value()))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_CLIENT_MAX_RETRIES: configured}):
        runs_page.refresh_runs_page(storage)
    assert tried == [made]
