"""Which tests run first, and the servers that they share."""

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import forked_programs
import pytest
from _pytest.assertion import rewrite
from hypothesis import settings
from prefect_home import prepared_home
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import Transfer
from servers import (
    ACCESS_KEY,
    SECRET_KEY,
    START_S,
    AzureServer,
    S3Server,
    SshServer,
    free_port,
    program,
    rclone_command,
    running,
)

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect_servers import PrefectServer

settings.register_profile("unhurried", deadline=None)  # a loaded machine is no defect
settings.load_profile("unhurried")

# The files that take longest, by their time on two cores. Before them run those that need none of Prefect's servers, which take
# a twentieth of a core each as long as they live, and after them the other files that need them.
LONGEST = (
    "flows/test_training.py",
    "flows/test_killed_flow.py",
    "flows/test_server_away.py",
    "flows/test_blocks.py",
    "test_readme.py",
    "flows/test_chaos.py",
    "flows/test_engines.py",
    "flows/test_machines.py",
    "flows/monitoring/pages/test_pages.py",
    "deployments/test_execution.py",
    "deployments/test_automations.py",
    "deployments/test_lost_leases.py",
    "browser/test_user_interface.py",
    "ckpt/storage/test_storage.py",
)
SERVERLESS = ("ckpt/", "tasks/")
# What --quick leaves out: the above, whatever needs a server, and files that start many processes or try very many cases.
SERVERS = {"azurite", "built", "moto", "password_server", "prefect_server", "rclone", "s3rver", "seaweedfs", "site", "sshd"}
SLOW = {
    *LONGEST,
    "ckpt/lightning/test_lightning.py",
    "ckpt/lightning/test_ranks.py",
    "ckpt/reporting/test_checkpoint_directory.py",
    "ckpt/reporting/test_node.py",
    "ckpt/runs/test_foreign_objects.py",
    "ckpt/runs/test_interleavings.py",
    "ckpt/state/test_consolidated_models.py",
    "ckpt/state/test_device_copies.py",
    "ckpt/state/test_device_streams.py",
    "ckpt/state/test_processes.py",
    "ckpt/state/test_random_state.py",
    "ckpt/state/test_sharded_models.py",
    "ckpt/state/test_simulated_gpu.py",
    "ckpt/state/test_zero.py",
    "ckpt/storage/test_cloud_specs.py",
    "ckpt/storage/test_listings.py",
    "ckpt/storage/test_probe.py",
    "ckpt/storage/test_synced.py",
    "ckpt/test_accelerate.py",
    "ckpt/test_crash_points.py",
    "ckpt/test_exact_resume.py",
    "ckpt/test_framework_folders.py",
    "ckpt/test_ray_examples.py",
    "ckpt/transformers/test_transformers.py",
    "deployments/doctor/test_cluster_checks.py",
    "deployments/doctor/test_doctor.py",
    "deployments/doctor/test_gpu_checks.py",
    "deployments/ray/test_migrate_check.py",
    "deployments/test_command_line.py",
    "deployments/test_deploy.py",
    "tasks/gang/test_fork_servers.py",
    "tasks/gang/test_gathering.py",
    "tasks/gang/test_gpus.py",
    "tasks/gang/test_link.py",
    "tasks/gang/test_slurm.py",
    "tasks/prepare/test_batch_streams.py",
    "tasks/prepare/test_data_loader.py",
    "tasks/prepare/test_model.py",
    "tasks/prepare/test_resumable_loader.py",
    "tasks/rank/test_cpu_pickle.py",
    "test_docs.py",
    "test_forked_programs.py",
    "test_gpu_results.py",
    "test_layers.py",
    "test_loggers.py",
    "test_malformed_inputs.py",
    "test_packaging.py",
    "test_ray_behaviours.py",
    "test_root.py",
    "test_state_benchmark.py",
}

# With more threads than cores, one that waits for another must not keep it from its core.
NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests that start servers or many processes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Have three workers for two cores: tests wait for processes and servers for a third of their time."""
    return len(os.sched_getaffinity(0)) * 3 // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers: what they and the programs of their tests import is then imported once, not twice in each worker.

    With --quick they start no programs, and import little more than half of it.
    """
    os.environ.update(NO_SPINNING)
    if not config.getoption("--quick"):
        subprocess.Popen = forked_programs.Popen
        forked_programs.program_server()  # its imports go on meanwhile
    _compile_tests(config)


