"""The documentation is true: it builds, its names, arguments and commands exist, its training functions run and resume."""

import ast
import importlib
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from playwright.sync_api import sync_playwright
from prefect_torch.ckpt import Checkpoint, CheckpointStore, Manifest, TrainContext
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.deployments.command_line.program import prefect_torch as command_line
from prefect_torch.flows import (
    CheckpointConfig,
    DaskCluster,
    FailureConfig,
    Hosts,
    KubernetesCluster,
    RayCluster,
    Result,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
)
from ranks import Attempt

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCKS = [
    pytest.param(code, id=f"{page}:{number}")
    for page, text in PAGES.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), start=1)
]
PROGRAMS = {
    match[1]: match[0]
    for block in BLOCKS
    if (match := re.match(r"# (\S+\.py)\n.*", str(block.values[0]), re.DOTALL)) is not None
}
# tests/test_loggers.py kills and resumes these.
LOGGED = {"with_mlflow.py", "with_tensorboard.py", "with_wandb.py"}
TRAININGS = [name for name, code in PROGRAMS.items() if "def train_fn(" in code and name not in LOGGED]
# tests/test_readme.py runs their like on Prefect's server, and tests/flows/sweeps/test_sweeping.py the sweep.
NEED_A_SERVER = {"fail.py", "run.py", "schedule.py", "sweep_line.py"}
COMMANDS = sorted(
    {line[2:].partition("#")[0].strip() for text in PAGES.values() for line in text.splitlines() if line[:2] == "$ "}
)
MODULES = [importlib.import_module(f"prefect_torch.{name}") for name in ("ckpt", "deployments", "flows", "tasks")]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}
# What pages call the objects of our classes.
INSTANCES = {
    "checkpoint": Checkpoint,
    "context": TrainContext,
    "get_checkpoint()": Checkpoint,
    "get_context()": TrainContext,
    "manifest": Manifest,
    "result": Result,
    "store": CheckpointStore,
}


def test_pictures_are_shown_and_small():
    pictures = list((ROOT / "docs/images").iterdir())
    assert sum(picture.stat().st_size for picture in pictures) < 600_000
    assert [picture.name for picture in pictures if not any(f"images/{picture.name}" in text for text in PAGES.values())] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the pages with every warning an error: a link that leads nowhere is one."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_every_page_is_built_and_can_be_found(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= pages
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f"- {page}\n" not in navigation] == []


@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs Debian's Chromium: apt install chromium")
def test_a_site_on_a_disk_is_searched_without_a_network(site):
    asked, errors = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.route(re.compile("^https?:"), lambda route: (asked.append(route.request.url), route.abort()))
        page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 - Playwright marks what it is given
        page.goto(f"{site.as_uri()}/index.html")
        page.get_by_role("textbox", name="Search").fill("torchrun")
        page.locator(".md-search-result__link", has_text="Coming from torchrun").first.click()
        page.wait_for_url(re.compile(r"/how-to/from-torchrun\.html"))
        browser.close()
    assert (asked, errors) == ([], [])


def test_a_wide_screen_shows_more_of_a_line_of_code(site):
    assert 'href="../stylesheets/wide.css"' in (site / "how-to/lightning.html").read_text()
    assert (site / "stylesheets/wide.css").exists()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_shown_as_one(site, page):
    """A fence that the site's Markdown does not know is shown as text, and what is in it as prose."""
    text = re.sub(
        r"<(pre|code)[ >].*?</\1>", "", (site / page.removesuffix(".md")).with_suffix(".html").read_text(), flags=re.DOTALL
    )
    assert "```" not in text


def test_links_to_sources_lead_to_pages_of_them(site):
    assert 'href="source/ckpt/reporting/commit.py.html"' in (site / "design.html").read_text()
    assert "def commit" in re.sub("<[^>]+>", "", (site / "source/ckpt/reporting/commit.py.html").read_text())


def test_the_reference_has_every_public_name(site):
    reference = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    assert [name for name in PUBLIC if not re.search(rf'id="prefect_torch\.\w+\.{name}"', reference)] == []


def test_the_reference_has_what_classes_inherit(site):
    names = [f"ckpt.CheckpointStore.{name}" for name in ("open", "get", "path_of", "pinned")]
    for cluster in (DaskCluster, Hosts, KubernetesCluster, RayCluster, SlurmCluster):
        names += [f"flows.{cluster.__name__}.{field}" for field in cluster.model_fields if field != "kind"]
    reference = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    assert [name for name in names if f'id="prefect_torch.{name}"' not in reference] == []


