"""What a person does and sees in Prefect's UI: real server, process worker, deployments of prefect.yaml, Debian's Chromium.

Screenshots are taken only into the folder that PREFECT_TORCH_SCREENSHOTS names: `make screenshots` renews those of the
documentation.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import uuid
from datetime import datetime, timedelta, timezone
from http import HTTPStatus
from pathlib import Path

import psutil
import pytest
import yaml
from forked_programs import Popen, run_program
from playwright.sync_api import Locator, Page, expect, sync_playwright
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import PrefectServer, rows, senders_follow, wait_until
from prefect_torch.flows import Result, RunConfig, SearchConfig, SweepResult, choice, sweep, uniform

CHROMIUM = shutil.which("chromium")
SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]
MARK = "STARTED_BY_A_BROWSER_TEST"  # of no prefix that forked ranks are given late
PATIENCE_MS = 60_000
SCREENSHOTS = os.environ.get("PREFECT_TORCH_SCREENSHOTS")
NUM_TRIALS = 12 if SCREENSHOTS else 8  # the fewest whose parameters have an importance

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs Debian's Chromium: apt install chromium"),
    pytest.mark.timeout(400),
]


class Stack:
    """A server with its UI, a process worker, and every deployment of prefect.yaml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.storage = folder / "checkpoints"
        # All deployments are scheduled as often as those just changed, of which a slow machine may miss one.
        self.server = PrefectServer(folder / "home", with_ui=True, PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="5")
        self._worker: Popen[bytes] | None = None

    def start(self) -> None:
        self.server.start()
        self._run("work-pool", "create", "--type", "process", "gpu-pool")
        soon = self._deploy()
        with (self.folder / "worker.txt").open("wb") as output:
            command = [prefect_program(), "worker", "start", "--pool", "gpu-pool", "--type", "process"]
            self._worker = Popen(command, cwd=self.folder, env=self._environment(), stdout=output, stderr=output)
        while self._first_scheduled() > soon + timedelta(seconds=1):  # a starved server passes over times gone by
            soon = self._deploy()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.send_signal(signal.SIGTERM)
            self._worker.wait(60)
        self.server.stop()

    def processes(self, flow_run_id: str) -> list[psutil.Process]:
        """Return the living processes of a flow run: those whose environment names it, and what they have started."""
        wanted = {MARK: self.mark, "PREFECT__FLOW_RUN_ID": flow_run_id}.items()
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if wanted <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                    found |= {process, *process.children(recursive=True)}
        return list(found)

    def story(self) -> str:
        """Return what Prefect knows and its worker said, for a wait that was in vain."""
        runs = [(run["name"], run["state_name"], run["expected_start_time"]) for run in rows(self.server.api, "flow_runs")]
        return f"{runs}\n{(self.folder / 'worker.txt').read_text()[-4000:]}"

    def _deploy(self) -> datetime:
        """Deploy all of prefect.yaml, and return when the nightly training should begin."""
        soon = datetime.now(timezone.utc) + timedelta(seconds=30)
        project = scheduled_at(soon, yaml.safe_load((ROOT / "prefect.yaml").read_text()), self.storage)
        (self.folder / "prefect.yaml").write_text(yaml.safe_dump(project))
        self._run("--no-prompt", "deploy", "--all")
        return soon

    def _first_scheduled(self) -> datetime:
        """Return for when the server has scheduled the nightly training first, once it has."""
        times: list[str] = []

        def are_known() -> bool:
            runs = rows(self.server.api, "flow_runs")
            times[:] = [run["expected_start_time"] for run in runs if run["auto_scheduled"] and is_nightly(run)]
            return bool(times)

        wait_until(are_known, self.story)
        return min(datetime.fromisoformat(time) for time in times)

    def _run(self, *arguments: str) -> None:
        done = run_program(
            [prefect_program(), *arguments],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PREFECT_API_URL": self.server.api,
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            MARK: self.mark,
        }


def prefect_program() -> str:
    return str(Path(sys.executable).with_name("prefect"))


