"""What latest, list, prune, commit and the start of an attempt cost with many checkpoints and many ranks.

    python tests/benchmarks/scaling.py [--quick] [--latency-ms 20]

Checkpoints: a run of 10, 1,000 and 100,000 checkpoints of two files each, kept by `keep_every_n_steps`. Requests are counted as
an object store has them, a thousand objects in one answer to a listing; each takes 20 ms, so the times are those of a bucket
with that latency. Then the same on `rclone serve s3` through a proxy that counts what goes over the wire, without latency.

    latest         of a reader; without the hint, which the leader writes after every commit, besides
    list, best     of a reader: every manifest
    start          of an attempt, as its leader does it: claim, choose what to restore, and begin the books
    next prune     of a training, after a commit, with one checkpoint to drop
    prune          by anybody else, once
    garbage        to look for data that nobody committed: once in ten minutes of a training
    result         `Result.from_storage`

Ranks: one report of a checkpoint, a file a rank, through rank 0's real session and a real TCPStore, with a storage that answers
at once. The other ranks are played: what they would write to the TCPStore is written before, and their puts are added.

    report, finish  how long rank 0 takes for the report, and at the end of its function, once all have come
    state plan      how long it takes to decide who writes what of a state of 300 tensors, when that has changed
    all ranks ask   how many requests a second the other ranks together make to the TCPStore while they wait for rank 0,
                    measured at one of them

Prints a table, and writes it to tests/benchmarks/results/scaling.txt.
"""

import argparse
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from counting_storage import CountingStorage  # noqa: E402 - here and below: found by the line above, or as the others are
from memory_storage import MemoryStorage  # noqa: E402
from prefect_torch.ckpt import Checkpoint, CheckpointStore, RetentionPolicy, TrainContext  # noqa: E402
from prefect_torch.ckpt.reporting import agreement  # noqa: E402
from prefect_torch.ckpt.reporting.agreement import Intent  # noqa: E402
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit  # noqa: E402
from prefect_torch.ckpt.reporting.rank_part import RankPart  # noqa: E402
from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt  # noqa: E402
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt  # noqa: E402
from prefect_torch.ckpt.runs.attempts.owner import Owner  # noqa: E402
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage  # noqa: E402
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, lost_records  # noqa: E402
from prefect_torch.ckpt.runs.index.reading import read_manifests  # noqa: E402
from prefect_torch.ckpt.runs.index.writer import IndexWriter  # noqa: E402
from prefect_torch.ckpt.runs.manifest import (  # noqa: E402
    FileEntry,
    Manifest,
    ManifestMemory,
    new_id,
)
from prefect_torch.ckpt.runs.resume import choose_checkpoint  # noqa: E402
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage  # noqa: E402
from prefect_torch.ckpt.text import utc_now  # noqa: E402
from prunes import prune_as_leader  # noqa: E402
from ranks import Session  # noqa: E402
from result_file import write_results  # noqa: E402

DIGEST = "0" * 32
POLICY = RetentionPolicy(1, "loss", "min", keep_every_n_steps=2)  # steps are even, but for one that may go
SHORT = {"get_bytes": "GET", "put_bytes": "PUT", "put_file": "PUT", "size": "HEAD", "list": "LIST", "delete": "DELETE"}


def fill(storage, count, attempt=1):
    """Write `count` checkpoints as a training would have, straight into `storage`."""
    store = CheckpointStore.open(storage, "run")
    claim_attempt(store, Owner.current(), world_size=2)
    ids, history = [], HistoryWriter(store, attempt)
    for number in range(count):
        ids.append(new_id(attempt, 2 * number))
        files = tuple(FileEntry(f"__{rank}_0.distcp", 4, DIGEST, rank) for rank in range(2))
        for file in files:
            storage.put_bytes(store.layout.data(ids[-1], file.path), b"data")
            put_manifest(store, ids[-1], 2 * number, files, 1 / (number + 1))
        history.append(MetricRecord(attempt, 2 * number, {"loss": 1 / (number + 1)}, ids[-1], utc_now()))
    history.flush()
    store.hint_latest(ids[-1])
    writer, listed = IndexWriter(store), store.listed()
    while writer.repair(listed):
        pass


def put_manifest(store, checkpoint_id, step, files, loss):
    now = datetime.now(timezone.utc)
    manifest = Manifest(checkpoint_id, step, int(checkpoint_id[:6]), {"loss": loss}, files, 2, None, now)
    store.storage.put_bytes(store.layout.manifest(checkpoint_id), manifest.encode())


def start_attempt(store):
    """Do to storage what a leader does before its ranks run; return what its prunes remember."""
    attempt = claim_attempt(store, Owner.current(), world_size=2, lineage=1)
    choose_checkpoint(store, lineage=1, verify="size")
    listed = list(store.listed())
    lost_records(store, listed, attempt.number)
    memory = ManifestMemory()
    read_manifests(replace(store, memory=memory), listed)
    return memory


def start_keeping_all(store):
    attempt = claim_attempt(store, Owner.current(), world_size=2, lineage=1)
    choose_checkpoint(store, lineage=1, verify="size")
    lost_records(store, list(store.listed()), attempt.number)


