"""How long a resume takes from a bucket, from the choice of the checkpoint to the weights in memory.

    python tests/benchmarks/resume.py --peer CHECKOUT [--mib 2048] [--files 64] [--rounds 5]

The bucket is `rclone serve s3` on loopback, which shares this machine's cores. Each resume is a process of its own, timed after
its imports, and every round has one of each, in turn. Memory that nobody uses is touched before each, in another process: a
virtual machine's host takes back what is free, and a first touch would measure the host:

    folder     choose_checkpoint with verification of every byte, as_directory, torch.load of every file
    state      the same of a reported state, in one file: choose_checkpoint, load_state
    torch.load of every file, one after the other, got by obstore into memory; nothing is verified

Of "folder" and "state", once with this checkout and once with that at CHECKOUT (`git worktree add CHECKOUT REVISION`). Prints
seconds, the processor's seconds of the process and of the server, and the ratios of each round; writes them to
tests/benchmarks/results/resume.txt.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE / "state")]
from result_file import write_results  # noqa: E402 - found by the line above

KINDS = ("folder", "state", "torch.load")
_BACKED = 4  # times the checkpoint: its bytes in memory, twice, and in the page cache


def open_run(options, run):
    from prefect_torch.ckpt import CheckpointStore, StorageSpec

    return CheckpointStore.open(StorageSpec("s3://bucket", options), run)


def module(*names):
    """Return the first of `prefect_torch.ckpt`'s modules that the checkout has: a peer's may be at another place."""
    for name in names:
        if importlib.util.find_spec(f"prefect_torch.ckpt.{name.partition('.')[0]}") is not None:
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"prefect_torch.ckpt.{name}")
    return None


def choose(store, kept):
    """Choose as a leader does, keeping on this node what it reads, where the checkout can."""
    choose_checkpoint = module("runs.resume", "resume").choose_checkpoint
    node_copy = module("files.node_copy", "node_copy")
    if node_copy is None:
        return choose_checkpoint(store, lineage=1, verify="digest")
    copy = node_copy.NodeCopy()
    kept.callback(copy.release)
    return choose_checkpoint(store, lineage=1, verify="digest", prove=copy.verify)


def resume(kind, options):
    """Resume once, and print how long it took; runs in a process of its own."""
    import obstore
    import torch

    module("state.loading.load", "state.load", "state_load")  # imports are not timed
    torch.set_num_threads(1)
    store = open_run(options, "state" if kind == "state" else "folder")
    checked = 0.0
    state = {"w": torch.ones(int(os.environ["BENCHMARK_NUMEL"]))} if kind == "state" else {}  # a model has its weights before
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    with ExitStack() as kept:
        if kind == "torch.load":
            plain = (
                module("storage.object_store.backend", "storage.object_store", "obstore_storage")
                .ObstoreStorage("s3://bucket", options)
                ._store
            )
            for info in store.storage.list("folder/checkpoints/"):
                data = io.BytesIO(memoryview(obstore.get(plain, info.key).bytes()))
                checked += float(torch.load(data, weights_only=True)["w"][-1])
        elif kind == "folder":
            checkpoint = store.checkpoint(choose(store, kept))
            with checkpoint.as_directory() as directory:
                for path in sorted(Path(directory).iterdir()):
                    checked += float(torch.load(path, weights_only=True)["w"][-1])
        else:
            store.checkpoint(choose(store, kept)).load_state(state)
            checked = float(state["w"][-1])
        took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    print(json.dumps({"s": took_s, "cpu_s": cpu_s, "checked": checked}))


def fill(options, num_files, mib, scratch):
    """Report the folder and the state that are resumed."""
    import torch
    from prefect_torch.ckpt import Checkpoint
    from ranks import Attempt

    numel = mib * 2**20 // 4 // num_files
    folder = scratch / "folder"
    folder.mkdir()
    for number in range(num_files):
        torch.save({"w": torch.rand(numel)}, folder / f"shard-{number:03d}.pt")
    Attempt(open_run(options, "folder")).session().report({}, Checkpoint.from_directory(folder))
    shutil.rmtree(folder)
    session = Attempt(open_run(options, "state")).session()
    session.report({}, state={"w": torch.rand(numel * num_files)}, upload="sync")
    session.finish()


def packages_of(checkout, scratch):
    """Return a folder from which `prefect_torch.ckpt` is imported as it is at `checkout`."""
    package = scratch / "peer" / "prefect_torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ckpt").symlink_to(Path(checkout).resolve() / "ckpt")
    return str(package.parent)


def server_cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind, options, path, server_pid, numel, scratch):
    from processes import back_free_memory

    environment = {**os.environ, "PYTHONPATH": path, "BENCHMARK_NUMEL": str(numel), "TMPDIR": str(scratch)}
    back_free_memory(_BACKED * numel * 4)
    before_s = server_cpu_s(server_pid)
    command = [sys.executable, __file__, "--resume", kind, "--options", json.dumps(options)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    return {**json.loads(done.stdout), "server_cpu_s": server_cpu_s(server_pid) - before_s}


def child_named(name):
    """Return the id of this process's child `name`."""
    for pid in Path("/proc/self/task").glob("*/children"):
        for child in pid.read_text().split():
            if name in Path(f"/proc/{child}/cmdline").read_text().partition("\0")[0]:
                return int(child)
    raise LookupError(name)