def scheduled_at(time: datetime, project: dict, storage: Path) -> dict:
    """Let the nightly training begin at `time`, with a function of this machine that trains until it is ended."""
    nightly = next(entry for entry in project["deployments"] if entry["name"] == "train-nightly")
    nightly["parameters"].update(
        train_fn=f"{SUPPORT / 'seen_training.py'}:train_long",
        scaling={"num_workers": 2},
        run={"storage": str(storage), "name": "nightly"},
    )
    nightly["schedules"] = [{"interval": 86400, "anchor_date": time.isoformat(), "timezone": "UTC", "active": True}]
    return project


def is_nightly(flow_run: dict) -> bool:
    return flow_run["parameters"].get("run", {}).get("name") == "nightly"


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    started = Stack(tmp_path_factory.mktemp("stack"))
    try:
        started.start()
        with senders_follow(temporary_settings({PREFECT_API_URL: started.server.api})):
            yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def context(stack):
    """One Chromium for all tests, which loads and compiles each interface once."""
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        if SCREENSHOTS is None:  # the graph of a flow run is drawn by WebGL, which takes a core as long as its page is open
            options.append("--disable-software-rasterizer")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        looks = {"color_scheme": "light", "reduced_motion": "reduce"}
        opened = browser.new_context(viewport={"width": 1280, "height": 960}, **looks)
        opened.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield opened
        browser.close()


@pytest.fixture
def page(context):
    opened = context.new_page()
    yield opened
    opened.close()


@pytest.fixture
def shoot(page):
    def take(name: str) -> None:
        if SCREENSHOTS is not None:
            page.wait_for_timeout(1000)  # charts and fonts fade in
            page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")

    return take