def operations(store):
    """Yield what is measured, by name."""
    from prefect_torch.flows import Result

    yield "latest", store.latest
    hint = store.storage.get_bytes(store.layout.latest)
    store.storage.delete([store.layout.latest])
    yield "latest, no hint", store.latest
    store.storage.put_bytes(store.layout.latest, hint)
    yield "list", store.list
    yield "best", lambda: store.best(3, "loss", "min")
    yield "start, all kept", lambda: start_keeping_all(store)
    memories = []
    yield "start, best kept", lambda: memories.append(start_attempt(store))
    extra = new_id(newest_attempt(store).number, 2 * 10**7 + 1)
    put_manifest(store, extra, 2 * 10**7 + 1, (), 5.0)
    put_manifest(store, new_id(newest_attempt(store).number, 2 * 10**7 + 2), 2 * 10**7 + 2, (), 6.0)
    yield "next prune", lambda: prune_as_leader(replace(store, memory=memories[0]), POLICY)
    yield "prune", lambda: prune_as_leader(store, POLICY)
    yield "garbage", lambda: collect_garbage(store)
    yield "result", lambda: Result.from_storage(store.storage, "run")


def told(requests):
    short = Counter()
    for verb, number in requests.items():
        short[SHORT.get(verb, verb)] += number
    return ", ".join(f"{number} {verb}" for verb, number in sorted(short.items()) if verb != "remove_interrupted")


def measure_checkpoints(counts, latency_s, show):
    show(f"\ncheckpoints, every request {latency_s * 1e3:g} ms")
    for count in counts:
        inner = MemoryStorage()
        fill(inner, count)
        counting = CountingStorage(inner, latency_s)
        store = CheckpointStore.open(counting, "run")
        for name, operate in operations(store):
            counting.taken()
            started = time.perf_counter()
            operate()
            took = time.perf_counter() - started
            requests = counting.taken()
            show(f"{count:>7}  {name:<17} {requests.total():>7} requests {took:>8.2f} s   {told(requests)}")


@contextmanager
def counting_proxy(port: int) -> Iterator[tuple[int, Counter]]:
    """Pass bytes on to `port`, counting the requests in them by method."""
    requests: Counter = Counter()
    begins = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) (/\S*) HTTP/1\.1\r\n")

    def pump(source, target, counts):
        with ExitStack() as cleanup:
            cleanup.callback(target.close)
            while data := source.recv(1 << 16):
                for method, path in begins.findall(data) if counts else ():
                    is_listing = method == b"GET" and b"list-type" in path
                    requests["LIST" if is_listing else "DELETE" if b"?delete" in path else method.decode()] += 1
                target.sendall(data)

    def quietly(*args):
        try:
            pump(*args)
        except OSError:  # the other end is gone
            return

    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=quietly, args=(client, server, True), daemon=True).start()
            threading.Thread(target=quietly, args=(server, client, False), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], requests
    finally:
        listener.close()


def measure_s3(counts, show):
    from servers import ACCESS_KEY, SECRET_KEY, free_port, rclone_command, running

    show("\ncheckpoints on rclone serve s3, requests as they go over the wire, no latency")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
            fill(UnsyncedStorage(Path(folder, "bucket")), count)
            port = free_port()
            cleanup.enter_context(running(rclone_command(port, Path(folder)), port))
            proxy, requests = cleanup.enter_context(counting_proxy(port))
            os.environ.update(
                AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy}",
                AWS_ACCESS_KEY_ID=ACCESS_KEY,
                AWS_SECRET_ACCESS_KEY=SECRET_KEY,
                AWS_REGION="us-east-1",
            )
            store = CheckpointStore.open("s3://bucket", "run")
            for name, operate in operations(store):
                if name == "garbage":  # asks for multipart uploads besides, through boto3
                    continue
                requests.clear()
                started = time.perf_counter()
                operate()
                took = time.perf_counter() - started
                show(f"{count:>7}  {name:<17} {requests.total():>7} requests {took:>8.2f} s   {told(requests)}")


class UnsyncedStorage(LocalStorage):
    """A folder filled without waiting for the disk."""

    def put_bytes(self, key, data):
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def most_answers_per_s(address, seconds=1.0):
    """Return how often a TCPStore answers a second when four threads of this process ask as fast as they can."""
    from prefect_torch.tasks.rank.rendezvous import connect

    def ask():
        key_value, number, ends = connect(address), 0, time.monotonic() + seconds
        while time.monotonic() < ends:
            key_value.check("nothing")
            number += 1
        return number / seconds

    with ThreadPoolExecutor(4) as pool:
        return sum(future.result() for future in [pool.submit(ask) for _ in range(4)])


