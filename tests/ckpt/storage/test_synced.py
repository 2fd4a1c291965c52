"""Directories that a command copies to where other machines reach them."""

import errno
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cloudpickle
import pytest
from prefect_torch.ckpt import CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, new_id
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import ended_by
from prefect_torch.ckpt.storage.synced.first_download import download_missing, download_run
from prefect_torch.ckpt.storage.synced.held_folders import HeldFolder
from prefect_torch.ckpt.storage.synced.storage import FOLDER, SyncedStorage
from prefect_torch.ckpt.storage.synced.transport import Transport, pickled_function
from prefect_torch.tasks import SyncConfig
from prefect_torch.tasks.options.sync import _LATE
from storage_contract import StorageContract

COPY = "cp -a --no-target-directory {source} {target}"
PATHS = "{source} {target}"
ONE_TRY = RetryPolicy(deadline_s=0, first_wait_s=0, longest_wait_s=0)


def transport(target: object, **changes) -> Transport:
    given = {"upload": COPY, "download": COPY, "period_s": "3600", "timeout_s": "30", "late": _LATE}
    return Transport(**{**given, **changes}, target=str(target))


def spec(root: Path, target: Path, **changes) -> StorageSpec:
    return StorageSpec(str(root), transport(target, **changes).options(), ONE_TRY)


def keys_below(root: Path) -> set[str]:
    return {str(it.relative_to(root)) for it in root.rglob("*") if it.is_file() and FOLDER not in it.relative_to(root).parts}


class TestSyncedStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        # Of two copies that create one directory at the same time, the second fails; an opened storage tries again.
        again = f"sh -c '{COPY} || exec {COPY}'"
        return SyncedStorage(tmp_path / "here", transport(tmp_path / "there", upload=again))

    @pytest.fixture
    def raw_keys(self, tmp_path):
        return lambda: keys_below(tmp_path / "here")


def commit(storage, run: str, step: int) -> Manifest:
    """Store a checkpoint as ranks do, in that order."""
    store = CheckpointStore.open(storage, run)
    manifest_id = new_id(1, step)
    data = store.layout.data(manifest_id, "model.pt")
    moved = store.storage.put_buffers(data, [memoryview(b"weights %d" % step)])
    files = (FileEntry("model.pt", moved.bytes, moved.digest, 0),)
    manifest = Manifest(manifest_id, step, 1, {"loss": 1.0}, files, 1, None, datetime.now(timezone.utc))
    store.storage.put_bytes(store.layout.manifest(manifest_id), manifest.encode())
    return manifest


def test_another_machine_reads_what_was_committed_after_a_download(tmp_path):
    one, other = (spec(tmp_path / name, tmp_path / "there") for name in ("one", "other"))
    for run in ("run", "sweep/trial-0001-0123abcd"):
        download_run(one, run)  # new: there is nothing to download, and that is no error
        manifest = commit(one, run, 3)
        assert CheckpointStore.open(other, run).latest() is None
        download_run(other, run)
        store = CheckpointStore.open(other, run)
        assert store.latest() == manifest
        store.verify(manifest)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_rsync_reaches_a_directory_on_an_ssh_server(sshd, tmp_path):
    login = f"-l {sshd.options()['username']} -p {sshd.port} -i {sshd.key}"
    ssh = f"ssh {login} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    ways = dict.fromkeys(("upload", "download"), f"rsync -a -e '{ssh}' {{source}} {{target}}")
    there = f"127.0.0.1:{tmp_path}/there"
    one, other = (StorageSpec(str(tmp_path / name), transport(there, **ways).options(), ONE_TRY) for name in ("one", "other"))
    open_storage(one).put_files({"run/a/x": _file(tmp_path, b"1"), "run/b/y": _file(tmp_path, b"2")})
    download_run(other, "run")
    assert open_storage(other).get_bytes("run/b/y") == b"2"


def _file(folder: Path, data: bytes) -> Path:
    path = folder / data.decode()
    path.write_bytes(data)
    return path