def test_the_reference_says_what_settings_mean(site):
    flows = re.sub(r"<[^>]+>|\s+", " ", (site / "reference/flows.html").read_text())
    for config in (ScalingConfig, RunConfig, CheckpointConfig, FailureConfig):
        for name, field in config.model_fields.items():
            assert " ".join((field.description or "").split()[:5]) in flows, name
    assert "shown_as" not in flows  # what forms need


def test_the_messages_that_a_page_explains_are_those_of_the_program():
    """What varies ends a part of a message, and the program may put a part together from two."""
    sources = (path.read_text() for wing in ("ckpt", "deployments", "flows", "tasks") for path in (ROOT / wing).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(sources))
    table = PAGES["how-to/crash-recovery.md"].partition("## What the messages mean")[2].partition("\n## ")[0]
    messages = [it for row in table.splitlines() for it in re.findall("`([^`]* [^`]*)`", row.partition(" | ")[0])]
    assert len(messages) > 20
    parts = {it.strip(" :,;.=-") for message in messages for it in re.split(r"[…()']|\d+|\b[A-Z]{3,}\b", message)}
    assert {it for it in parts if len(it) >= 12 and not _is_in(code, it)} == set()


def _is_in(code, text):
    words = text.split(" ")
    halves = ((" ".join(words[:it]), " ".join(words[it:])) for it in range(len(words)))
    return any(first in code and second in code for first, second in halves)


WORKER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # other tests may have left it ignored, or blocked, for what this process starts
signal.pthread_sigmask(signal.SIG_SETMASK, ())
while True:  # as a worker that is given another flow run whenever one has ended
    engine = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "-m", "prefect.engine"])
    print("begun", flush=True)
    engine.wait()
"""


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs procps")
def test_a_worker_takes_nothing_while_its_unit_ends_its_flows(tmp_path):
    (line,) = re.findall(r"^ExecStop=(.*)", PAGES["how-to/crash-recovery.md"], re.MULTILINE)
    (tmp_path / "worker.py").write_text(WORKER)
    worker = subprocess.Popen(
        [sys.executable, str(tmp_path / "worker.py")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for name in ("pkill", "pgrep"):  # of this worker's session alone: other tests run flows, too
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} --session {worker.pid} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAINPID": str(worker.pid)}
    try:
        assert worker.stdout.readline() == "begun\n"
        subprocess.run(shlex.split(line), env=environment, check=True, timeout=60)
        worker.terminate()
        worker.send_signal(signal.SIGCONT)
        assert worker.wait(60) == -signal.SIGTERM
        assert worker.stdout.read() == ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.stdout.close()
        worker.wait(60)


@pytest.mark.parametrize("code", BLOCKS)
def test_names_and_arguments_exist(code):
    tree = ast.parse(code)
    if "import ray" in code:
        return
    names = {**PUBLIC, **_imported(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := INSTANCES.get(ast.unparse(node.value))) is not None:
            assert hasattr(owner, node.attr) or node.attr in getattr(owner, "__dataclass_fields__", {}), ast.unparse(node)
        if isinstance(node, ast.Call):
            _check_call(node, names)


def test_the_training_of_readme_gets_the_config_that_it_reads():
    """A block that is copied beside that `my_training.py` trains."""
    read = set(re.findall(r'config\["(\w+)"\]', (ROOT / "README.md").read_text()))
    calls = [
        ast.unparse(node)
        for block in BLOCKS
        for node in ast.walk(ast.parse(str(block.values[0])))
        if isinstance(node, ast.Call) and "my_training:train_fn" in [getattr(it, "value", None) for it in node.args]
    ]
    assert len(calls) > 10
    assert read == {"epochs", "lr"}
    others = [call for call in calls if not call.startswith("sweep(") and "config=config" not in call]  # a space, a variable
    assert [call for call in others if not all(f"'{name}'" in call for name in read)] == []


@pytest.mark.parametrize("file", ["README.md", "docs/how-to/schedule.md", "prefect.yaml"])
def test_a_nightly_training_from_scratch_keeps_the_best_of_other_nights(file):
    text = (ROOT / file).read_text()
    assert re.search(r"resume(=\"|: )never", text)
    policies = re.findall(r"num_to_keep(?:=|: )3\b[^)}]*", text)
    assert policies
    assert [it for it in policies if "checkpoint_score_attribute" not in it] == [], "the newest are those of this night"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "how-to/from-ray-train.md"])
def test_what_prose_calls_exists(page):
    for code in re.findall(r"(?<!`)`([A-Za-z_][\w.]*\([^`]*\))`", PAGES[page]):
        try:
            call = ast.parse(code, mode="eval").body
        except SyntaxError:  # with arguments left out
            continue
        if isinstance(call, ast.Call) and call.keywords:
            _check_call(call, PUBLIC, partial=True)
    prose = re.sub(r"\]\(https?:[^)]*\)", "]", PAGES[page])  # the addresses of other projects' pages have names of theirs
    for config, field in re.findall(r"\b(\w+Config)\.(\w+)", prose):
        assert field in PUBLIC[config].model_fields, f"{config}.{field}"


def _imported(tree):
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefect_torch"):
            module = importlib.import_module(node.module)
            imported.update({alias.asname or alias.name: getattr(module, alias.name) for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):  # a page's own
            imported[node.name] = None
    return imported


def _check_call(call, names, *, partial=False):
    function = _resolve(call.func, names)
    if function is None or any(isinstance(it, ast.Starred) for it in call.args) or any(it.arg is None for it in call.keywords):
        return
    signature = inspect.signature(getattr(function, "fn", function))
    try:
        (signature.bind_partial if partial else signature.bind)(*call.args, **{it.arg: it.value for it in call.keywords})
    except TypeError as exc:
        pytest.fail(f"{ast.unparse(call)}: {exc}")


def _resolve(node, names):
    """Return our function that `node` names, or None, as of a value: bound where it is a method."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        if (owner := INSTANCES.get(ast.unparse(node.value))) is not None:
            member = getattr(owner, node.attr)
            return member.__get__(object()) if inspect.isfunction(member) else None
        if (owner := _resolve(node.value, names)) is not None:
            return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("prefect-torch ")])