def play_other_ranks(key_value, world_size, reports):
    """Write what the other ranks tell in `reports` reports of a checkpoint, and that they ended."""
    for step in range(reports):
        for rank in range(1, world_size):
            path = f"model-{rank}.pt"
            key_value.set(f"report {step + 1}/{rank}", Intent(rank, step, "sync", [path]).encode())
            part = RankPart([FileEntry(path, 4, DIGEST, rank)])
            key_value.set(f"report {step + 1}/files/{rank}", part.encode())
    for rank in range(1, world_size):
        announce_exit(key_value, RankExit(rank, reports, "returned"))


class CountedStore:
    """A TCPStore whose calls are counted."""

    def __init__(self, store) -> None:
        self._store = store
        self.calls: Counter = Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._store, name)


def connect_counted(address):
    from prefect_torch.tasks.rank.rendezvous import TcpKeyValue, connect

    store = CountedStore(connect(address).store)
    return TcpKeyValue(store), store.calls


def polls_per_s(address, world_size):
    """Return how many requests a second one waiting rank makes, in its steady state: for rank 0, or for all to end."""
    from prefect_torch.ckpt.reporting.exchange.peers import Peers

    rates = []
    for awaited, wait in (
        ("topic", lambda peers: peers.decision("topic")),
        ("all left", lambda peers: peers.wait_for_all_exits()),
    ):
        key_value, calls = connect_counted(address)
        waiting = threading.Thread(target=wait, args=(Peers(key_value, 1, world_size),))
        waiting.start()
        started = time.monotonic()
        time.sleep(max(1.0, world_size / 1000))
        rates.append(calls.total() / (time.monotonic() - started))
        key_value.set(awaited, b"[]")
        waiting.join()
        key_value.delete(awaited)
    return max(rates)


def plan_of_state(key_value, world_size):
    """Return how long rank 0 takes to plan who writes what of a model of 300 tensors that all ranks have."""
    import torch
    from prefect_torch.ckpt.state.planner import StatePlanner
    from prefect_torch.ckpt.state.save import StateSaver

    state = {"model": {str(number): torch.zeros(64, 64) for number in range(300)}, "epoch": 1}
    described = StateSaver(0, world_size).capture(state).describe()
    started = time.perf_counter()
    StatePlanner().decide([described] * world_size)
    return time.perf_counter() - started


def measure_ranks(world_sizes, show):
    from prefect_torch.tasks.rank.rendezvous import Rendezvous

    show("\nranks")
    show(
        f"{'ranks':>7} {'report':>9} {'finish':>9} {'state plan':>11} {'manifest':>10} {'all ranks ask':>14} "
        "  a report's requests to the storage, and rank 0's to the TCPStore"
    )
    for world_size in world_sizes:
        rendezvous = Rendezvous()
        served = rendezvous.serve()
        show(measure_world(world_size, rendezvous.address))
        most = most_answers_per_s(rendezvous.address)
        del served
    show(f"a TCPStore on this machine answers at least {most:.0f} requests/s")


def measure_world(world_size, address):
    reports = 3
    inner = MemoryStorage()
    counting = CountingStorage(inner)
    store = CheckpointStore.open(counting, "run")
    claim_attempt(store, Owner.current(), world_size=world_size)
    agreement.new_id = lambda attempt, step: f"{attempt:06}-{step:08}-0123abcd"  # of the files of played ranks
    key_value, calls = connect_counted(address)
    rate = polls_per_s(address, world_size) * (world_size - 1) if world_size > 1 else 0.0
    play_other_ranks(key_value, world_size, reports)
    session = Session(TrainContext(0, 0, 0, world_size, world_size, "run", 1), store, key_value)
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(reports):
            Path(folder, "model-0.pt").write_bytes(b"data")
            for rank in range(1, world_size):
                inner.put_bytes(store.layout.data(agreement.new_id(1, step), f"model-{rank}.pt"), b"data")
            counting.taken()
            calls.clear()
            started = time.perf_counter()
            session.report({"loss": 1.0}, Checkpoint.from_directory(folder))
            took.append(time.perf_counter() - started)
            requests, asked_store = counting.taken(), calls.total()
    started = time.perf_counter()
    session.finish()
    finish_s = time.perf_counter() - started
    latest = store.latest()
    assert len(latest.files) == world_size
    manifest_bytes = store.storage.size(store.layout.manifest(latest.id))
    plan_s = plan_of_state(key_value, world_size)
    requests["put_file"] += world_size - 1  # what the ranks that are played would store
    return (
        f"{world_size:>7} {min(took) * 1e3:>6.0f} ms {finish_s * 1e3:>6.0f} ms {plan_s * 1e3:>8.0f} ms "
        f"{manifest_bytes / 1e3:>7.1f} KB {rate:>12.0f}/s   {told(requests)}; {asked_store}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few checkpoints and ranks, for a look whether it runs")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []

    def show(row):
        rows.append(row)
        print(row, flush=True)

    measure_checkpoints([10, 100] if options.quick else [10, 1000, 100_000], options.latency_ms / 1e3, show)
    measure_s3([10] if options.quick else [10, 3000], show)
    measure_ranks([1, 10, 100] if options.quick else [1, 10, 100, 1000, 10_000], show)
    if not options.quick:
        write_results("scaling.txt", 1, rows)


if __name__ == "__main__":
    main()