def run_by_form(stack: Stack, page: Page, function: str, run: str, shoot) -> str:
    """Fill the Run form of `train`, submit it, and return the id of the one flow run that the server has made of it."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("train/train")
    page.goto(f"{stack.server.url}/v2/deployments/deployment/{deployment.id}/run")
    fill_form(page, f"{SUPPORT / 'seen_training.py'}:{function}", run, str(stack.storage))
    shoot("run-form")
    made = submitted(page, deployment.id)
    page.wait_for_url(re.compile("tab=Runs"))
    assert made["parameters"]["run"]["name"] == run
    known = [it["id"] for it in rows(stack.server.api, "flow_runs") if it["parameters"].get("run", {}).get("name") == run]
    assert known == [made["id"]]
    return made["id"]


def submitted(page: Page, deployment_id: uuid.UUID) -> dict:
    """Press Submit, again as a person would while SQLite answers that it is busy, and return the flow run made."""
    for _ in range(5):
        with page.expect_response(re.compile(f"/deployments/{deployment_id}/create_flow_run$")) as answered:
            page.get_by_role("button", name="Submit").click()
        if answered.value.status != HTTPStatus.SERVICE_UNAVAILABLE:
            break
        page.wait_for_timeout(1000)
    assert answered.value.ok, f"{answered.value.status}: {answered.value.text()}"
    return answered.value.json()


def fill_form(page: Page, train_fn: str, run: str, storage: str) -> None:
    """Fill the form once it shows the defaults of the flow, and see that it keeps what is filled in."""
    expect(page.get_by_role("spinbutton", name="Keep newest (Optional)")).to_have_value("1")
    values = {
        page.get_by_role("textbox", name="Training function"): train_fn,
        page.get_by_role("tabpanel", name="Number").get_by_role("spinbutton"): "2",  # the other choice is a range
        page.get_by_role("textbox", name="Run name (Optional)"): run,
        page.get_by_role("tabpanel", name="Path or URL").get_by_role("textbox"): storage,
        page.get_by_role("spinbutton", name="Keep best (Optional)"): "2",
        page.get_by_role("textbox", name="Score (Optional)"): "val_accuracy",
    }
    for box, value in values.items():
        box.fill(value)
    for box, value in values.items():
        expect(box).to_have_value(value)


def open_artifact(page: Page, key: str) -> None:
    """Open the newest artifact of `key` from the page of its flow run."""
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_role("link", name=re.compile(key)).click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()


def see_whole(pictures: Locator) -> None:
    """See that the browser can draw each of the pictures, of which it may have the first one before the others."""
    for picture in pictures.all():
        expect(picture).to_have_js_property("complete", True)
        assert picture.evaluate("it => it.naturalWidth") > 0


def test_a_training_is_started_in_the_form_watched_through_a_lost_rank_and_looked_at(stack, page, shoot):
    flow_run_id = run_by_form(stack, page, "train_once_more", "seen", shoot)
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{flow_run_id}")
    page.get_by_role("tab", name="Task Runs").click()
    for rank in ("rank-0", "rank-1"):
        expect(page.get_by_role("link", name=rank).first).to_be_visible()
    manifests = stack.storage / "seen/manifests"
    wait_until(lambda: manifests.exists() and any(manifests.glob("*.json")), "a first checkpoint")
    (rank,) = [it for it in stack.processes(flow_run_id) if is_rank(it, 1)]
    rank.kill()
    of_run = {"flow_run_id": {"any_": [flow_run_id]}}  # the page of a flow run that has ended meanwhile looks for no more lines
    wait_until(
        lambda: any("attempt 2: resuming from" in it["message"] for it in rows(stack.server.api, "logs", logs=of_run)),
        "the second attempt",
    )
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{flow_run_id}")
    expect(page.get_by_text(re.compile("attempt 2: resuming from"))).to_be_visible()
    page.get_by_role("tab", name="Task Runs").click()
    expect(page.get_by_role("link", name="rank-1")).to_have_count(2)  # one for each attempt
    shoot("flow-run")
    expect(page.get_by_text("Completed").first).to_be_visible()
    wait_until(lambda: flow_run_state(flow_run_id) == "Completed", "the end of the training")
    assert Result.from_storage(stack.storage, "seen").attempts == 2

    page.goto(f"{stack.server.url}/v2/runs/flow-run/{flow_run_id}")  # a page asks once for the artifacts
    open_artifact(page, "seen-[0-9a-f]{6}-checkpoints")
    for text in ("kept because", "latest", "best", "val_loss"):
        expect(page.get_by_text(re.compile(text)).first).to_be_visible()
    shoot("checkpoints")
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{flow_run_id}")
    open_artifact(page, "seen-[0-9a-f]{6}-summary")
    pictures = page.locator("img[src^='data:image/svg+xml']")
    expect(pictures.first).to_be_visible()
    see_whole(pictures)
    expect(page.get_by_text(re.compile("killed by SIGKILL")).first).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 1500})
    shoot("summary")


def test_a_scheduled_training_starts_on_its_own_is_seen_and_leaves_no_process_when_it_is_cancelled(stack, page):
    wait_until((stack.storage / "nightly/attempts").exists, stack.story)
    (scheduled,) = [run for run in rows(stack.server.api, "flow_runs") if is_nightly(run) and run["start_time"]]
    wait_until(lambda: any(is_rank(it, 1) for it in stack.processes(scheduled["id"])), "two ranks")
    wait_until(lambda: flow_run_state(scheduled["id"]) == "Running", "a flow run that is known to train")
    of_this_run = stack.processes(scheduled["id"])
    assert any(is_rank(it, 1) for it in of_this_run)
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{scheduled['id']}")
    expect(page.get_by_role("link", name="Deployment train-nightly")).to_be_visible()
    expect(page.get_by_text("Running").first).to_be_visible()
    page.get_by_role("button", name="Open menu").first.click()
    page.get_by_role("menuitem", name="Cancel").click()
    page.get_by_role("dialog").or_(page.get_by_role("alertdialog")).get_by_role(
        "button", name=re.compile("Cancel Run|Confirm|^Cancel")
    ).last.click()
    wait_until(lambda: flow_run_state(scheduled["id"]) == "Cancelled", "the end of the training")
    wait_until(
        lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in of_this_run),
        of_this_run,
    )
    assert "cancelled" in str(Result.from_storage(stack.storage, "nightly").error)


def test_a_sweep_is_seen_as_a_whole(stack, page, shoot, monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT))
    space = {"lr": uniform(0, 1), "optimizer": choice(["adam", "sgd"]), "width": choice([16, 32, 64])}
    search = SearchConfig(
        metric="loss", num_trials=NUM_TRIALS, max_concurrent=4, sampler="random", scheduler="asha", max_t=9, seed=2
    )
    run = RunConfig(name="searched", storage=str(stack.storage))
    sweep("sweep_trainings:climb", space, {"epochs": 10}, search, run=run)
    (flow_run,) = [it for it in rows(stack.server.api, "flow_runs") if "run:searched" in it["tags"]]
    assert re.fullmatch(rf"{NUM_TRIALS} trials, loss \S+ \(best of trial \d+\)", flow_run["state"]["message"])
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{flow_run['id']}")
    open_artifact(page, "searched-[0-9a-f]{6}-sweep")
    pictures = page.locator("img[src^='data:image/svg+xml']")
    expect(pictures).to_have_count(4)  # curves, best over time, parallel coordinates, importance
    see_whole(pictures)
    expect(page.get_by_role("cell", name="paused").first).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 1900})
    shoot("sweep")


def test_lists_and_logs_say_what_each_training_was_and_led_to(stack, page, shoot):
    """The runs list, the page of the storage and a flow run's state and logs, in both interfaces."""
    seen, searched = (
        next(run for run in rows(stack.server.api, "flow_runs") if f"run:{name}" in run["tags"])
        for name in ("seen", "searched")
    )
    assert re.fullmatch(r"8 steps, val_accuracy 0\.9375 \(best at 7\), 2 attempts", seen["state"]["message"])
    page.goto(f"{stack.server.url}/v2/runs")
    page.get_by_role("switch", name="Hide subflows").click()
    for name, tag in ((seen["name"], "run:seen"), (searched["name"], "run:searched")):
        expect(page.get_by_role("link", name=name)).to_be_visible()
        expect(page.get_by_text(tag, exact=True)).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 1500})
    shoot("runs")
    page.goto(f"{stack.server.url}/v2/runs/flow-run/{searched['id']}")
    open_artifact(page, "-runs")
    for name in ("seen", "nightly", "searched"):
        expect(page.get_by_role("cell", name=name).first).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 960})
    shoot("storage")
    for interface in ("/v2", ""):
        page.goto(f"{stack.server.url}{interface}/runs/flow-run/{seen['id']}?tab=Logs")
        expect(page.get_by_text(re.compile("attempt 2: resuming from")).first).to_be_visible()
        assert page.get_by_text(re.compile("Traceback")).count() == 0
        page.goto(f"{stack.server.url}{interface}/runs/flow-run/{seen['id']}?tab=Details")
        expect(page.get_by_text(seen["state"]["message"]).first).to_be_visible()


