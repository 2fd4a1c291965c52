"""How long a resume takes from a bucket, from the choice of the checkpoint to the weights in memory.

    python tests/benchmarks/resume.py [--mib 2048] [--files 64] [--rounds 5]

The bucket is `rclone serve s3` on loopback, which shares this machine's cores. Each resume is a process of its own, timed after
its imports, and every round has one of each, in turn. Memory that nobody uses is touched before each, in another process: a
virtual machine's host takes back what is free, and a first touch would measure the host:

    folder     choose_checkpoint with verification of every byte, as_directory, torch.load of every file
    state      the same of a reported state, in one file: choose_checkpoint, load_state
    torch.load of every file, one after the other, got by obstore into memory; nothing is verified

Prints seconds, those of the processor in the process and in the server, and the ratios to torch.load; writes them to
tests/benchmarks/results/resume.txt.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE / "state")]
from result_file import write_results  # noqa: E402 - found by the line above

KINDS = ("folder", "state", "torch.load")
_BACKED = 4  # times the checkpoint: its bytes in memory, twice, and in the page cache


def open_run(options, run):
    from prefect_torch.ckpt import CheckpointStore, StorageSpec

    return CheckpointStore.open(StorageSpec("s3://bucket", options), run)


def resume(kind, options):
    """Resume once, and print how long it took; runs in a process of its own."""
    import obstore.store
    import prefect_torch.ckpt.state.loading.load  # noqa: F401 - imports are not timed
    import torch
    from prefect_torch.ckpt.files.node_copy import NodeCopy
    from prefect_torch.ckpt.runs.resume import choose_checkpoint

    torch.set_num_threads(1)
    store = open_run(options, "state" if kind == "state" else "folder")
    checked = 0.0
    state = {"w": torch.ones(int(os.environ["BENCHMARK_NUMEL"]))} if kind == "state" else {}  # a model has its weights before
    copy = NodeCopy()  # what the leader has read stays on this machine
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    if kind == "torch.load":
        bucket = obstore.store.from_url("s3://bucket", config=options, client_options={"allow_http": True})
        files = [it["path"] for page in obstore.list(bucket, "folder/checkpoints/") for it in page]
        for path in sorted(path for path in files if path.endswith(".pt")):
            data = io.BytesIO(memoryview(obstore.get(bucket, path).bytes()))
            checked += float(torch.load(data, weights_only=True)["w"][-1])
    else:
        checkpoint = store.checkpoint(choose_checkpoint(store, lineage=1, verify="digest", prove=copy.verify))
        if kind == "folder":
            with checkpoint.as_directory() as directory:
                for path in sorted(Path(directory).iterdir()):
                    checked += float(torch.load(path, weights_only=True)["w"][-1])
        else:
            checkpoint.load_state(state)
            checked = float(state["w"][-1])
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    copy.release()
    assert kind != "state" or checked < 1  # it is one of torch.rand now
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


def server_cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind, options, server_pid, numel, scratch):
    from processes import back_free_memory

    environment = {**os.environ, "BENCHMARK_NUMEL": str(numel), "TMPDIR": str(scratch)}
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
            rounds = []
            for number in range(arguments.rounds + 1):  # the first warms the server's cache, and does not count
                found = {
                    kind: measure(kind, server.options(), child_named("rclone"), numel, scratch / "tmp")
                    for kind in (KINDS if number % 2 else reversed(KINDS))
                }
                assert found["folder"]["checked"] == found["torch.load"]["checked"]
                if number:
                    rounds.append(found)
                print(f"round {number}: " + ", ".join(f"{kind} {found[kind]['s']:.1f} s" for kind in KINDS), flush=True)
    return rounds


def describe(rounds):
    yield "rclone serve s3 on the same cores"
    yield ""
    yield f"{'medians':12}{'seconds':>9}{'CPU':>8}{'server':>8}   seconds of each round"
    for kind in KINDS:
        s, cpu_s, server_cpu_s = (
            statistics.median(found[kind][field] for found in rounds) for field in ("s", "cpu_s", "server_cpu_s")
        )
        each = " ".join(f"{found[kind]['s']:.1f}" for found in rounds)
        yield f"{kind:12}{s:9.2f}{cpu_s:8.2f}{server_cpu_s:8.2f}   {each}"
    yield ""
    for kind in ("folder", "state"):
        share = [found[kind]["s"] / found["torch.load"]["s"] for found in rounds]
        yield f"{kind}: {statistics.median(share):.2f} of the time of torch.load without verification ({_each(share)})"


def _each(ratios):
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    write_results("resume.txt", arguments.rounds, describe(run(arguments)))


if __name__ == "__main__":
    main()