def test_commands_exist_with_their_options(command):
    _, name, *arguments = shlex.split(command)
    found = command_line.get_command(None, name)
    assert found is not None
    found.make_context(name, arguments)


def test_make_knows_its_targets():
    for command in COMMANDS:
        if command.startswith("make "):
            subprocess.run(["make", "--dry-run", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)


def test_every_program_is_run():
    assert set(PROGRAMS) == {*TRAININGS, *LOGGED, *NEED_A_SERVER, "use.py", "my_evaluation.py"}


@pytest.fixture(scope="module")
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning")  # of Lightning about its workers, and about torch
@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_resume(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a framework writes its own files
    store = CheckpointStore.open(tmp_path, "run")
    train_fn = _load(name)["train_fn"]
    first = _train(train_fn, store, 1)
    second = _train(train_fn, store, 3)
    assert first
    assert second
    assert first[-1] < second[0] == store.list()[-len(second)].step


@pytest.mark.usefixtures("process_group")
def test_what_was_trained_can_be_used_and_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore.open("./checkpoints", "line")
    _train(_load("line.py")["train_fn"], store, 100)
    _load("use.py")
    weight, bias = capsys.readouterr().out.split()[-2:]
    assert (float(weight), float(bias)) == (pytest.approx(3, abs=0.1), pytest.approx(1, abs=0.1))
    start_session(Attempt(store).session())
    try:
        metrics = _load("my_evaluation.py")["measure"]({})
    finally:
        start_session(None)
    assert metrics["error"] < 0.1


def _load(name):
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(PROGRAMS[name], name, "exec"), module)
    return module


def _train(train_fn, store, epochs):
    """Run one attempt of a single rank in this process, and return the steps that it reported."""
    attempt = Attempt(store)
    session = attempt.session()
    start_session(session)
    try:
        train_fn({"epochs": epochs})
        session.finish()
    finally:
        start_session(None)
    return [event.record.step for event in attempt.events() if isinstance(event, ReportEvent) and not event.record.is_logged]


def test_the_comparison_begins_with_where_others_are_better_and_leaves_no_question_out():
    """The marks are "not checked" and "none"; an empty cell would say neither."""
    page = PAGES["which-one.md"]
    assert re.findall(r"^## (.*)", page, re.MULTILINE)[0] == "Where others are better"
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert header[1:] == ["gangs", "reports", "retention", "resume", "preemption", "sweeps", "user interface"]
    peers = ["Ray Train", "Metaflow", "Flyte", "Kubeflow Trainer", "SkyPilot", "Determined", "Lightning alone", "Composer"]
    assert [row[0] for row in rows] == ["prefect-torch", *peers]
    assert all(len(row) == len(header) and all(row) for row in rows)
    better = page.partition("## At a glance")[0]
    assert [name for name in peers if f"**[{name.removesuffix(' alone')}]" not in better] == []
