"""What Prefect's UI is given of one real run: a training with a restart, and a later flow run that continues it."""

import base64
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from forked_programs import run_program
from prefect_servers import PrefectServer, rows
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows.monitoring.pages.live_artifact import artifact_key
from prefect_torch.tasks.training.backoff import FIRST_PAUSE_S, Backoff

SUPPORT = Path(__file__).parents[3] / "support"
REQUEST = re.compile(r'"(?P<verb>GET|POST|PATCH|PUT|DELETE) /api(?P<path>/[^ ?]*)\S* HTTP/1.1" (?P<status>\d+)')
KEEPS_TWO = {"num_to_keep": 2, "checkpoint_score_attribute": "deep/loss", "checkpoint_score_order": "min"}

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Seen:
    """What a server knows after two flow runs of one run.

    Attributes:
        store: The run.
        flow_runs: The ids, oldest first.
        artifacts: Its artifacts by flow run and the end of the key.
        task_runs: The ids of the ranks' task runs, by flow run.
        requests: How often the first flow run asked for what.
        lasted_s: How long it took.
        log: What the server said.
        lost_events: How many it has given up to write.

    """

    store: CheckpointStore
    flow_runs: list[str]
    artifacts: dict[tuple[str, str], dict]
    task_runs: dict[str, list[str]]
    requests: Counter
    lasted_s: float
    log: str
    lost_events: int

    def artifact(self, flow_run, kind):
        return self.artifacts[self.flow_runs[flow_run], kind]

    def page(self, flow_run=0):
        return self.artifact(flow_run, "summary")["data"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "INFO")  # a line for each request
        server = PrefectServer(folder / "home")
        server.start()
    try:
        started_s = time.monotonic()
        train(folder, server.api, reports=1000)
        lasted_s = time.monotonic() - started_s
        requests = count_requests(server.output())
        time.sleep(1)  # less between two flow runs is not worth a word on the page
        train(folder, server.api, reports=1010)
        flow_runs = sorted(rows(server.api, "flow_runs"), key=lambda it: it["start_time"])
        ranks = [it for it in rows(server.api, "task_runs") if it["name"].startswith("rank-")]
        return Seen(
            CheckpointStore.open(folder / "store", "run"),
            [it["id"] for it in flow_runs],
            {(it["flow_run_id"], it["key"].rpartition("-")[2]): it for it in rows(server.api, "artifacts")},
            {it["id"]: [rank["id"] for rank in ranks if rank["flow_run_id"] == it["id"]] for it in flow_runs},
            requests,
            lasted_s,
            server.output(),
            server.lost_events(),
        )
    finally:
        server.stop()