@pytest.fixture
def importable(monkeypatch):
    """Return a function that gives another one a name by which it is imported: pickled, its lists would be copies."""

    def named(function) -> str:
        module = ModuleType("uploads_of_this_test")
        module.upload = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:upload"

    return named


def test_every_node_uploads_its_own_files_and_the_manifest_comes_last(tmp_path, importable):
    uploads = []

    def record(source: str, target: str) -> None:
        uploads.append(sorted(keys_below(Path(source))))
        shutil.copytree(source, target, dirs_exist_ok=True)

    nodes = [spec(tmp_path / name, tmp_path / "there", upload=importable(record)) for name in ("one", "two")]
    storages = [open_storage(node) for node in nodes]
    for number, storage in enumerate(storages):
        storage.put_bytes("run/metrics/1.jsonl", b"{}")
        storage.put_buffers(f"run/checkpoints/x/{number}", [memoryview(b"shard")])
    storages[0].put_bytes("run/manifests/x.json", b"{}")
    assert uploads == [
        ["run/checkpoints/x/0", "run/metrics/1.jsonl"],  # what may come late goes along
        ["run/checkpoints/x/1", "run/metrics/1.jsonl"],
        ["run/manifests/x.json"],
    ]
    download_missing(nodes[1], "run", ["run/checkpoints/x/0"])
    assert storages[1].get_bytes("run/checkpoints/x/0") == b"shard"


def test_a_failed_upload_leaves_the_previous_checkpoint_the_latest_and_its_output_in_the_log(tmp_path, caplog):
    good = spec(tmp_path / "here", tmp_path / "there")
    previous = commit(good, "run", 1)
    program = "import sys; print('disk quota exceeded'); sys.exit(3)"
    bad = spec(tmp_path / "here", tmp_path / "there", upload=f'{sys.executable} -c "{program}" {{source}} {{target}}')
    key = f"run/manifests/{new_id(1, 2)}.json"
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match=r"failed 2 times .* exited with 3 .*disk quota"):
        open_storage(bad).put_bytes(key, b"{}")
    logged = [record.getMessage() for record in caplog.records]
    assert [text.endswith("its output:\ndisk quota exceeded") for text in logged] == [True, True]
    assert not (tmp_path / "here" / key).exists()
    assert CheckpointStore.open(good, "run").latest() == previous
    assert not list((tmp_path / "here" / FOLDER).iterdir())
    with pytest.raises(StorageError, match="exited with 3"):  # what it cannot get might be newer than what it has
        download_run(bad, "run")


@pytest.mark.parametrize("password", ["s3cr3t", "s3/cr3t"])
def test_the_log_of_a_failed_command_shows_no_login_of_its_target(tmp_path, caplog, password):
    """As of a tool that takes it in a URL, and may print it; the log is Prefect's, too."""
    failing = "sh -c 'echo from $0 to $1; exit 1' {source} {target}"
    storage = open_storage(spec(tmp_path / "here", f"sftp://me:{password}@host/x", upload=failing))
    with pytest.raises(StorageError, match=r"exited with 1 .* to sftp://host/x") as caught:
        storage.put_bytes("run/x", b"1")
    assert "sftp://host/x exited with 1" in caplog.text
    assert "cr3t" not in caplog.text + str(caught.value)


def test_a_command_that_fails_once_is_tried_again(tmp_path):
    tried = tmp_path / "tried"
    flaky = f"sh -c 'test -e {tried} && exec {COPY}; touch {tried}; exit 1'"
    open_storage(spec(tmp_path / "here", tmp_path / "there", upload=flaky)).put_bytes("run/x", b"1")
    assert (tmp_path / "there/run/x").read_bytes() == b"1"


