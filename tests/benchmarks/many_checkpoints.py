"""What a run of very many checkpoints costs its readers, on a storage of which every request takes its time.

    python tests/benchmarks/many_checkpoints.py [--checkpoints 100000] [--latency-ms 20] [--repeats 3]

The manifests lie in memory; the index over them and the metric history are written as a training's leader writes them. Each
reader opens the run anew, so it has nothing in its memory; every request of it waits for the latency. Writes
results/many_checkpoints.txt.
"""

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from commits import DIGEST, NOW  # noqa: E402 - here and below: found by the line above
from counting_storage import CountingStorage  # noqa: E402
from memory_storage import MemoryStorage  # noqa: E402
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy  # noqa: E402
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt  # noqa: E402
from prefect_torch.ckpt.runs.attempts.owner import Owner  # noqa: E402
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord  # noqa: E402
from prefect_torch.ckpt.runs.index.writer import IndexWriter  # noqa: E402
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, new_id  # noqa: E402
from prefect_torch.flows import Result  # noqa: E402
from result_file import spread, write_results  # noqa: E402

RUN = "run"


def stored_run(count):
    """Return a storage with `count` indexed checkpoints of two ranks, and the CPU seconds that the index took."""
    storage = MemoryStorage()
    store = CheckpointStore.open(storage, RUN)
    claim_attempt(store, Owner.current(), world_size=2)
    history = HistoryWriter(store, 1)
    for step in range(count):
        files = tuple(FileEntry(f"model-{rank}.pt", 1, DIGEST, rank) for rank in range(2))
        metrics, timings = {"loss": 1 / (step + 1), "accuracy": 0.5}, {"stall_s": 0.1, "durable_s": 0.2}
        manifest = Manifest(new_id(1, step), step, 1, metrics, files, 2, None, NOW, {}, timings)
        storage._objects[store.layout.manifest(manifest.id)] = (manifest.encode(), 1.0)
        history.append(MetricRecord(1, step, metrics, manifest.id, NOW.isoformat()))
    storage._keys = sorted(storage._objects)
    history.close()
    store.hint_latest(manifest.id)
    writer, listed = IndexWriter(store), store.listed()
    started_s = time.process_time()
    while writer.repair(listed):
        pass
    return storage, time.process_time() - started_s


def readers(count):
    """Return what people ask of a run, by name."""
    policy = RetentionPolicy(count - 5, "loss", "min")
    return {
        "list()": lambda store: store.list(),
        "best(3, 'loss')": lambda store: store.best(3, "loss"),
        "prune(dry_run=True)": lambda store: store.prune(policy, dry_run=True),
        "latest()": lambda store: store.latest(),
        "Result.from_storage": lambda store: Result.from_storage(store.storage, RUN),
    }


def measure(storage, read, latency_s, repeats):
    """Return the wall and CPU seconds of each repeat, and the requests of the last."""
    walls, cpus, requests = [], [], None
    for _ in range(repeats):
        counting = CountingStorage(storage, latency_s)
        store = CheckpointStore.open(counting, RUN)
        counting.taken()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        read(store)
        walls.append(time.perf_counter() - started_s)
        cpus.append(time.process_time() - cpu_s)
        requests = counting.taken()
    return walls, cpus, requests


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=100_000)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    storage, index_s = stored_run(options.checkpoints)
    lines = [
        f"{options.checkpoints} checkpoints, {options.latency_ms:g} ms a request; the index took {index_s:.1f} s of CPU",
        "",
        f"{'':20} {'min s':>7} {'median':>7} {'max':>7} {'CPU s':>7} {'requests':>9}",
    ]
    for name, read in readers(options.checkpoints).items():
        walls, cpus, requests = measure(storage, read, options.latency_ms / 1e3, options.repeats)
        figures = " ".join(f"{value:7.2f}" for value in (*spread(walls), spread(cpus)[1]))
        lines.append(f"{name:20} {figures} {sum(requests.values()):9}  {dict(requests)}")
    write_results("many_checkpoints.txt", options.repeats, lines)


if __name__ == "__main__":
    main()