def _compile_tests(config: pytest.Config) -> None:
    """Store what pytest makes of tests and of its plugins: else each worker makes it, for half of the time before a first test.

    Also where no bytecode is to be written, as in many containers: there each would make it every time.
    """
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None:  # --assert=plain
        return
    own = (file for file in Path(__file__).parent.rglob("*.py") if file.name == "conftest.py" or file.name.startswith("test_"))
    for file in {*own, *state.hook._rewritten_names.values()}:
        compiled = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        # What is warned of, or cannot be compiled, is left to a worker, in which a warning is an error of that file.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(compiled.parent):
                source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source, compiled)


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker start programs as any other process of tests does, and nobody look for garbage while it imports tests."""
    if config.getoption("numprocesses", None) is None:  # else workers import them
        gc.disable()
    if hasattr(config, "workerinput"):
        forked_programs.start_as_usual()
    else:
        _trust_one_authority(config)


def _trust_one_authority(config: pytest.Config) -> None:
    """Have Prefect, not imported yet, read one certificate for each client: all that there are take 20 ms."""
    folder = tempfile.TemporaryDirectory(prefix="prefect-torch-tls-")
    config.add_cleanup(folder.cleanup)
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    authority = Path(folder.name, "authority.pem")
    authority.write_text(first + end)
    os.environ["SSL_CERT_FILE"] = str(authority)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, leave out slow files before their imports, which take longer than the tests of many another."""
    is_slow = config.getoption("--quick") and collection_path.relative_to(Path(__file__).parent).as_posix() in SLOW
    return True if is_slow else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files early enough that no worker is left with one in the end; with --quick, leave out what is slow."""
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if _is_slow(item)])
        items[:] = [item for item in items if not _is_slow(item)]
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Have no collection of garbage look at what the imports have made, which takes a tenth of a worker's time otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # as in programs of tests


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _is_slow(item: pytest.Item) -> bool:
    return _name(item) in SLOW or not SERVERS.isdisjoint(getattr(item, "fixturenames", ()))


def _place(item: pytest.Item) -> tuple[bool, int]:
    name = _name(item)
    is_long = name in LONGEST
    return is_long or not name.startswith(SERVERLESS), LONGEST.index(name) if is_long else len(LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Empty fsspec's memory filesystem: it is one dictionary for all tests, and each listing looks through all of it."""
    memory = sys.modules.get("fsspec.implementations.memory")
    if memory is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session", autouse=True)