def test_a_hanging_command_is_killed_with_its_processes(tmp_path):
    hanging = "sh -c 'sleep 1000 & echo {source} {target}; wait'"
    for timeout_s in ("0.5", "5", "30"):  # a shell may need longer to say something
        storage = open_storage(spec(tmp_path / "here", tmp_path / "there", upload=hanging, timeout_s=timeout_s))
        with pytest.raises(StorageError, match=r"killed by signal 9 after \d+\.\d s: ") as caught:
            storage.put_bytes("run/x", b"1")
        assert not (tmp_path / "here/run/x").exists()
        if said := str(caught.value).partition(" s: ")[2]:
            break
    assert "/there" in said


@pytest.mark.parametrize("is_function", [False, True])
def test_a_download_ends_with_the_check_of_its_context_and_a_command_is_killed(tmp_path, is_function):
    pid, begun = tmp_path / "pid", []
    hanging = f"sh -c 'echo $$ > {pid}; sleep 1000' {PATHS}"
    if is_function:
        hanging = pickled_function(cloudpickle.dumps(lambda source, target: threading.Event().wait(60)))

    def check():
        begun.append(None)
        if len(begun) > 3 and (is_function or (pid.exists() and pid.read_text().endswith("\n"))):
            raise InterruptedError("over")

    with ended_by(check), pytest.raises(InterruptedError, match="over"):
        download_run(spec(tmp_path / "here", tmp_path / "there", download=hanging, timeout_s="600"), "run")
    if not is_function:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_a_process_that_a_command_leaves_behind_is_not_waited_for(tmp_path):
    """Such as a connection that further commands share, with the command's output open."""
    pid, ended = tmp_path / "pid", tmp_path / "ended"
    leaving = f"sh -c \"setsid sh -c 'sleep 15; touch {ended}' & echo $! > {pid}; exec {COPY}\""
    open_storage(spec(tmp_path / "here", tmp_path / "there", upload=leaving)).put_bytes("run/x", b"1")
    assert not ended.exists()
    group = int(pid.read_text())
    while os.getpgid(group) != group:  # until setsid has made it
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    assert (tmp_path / "there/run/x").read_bytes() == b"1"


def test_a_hanging_or_failing_function_ends_the_put(tmp_path):
    hanging, failing = (pickled_function(cloudpickle.dumps(it)) for it in (hang, fail))
    for way, timeout_s, problem in ((hanging, "0.1", "has not returned after 0.1 s"), (failing, "30", "raised OSError")):
        storage = open_storage(spec(tmp_path / "here", tmp_path / "there", upload=way, timeout_s=timeout_s))
        with pytest.raises(StorageError, match=problem):
            storage.put_bytes("run/x", b"1")