def train(folder, api, reports):
    config = {"reports": reports, "dies_at": 550}
    done = run_program(
        [sys.executable, str(SUPPORT / "run_training.py"), str(folder / "store"), "often_reporting:report_often",
         json.dumps(config), "{}", json.dumps(KEEPS_TWO)],
        env={**os.environ, "PREFECT_API_URL": api, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "not up to date" not in done.stderr


def count_requests(log):
    return Counter((match["verb"], match["path"].split("/")[1]) for match in REQUEST.finditer(log))


def test_a_thousand_reports_of_two_ranks_cost_few_requests_besides_logs(seen):
    """However fast reports come, pages are published as seldom as test_live_artifact proves for a hundred seconds."""
    besides = {what: count for what, count in seen.requests.items() if what[1] not in ("logs", "health")}
    assert besides[("POST", "flow_runs")] >= 1  # else nothing was counted
    assert sum(besides.values()) < 200, besides
    most = publications(seen.lasted_s) + 1
    assert besides[("POST", "artifacts")] + besides[("PATCH", "artifacts")] >= 3, "a page that begins late is not changed"
    assert besides[("PATCH", "artifacts")] <= 3 * most


def publications(seconds):
    now_s = [0.0]
    backoff, count = Backoff(clock=lambda: now_s[0]), 0
    while now_s[0] < seconds:
        backoff.record()
        count += 1
        now_s[0] += max(backoff.wait_s(), FIRST_PAUSE_S)
    return count


def test_the_server_records_all_that_a_training_tells_it(seen):
    """SQLite may refuse any transaction that has read before it writes: the client asks again, and is answered."""
    answers = {(match["verb"], match["path"]): int(match["status"]) for match in REQUEST.finditer(seen.log)}  # the last ones
    assert {request: status for request, status in answers.items() if status >= 500} == {}
    assert seen.lost_events == 0


def test_each_flow_run_has_one_artifact_of_each_kind_under_the_keys_of_the_run(seen):
    kinds = {"progress": "progress", "checkpoints": "table", "summary": "markdown", "runs": "markdown"}
    assert {key: it["type"] for key, it in seen.artifacts.items()} == {
        (flow_run, name): kind for flow_run in seen.flow_runs for name, kind in kinds.items()
    }
    key = artifact_key("run", seen.store.path)
    assert all(it["key"].startswith(f"{key}-") for (_, kind), it in seen.artifacts.items() if kind != "runs")
    assert len({it["key"] for (_, kind), it in seen.artifacts.items() if kind == "runs"}) == 1, "the storage has one page"


def test_the_progress_ends_at_a_hundred_percent(seen):
    assert [seen.artifact(flow_run, "progress")["data"] for flow_run in (0, 1)] == [100, 100]


def test_the_table_has_what_is_in_storage_and_why(seen):
    saved = json.loads(seen.artifact(1, "checkpoints")["data"])
    assert [row["id"] for row in saved] == [it.id for it in reversed(seen.store.list())]
    assert [row["kept because"] for row in saved] == ["latest, best", "best"]
    assert list(saved[0])[:4] == ["id", "step", "kept because", "deep/loss"]
    assert saved[0]["deep/loss"] == "4.5856e-05"
    assert saved[0]["size"] == "6 B"


def test_the_summary_shows_curves_that_the_ui_draws(seen):
    curves, bar = (ET.fromstring(picture) for picture in pictures(seen.page()))
    words = ["".join(it.itertext()).strip() for it in curves.iter("{http://www.w3.org/2000/svg}text")]
    assert {"accuracy", "odd  1 not finite", "#2", "0.999"} <= set(words)
    assert words[0] == "deep/loss  log"  # what ranks checkpoints comes first
    assert any(text.text.startswith("training ") for text in bar.iter("{http://www.w3.org/2000/svg}text"))
    assert len(seen.page()) < 60_000


def pictures(page):
    return [base64.b64decode(it) for it in re.findall(r"\(data:image/svg\+xml;base64,([^)]*)\)", page)]


def test_the_summary_tells_attempts_with_reasons_and_where_they_resumed(seen):
    page = seen.page()
    assert re.search(r"\*\*completed\*\* · attempt 2 · step 999 · \S+ steps/s · 100% done · goodput", page)
    first, second = (row(page, attempt) for attempt in (1, 2))
    assert first[4:] == ["fresh start", "0 to 549", "failed"]
    assert second[4:] == ["step 499, attempt 1", "500 to 999", "completed"]
    assert "- attempt 1: infrastructure: rank 1 of attempt 1 failed: its process was killed by SIGKILL (9)" in page


def row(page, attempt):
    (line,) = re.findall(rf"^\| {attempt} \|.*$", page, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_summary_links_to_the_logs_of_all_ranks(seen):
    linked = re.findall(r"\[rank \d\]\(http://127.0.0.1:\d+/runs/task-run/([0-9a-f-]*)\)", seen.page())
    assert sorted(linked) == sorted(seen.task_runs[seen.flow_runs[0]])
    assert len(linked) == 4


def test_a_later_flow_run_shows_the_whole_run(seen):
    page = seen.page(1)
    assert [row(page, attempt)[5:] for attempt in (1, 2, 3)] == [
        ["0 to 549", "failed"],
        ["500 to 999", "completed"],
        ["1000 to 1009", "completed"],
    ]
    assert "passed between flow runs" in page
    led = re.findall(r"^- attempt (\d):.* \[flow run\]\(http://127.0.0.1:\d+/runs/flow-run/([0-9a-f-]*)\)$", page, re.MULTILINE)
    first, second = seen.flow_runs
    assert led == [("3", second), ("2", first), ("1", first)]
    curves = pictures(page)[0].decode()
    assert "#2" in curves
    assert "#3" in curves