def run(arguments):
    from servers import free_port, rclone_command, running

    with tempfile.TemporaryDirectory(prefix="resume-", dir=arguments.scratch) as folder:
        scratch = Path(folder)
        (scratch / "served/bucket").mkdir(parents=True)
        (scratch / "tmp").mkdir()
        port = free_port()
        with running(rclone_command(port, scratch / "served"), port) as server:
            fill(server.options(), arguments.files, arguments.mib, scratch)
            numel = arguments.mib * 2**20 // 4 // arguments.files * arguments.files
            paths = {"here": "", "peer": packages_of(arguments.peer, scratch)}
            who = [("folder", "here"), ("folder", "peer"), ("state", "here"), ("state", "peer"), ("torch.load", "here")]
            rounds = []
            for number in range(arguments.rounds + 1):  # the first warms the server's cache, and does not count
                found = {
                    of: measure(of[0], server.options(), paths[of[1]], child_named("rclone"), numel, scratch / "tmp")
                    for of in (who if number % 2 else reversed(who))
                }
                assert found["folder", "here"]["checked"] == found["folder", "peer"]["checked"]
                assert found["state", "here"]["checked"] == found["state", "peer"]["checked"]
                if number:
                    rounds.append(found)
                print(f"round {number}: " + ", ".join(f"{k} {w} {found[k, w]['s']:.1f} s" for k, w in who), flush=True)
    return rounds


def describe(rounds, arguments):
    def median(of, field="s"):
        return statistics.median(found[of][field] for found in rounds)

    peer = subprocess.run(
        ["git", "-C", arguments.peer, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    yield f"the checkout of the peer is {peer}; rclone serve s3 on the same cores"
    yield ""
    yield f"{'medians':24}{'seconds':>9}{'CPU':>8}{'server':>8}   seconds of each round"
    for of in rounds[0]:
        name = {"here": of[0], "peer": f"{of[0]} at {peer}"}[of[1]]
        each = " ".join(f"{found[of]['s']:.1f}" for found in rounds)
        yield f"{name:24}{median(of):9.2f}{median(of, 'cpu_s'):8.2f}{median(of, 'server_cpu_s'):8.2f}   {each}"
    yield ""
    for kind in ("folder", "state"):
        faster = [found[kind, "peer"]["s"] / found[kind, "here"]["s"] for found in rounds]
        share = [found[kind, "here"]["s"] / found["torch.load", "here"]["s"] for found in rounds]
        cpu = [_cpu_s(found[kind, "peer"]) / _cpu_s(found[kind, "here"]) for found in rounds]
        yield f"{kind}: {statistics.median(faster):.2f} times as fast as at {peer} ({_each(faster)})"
        yield f"{kind}: at {peer} {statistics.median(cpu):.2f} times the processor's time, of process and server ({_each(cpu)})"
        yield f"{kind}: {statistics.median(share):.2f} of the time of torch.load without verification ({_each(share)})"


def _cpu_s(found):
    return found["cpu_s"] + found["server_cpu_s"]


def _each(ratios):
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", help="where the bucket and the downloads lie")
    parser.add_argument("--resume", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume is not None:
        resume(arguments.resume, arguments.options)
        return
    if arguments.peer is None:
        parser.error("give --peer, a checkout to compare with")
    write_results("resume.txt", arguments.rounds, describe(run(arguments), arguments))


if __name__ == "__main__":
    main()