def test_the_error_of_a_partial_has_none_of_its_data(tmp_path):
    failing = pickled_function(cloudpickle.dumps(partial(fail_with, login="secret")))
    storage = open_storage(spec(tmp_path / "here", tmp_path / "there", upload=failing))
    with pytest.raises(StorageError, match=r"fail_with\('.*raised OSError") as caught:
        storage.put_bytes("run/x", b"1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("password", ["s3cr3t", "s3/cr3t"])
def test_the_error_of_a_function_shows_no_login_of_its_target(tmp_path, password):
    for way, timeout_s, problem in ((hang, "0.1", "has not returned"), (fail, "30", "raised OSError.*no sftp://host/x")):
        failing, target = pickled_function(cloudpickle.dumps(way)), f"sftp://me:{password}@host/x"
        storage = open_storage(spec(tmp_path / "here", target, upload=failing, timeout_s=timeout_s))
        with pytest.raises(StorageError, match=rf"sftp://host/x'\) {problem}") as caught:
            storage.put_bytes("run/x", b"1")
        assert "cr3t" not in str(caught.value)


def fail_with(source, target, login):
    fail(source, target)


def hang(source, target):
    threading.Event().wait(5)


def fail(source, target):
    raise OSError(f"no {target}")


def test_a_command_that_is_not_installed_is_said_at_once(tmp_path):
    storage = open_storage(spec(tmp_path / "here", tmp_path / "there", upload="no-such-tool {source} {target}"))
    with pytest.raises(ValueError, match=r"no-such-tool .* cannot be started.*every node needs it"):
        storage.put_bytes("run/x", b"1")


def test_a_command_that_cannot_be_started_for_the_moment_is_tried_again(tmp_path, monkeypatch):
    tried = []

    def start(*arguments, **options):
        tried.append(arguments)
        if len(tried) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return started(*arguments, **options)

    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    policy = RetryPolicy(deadline_s=60, first_wait_s=0, longest_wait_s=0)
    open_storage(replace(spec(tmp_path / "here", tmp_path / "there"), retry=policy)).put_bytes("run/x", b"1")
    assert len(tried) == 2
    assert keys_below(tmp_path / "there") == {"run/x"}


@pytest.mark.parametrize("run", ["run", "metrics", "sweep/trial-0000-0123abcd"])
def test_only_a_runs_metrics_its_logs_and_its_hint_may_come_late_whatever_its_name_is(run):
    late = [f"{run}/{key}" for key in ("metrics/000001-000000001-0001.jsonl", "logs/000001/rank-0.000000.log", "latest.json")]
    at_once = ["manifests/x.json", "attempts/x.json", "evaluation-code/metrics/x.zip", "checkpoints/x/metrics/a", "run.json"]
    at_once += ["evaluation-logs/logs/x/rank-0.000000.log", "checkpoints/x/logs/a"]
    moved = transport("there")
    assert [moved.is_late(key) for key in late] == [True, True, True]
    assert [key for key in at_once if moved.is_late(f"{run}/{key}")] == []


def test_the_logs_of_all_ranks_are_uploaded_together_with_what_comes_next(tmp_path, importable):
    uploads = []
    way = importable(lambda source, _: uploads.append(sorted(keys_below(Path(source)))))
    run = CheckpointStore.open(spec(tmp_path / "here", tmp_path / "there", upload=way), "run")
    logs = LogFiles(run, run.layout.logs(1))
    for rank in range(4):
        logs.append(rank, ["a line"])
    logs.flush()
    stored = sorted(run.keys(run.layout.logs(1)))
    assert uploads == []
    run.storage.put_bytes("run/outcomes/000001.json", b"{}")
    assert len(stored) == 4
    assert uploads == [[*stored, "run/outcomes/000001.json"]]


def test_metrics_are_uploaded_after_the_period_at_the_latest(tmp_path, importable):
    uploaded = threading.Event()
    way = importable(lambda *_: uploaded.set())
    storage = open_storage(spec(tmp_path / "here", tmp_path / "there", upload=way, period_s="0.01"))
    storage.put_bytes("run/metrics/1.jsonl", b"{}")
    assert uploaded.wait(30)


def leave_late(here, key):
    """Put an object that waits for an upload in a process that is killed then, and return the directory that it leaves."""
    program = """if True:
        import os, pickle, signal, sys
        from prefect_torch.ckpt.storage.backends import open_spec
        spec, key = pickle.load(sys.stdin.buffer)
        open_spec(spec).put_bytes(key, b"{}")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", program], input=pickle.dumps((here, key)), check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = (Path(here.url) / FOLDER).glob("late/*/*")
    return left


@pytest.mark.parametrize("pid", [None, os.getppid(), os.getpid()], ids=["its", "another's", "own"])
def test_metrics_that_a_killed_process_left_are_uploaded_with_the_first_upload_of_the_next(tmp_path, pid):
    """Whoever has its id now: in another container, or after a restart of its own, somebody else may."""
    here, key = spec(tmp_path / "here", tmp_path / "there"), "run/metrics/1.jsonl"
    left = leave_late(here, key)
    left.rename(left.with_name(f"{pid or left.name.partition('-')[0]}-0"))
    open_storage(here).put_bytes("run/manifests/x.json", b"{}")
    assert key in keys_below(tmp_path / "there")
    assert not [it for it in (tmp_path / "here" / FOLDER).rglob("*") if it.is_file()]


def test_what_another_process_takes_over_at_the_same_time_ends_no_upload(tmp_path, monkeypatch):
    """As of the ranks of several trainings, whose first uploads come together."""
    here, scandir = spec(tmp_path / "here", tmp_path / "there"), os.scandir
    left = leave_late(here, "run/metrics/1.jsonl")

    def scan_then_lose(place):
        entries = scandir(place)
        if str(place) == str(left):
            left.rename(tmp_path / "taken")
        return entries

    monkeypatch.setattr(os, "scandir", scan_then_lose)
    open_storage(here).put_bytes("run/manifests/x.json", b"{}")
    assert (tmp_path / "taken").exists()
    assert "run/manifests/x.json" in keys_below(tmp_path / "there")


def test_the_last_lines_of_ranks_are_uploaded_at_their_end(tmp_path):
    here = spec(tmp_path / "here", tmp_path / "there")
    store = CheckpointStore.open(here, "run")
    files = LogFiles(store, store.layout.logs(1))
    files.append(0, ["the end"])
    files.close()
    assert keys_below(tmp_path / "there") == {"run/logs/000001/rank-0.000000.log"}


@pytest.mark.parametrize("pid", [os.getppid(), 999_999_999], ids=["known here", "of another container"])
def test_metrics_that_wait_in_another_process_are_left_to_it(tmp_path, pid):
    here, key = spec(tmp_path / "here", tmp_path / "there"), "run/metrics/1.jsonl"
    open_storage(here).put_bytes(key, b"{}")
    (own,) = (tmp_path / "here" / FOLDER).glob("late/*/*")
    own.rename(own.with_name(f"{pid}-0"))
    open_storage(replace(here, options=transport(tmp_path / "there", period_s="60").options())).put_bytes("run/x", b"{}")
    assert keys_below(tmp_path / "there") == {"run/x"}


@pytest.mark.parametrize("period_s", [0, 3600])
def test_metrics_whose_upload_failed_are_uploaded_again_after_a_pause_whatever_the_period(tmp_path, monkeypatch, period_s):
    started = []

    class Timer(SimpleNamespace):
        def __init__(self, interval, function):
            super().__init__(interval=interval, function=function, start=lambda: started.append(self))

    monkeypatch.setattr(threading, "Timer", Timer)
    failing = transport(tmp_path / "there", upload=pickled_function(cloudpickle.dumps(fail)), period_s=str(period_s))
    SyncedStorage(tmp_path / "here", failing).put_bytes("run/metrics/1.jsonl", b"{}")
    started[0].function()
    started[1].function()
    assert [timer.interval for timer in started] == [period_s, *[max(period_s, 10)] * 2]


@pytest.mark.parametrize("template", ["rsync -a {source} host:", "rsync -a . {target}", "rsync", "", "aws s3 sync {target}"])
@pytest.mark.parametrize("field", ["upload", "download"])
def test_a_template_without_source_and_target_is_refused_at_once(template, field):
    ways = {"upload": "rsync -a {source} {target}", "download": "rsync -a {source} {target}", field: template}
    with pytest.raises(ValueError, match=r"the command has no \{(source|target)\}"):
        SyncConfig(**ways, target="host:/checkpoints")


def test_what_a_killed_upload_has_left_is_removed(tmp_path):
    """It has second names of files, which would not be freed when they are pruned."""
    storage = SyncedStorage(tmp_path / "here", transport(tmp_path / "there"))
    staged = tmp_path / "here" / FOLDER
    live, new, left = (HeldFolder.make(staged) for _ in range(3))
    in_container = live.path.rename(staged / "999999999-live")  # whose ids of processes are unknown here
    (staged / "not-ours").mkdir()
    new.release()
    left.release()
    for folder in (in_container, left.path, staged / "not-ours"):
        (folder / "big").write_bytes(b"x")
        os.utime(folder, (1, 1))
    (staged / "download.lock").touch()
    storage.remove_interrupted("run/", 60)
    assert {it.name for it in staged.iterdir()} == {in_container.name, new.path.name, "not-ours", "download.lock"}
    live.release()