def nothing_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no test find the developer's AWS profile or Prefect database, ask a cloud's metadata, or fail on a slow machine."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this in the background has it ignored
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "PREFECT_API_"))]:
            patch.delenv(name)
        patch.setenv(
            "PREFECT_HOME", str(prepared_home(tmp_path_factory.mktemp("prefect")))
        )  # of the processes that tests start
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")  # embedded servers would reach beyond loopback
        # A server imports every collection of blocks when it starts, for half of its time; saving a block registers it, too.
        patch.setenv("PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION", "false")
        patch.setenv("PREFECT_SERVER_REGISTER_BLOCKS_ON_START", "false")
        patch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
        yield


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty run in a local folder."""
    return CheckpointStore.open(tmp_path / "store", "run")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's folder for temporary files, and so for downloads: empty, and the test's own."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    return tmp_path / "node"


@pytest.fixture
def uploads_may_go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that every upload to a local folder waits for."""
    put_file, put_files, go_on = LocalStorage.put_file, LocalStorage.put_files, threading.Event()

    def wait_until_told(self: LocalStorage, key: str, path: Path) -> Transfer:
        assert go_on.wait(30)
        return put_file(self, key, path)

    def wait_with_all(self: LocalStorage, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        assert go_on.wait(30)
        return put_files(self, files, owned=owned)

    monkeypatch.setattr(LocalStorage, "put_file", wait_until_told)
    monkeypatch.setattr(LocalStorage, "put_files", wait_with_all)
    return go_on


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: more would only wait for each other on small models, and add up in another order."""
    import torch  # noqa: PLC0415 - most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def password_server(request, tmp_path) -> Iterator[tuple[str, str]]:
    """Yield the place and the password of a real server for the protocol `request.param`, whose user is "me"."""
    port, password = free_port(), "s3cr3t-word"
    command = [program("rclone"), "serve", request.param, "--user", "me", "--pass", password, "--config", os.devnull]
    (tmp_path / "served").mkdir()
    with subprocess.Popen([*command, "--addr", f"127.0.0.1:{port}", tmp_path / "served"], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                    break
                assert process.poll() is None, f"rclone ended with {process.returncode}"
                assert time.monotonic() < deadline, "rclone does not answer"
                time.sleep(0.05)
            yield f"127.0.0.1:{port}/data", password
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory) -> Iterator[SshServer]:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if program is None:
        assert "CI" not in os.environ, "sshd is not installed: apt-get install openssh-server"
        pytest.skip("sshd is not installed (Debian: openssh-server)")
    if os.getuid() == 0:  # sshd confines a part of itself there; Debian's service makes it
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder, port = tmp_path_factory.mktemp("sshd"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    lines = (
        f"ListenAddress 127.0.0.1:{port}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        *("StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no", "UsePAM no", "PidFile none"),
        "Subsystem sftp internal-sftp",
    )
    (folder / "config").write_text("\n".join(lines))
    command = [program, "-D", "-e", "-h", folder / "host", "-f", folder / "config"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                    break
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, "sshd does not answer"
                time.sleep(0.05)
            yield SshServer(port, folder / "user")
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["PrefectServer"]:
    """The one Prefect server of all tests that need some: a second one around it would have its clients by turns only."""
    from prefect_servers import server_in_use  # noqa: PLC0415 - it imports Prefect and torch, and most tests do without

    # What it would look for every few seconds, and no test that uses it has: runs due by a schedule, lost leases and the like.
    unneeded = ["CANCELLATION_CLEANUP", "CLEANUP_RECONCILER", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "REPOSSESSOR"]
    services = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in [*unneeded, "SCHEDULER"]}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.1")  # else each event is known after 5 s
        yield stack.enter_context(server_in_use(tmp_path_factory.mktemp("server"), **services))


@pytest.fixture
def client(prefect_server: "PrefectServer") -> Iterator["SyncPrefectClient"]:
    """A client of `prefect_server`."""
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - most tests do without

    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    port = free_port()
    with running([program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], port) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory) -> Iterator[S3Server]:
    port = free_port()
    with running(rclone_command(port, tmp_path_factory.mktemp("rclone")), port) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory) -> Iterator[S3Server]:
    """SeaweedFS, which lists folder for folder: `a/x` before `a.json`."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    users = [{"name": "test", "credentials": [identity], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    with contextlib.ExitStack() as started:
        for tries_left in reversed(range(3)):
            try:
                storage = started.enter_context(_weed(folder))
            except AssertionError:  # of its eight ports, one was taken before it came to it
                if not tries_left:
                    raise
            else:
                break
        yield storage


def _weed(folder: Path) -> contextlib.AbstractContextManager[S3Server]:
    s3, *others = (free_port() for _ in range(8))
    names = ("master.port", "volume.port", "filer.port", *(f"{it}.port.grpc" for it in ("master", "volume", "filer", "s3")))
    options = [f"-{name}={port}" for name, port in zip(names, others, strict=True)]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", "-master.telemetry=false"]
    options += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock", "-volume.max=1000"]
    server = ["server", "-s3", "-ip=127.0.0.1", f"-dir={folder}", f"-s3.config={folder}/users.json", f"-s3.port={s3}", *options]
    one_volume = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}  # a bucket has volumes of its own, seven at first if not told
    return running([program("weed"), *server], s3, **one_volume)


@pytest.fixture(scope="session")
def s3rver(tmp_path_factory) -> Iterator[S3Server]:
    """s3rver, which lists folder for folder, and goes on after a page by whole keys."""
    program = Path(sys.prefix, "s3rver/node_modules/s3rver/bin/s3rver.js")
    if not program.exists():
        assert "CI" not in os.environ, f"{program} is missing: make s3rver"
        pytest.skip(f"{program} is missing: make s3rver installs it where there is npm")
    port = free_port()
    command = ["node", "--openssl-legacy-provider", str(program)]  # its tokens between pages are encrypted with DES
    options = ["-d", str(tmp_path_factory.mktemp("s3rver")), "-a", "127.0.0.1", "-p", str(port), "-s", "--no-vhost-buckets"]
    with running([*command, *options], port) as server:
        yield replace(server, access_key="S3RVER", secret_key="S3RVER")  # it knows no other


@pytest.fixture(scope="session")
def azurite(tmp_path_factory) -> Iterator[AzureServer]:
    """Azurite, which speaks Azure Blob Storage."""
    program = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
    if not program.exists():
        assert "CI" not in os.environ, f"{program} is missing: make azurite"
        pytest.skip(f"{program} is missing: make azurite installs it where there is npm")
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path_factory.mktemp("azurite"))]
    # Its telemetry would try to reach beyond loopback, again and again: that takes 3 % of a core as long as it lives.
    options += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    with running(["node", str(program), *options], port) as server:
        yield AzureServer(server.endpoint)