def test_a_notebook_shows_a_result_a_checkpoint_and_a_sweep(stack, page, shoot):
    """The HTML that they give to a notebook, on a page of a cell's width without a style of its own."""
    result = Result.from_storage(stack.storage, "seen")
    shown = [result, result.checkpoint, SweepResult.from_storage(stack.storage, "searched")]
    cells = "".join(f"<div style='padding: 16px; width: 900px'>{it._repr_html_()}</div>" for it in shown)
    for scheme, background, color in (("dark", "#111", "#ddd"), ("light", "white", "black")):
        page.emulate_media(color_scheme=scheme)
        page.set_content(f"<body style='background: {background}; color: {color}; font: 13px sans-serif'>{cells}</body>")
        for text in ("val_accuracy", result.checkpoint.id, "searched"):
            expect(page.get_by_text(re.compile(text)).first).to_be_visible()
    page.set_viewport_size({"width": 960, "height": page.evaluate("document.body.scrollHeight") + 16})
    shoot("notebook")  # of the light one


def test_the_server_recorded_all_that_trainings_told_it(stack):
    assert rows(stack.server.api, "flow_runs")
    assert stack.server.lost_events() == 0


def is_rank(process: psutil.Process, number: int) -> bool:
    """Tell a rank from others: a forked one by its title, a spawned one by its environment; a guard has a rank's command."""
    with contextlib.suppress(psutil.Error):
        arguments = " ".join(process.cmdline())
        is_forked = f"prefect_torch.tasks.rank.main rank={number} " in f"{arguments} "
        is_spawned = "prefect_torch.tasks.rank.main" in arguments and process.environ().get("RANK") == str(number)
        return "guard.py" not in arguments and (is_forked or is_spawned)
    return False


def flow_run_state(flow_run_id: str) -> str:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(uuid.UUID(flow_run_id)).state.name
