"""How much memory a training's leader needs after so many reports, each with a checkpoint that is kept.

    python tests/benchmarks/leader_memory.py [--reports 1000000]

Reports and commits go the real way from rank 0's sender over a real TCPStore to the leader's receiver, and from there to what
remembers them: the retention schedule (the best 3 and every 10th step are kept) and the pages' view of the run. Measured is the
resident memory of this one process after each tenth, and how many keys the TCPStore holds; what the storage itself would hold
is not in it. Prints a table, and writes it to tests/benchmarks/results/leader_memory.txt.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent, EventReceiver, EventSender, ReportEvent
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.flows.monitoring.pages.run_view import RunView
from prefect_torch.tasks.rank.rendezvous import Rendezvous, connect
from prefect_torch.tasks.training import retention_schedule
from prefect_torch.tasks.training.observers import AttemptStarted
from result_file import write_results

POLICY = RetentionPolicy(3, "loss", "min", keep_every_n_steps=10)


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Prune:
    """A prune that deletes what the schedule would have it delete, and nothing else; the real one is a Prefect task."""

    def __init__(self):
        self.schedule = None

    def submit(self, *_args, limits, **_options):
        candidates = self.schedule._candidates
        decided = retention_schedule.plan(candidates, POLICY, up_to=limits.up_to)
        self.plan = replace(decided, drop=tuple(SimpleNamespace(id=it.id, total_bytes=it.bytes) for it in decided.drop))
        return self

    def add_done_callback(self, done):
        done(self)

    def result(self, *, raise_on_failure):
        return self.plan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--reports", type=int, default=1_000_000)
    count = parser.parse_args().reports
    rows = []

    def show(row):
        rows.append(row)
        print(row, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore.open(folder, "run")
        attempt = claim_attempt(store, Owner.current(), world_size=1)
        view = RunView(store, POLICY)
        view.record(AttemptStarted(attempt, None), time.time())
        prune = retention_schedule.prune_checkpoints = Prune()
        job = SimpleNamespace(store=SimpleNamespace(storage=None), run="run", policy=POLICY)
        schedule = retention_schedule.RetentionSchedule(
            job, "a claim", [], None, SimpleNamespace(notify=lambda it: view.record(it, time.time())), ManifestMemory()
        )
        prune.schedule = schedule
        rendezvous = Rendezvous()
        key_value = rendezvous.serve()
        sender, receiver = EventSender(connect(rendezvous.address)), EventReceiver(key_value)
        started_s = time.perf_counter()
        for step in range(count):
            checkpoint_id, metrics = f"000001-{step:08d}-00000000", {"loss": float(-step if step % 3 else step)}
            sender.send(CommitEvent(checkpoint_id, step, metrics, 7, 0.5, 0.25))
            sender.send(ReportEvent(MetricRecord(1, step, metrics, checkpoint_id, "2026-01-01T00:00:00+00:00")))
            for event in receiver.drain():
                view.record(event, time.time())
                if isinstance(event, CommitEvent):
                    schedule.committed(event)
                    schedule.prune_due(event.id)
            if (step + 1) % (count // 10) == 0:
                spent_s = time.perf_counter() - started_s
                show(
                    f"{step + 1:>9} reports {resident_mib():7.1f} MiB resident, "
                    f"{key_value.store.num_keys()} keys in the TCPStore, "
                    f"{len(schedule._candidates)} candidates of prunes, {len(view.checkpoints.held)} of "
                    f"{view.checkpoints.num} checkpoints held, {1e6 * spent_s / (step + 1):.0f} us a report"
                )
    write_results("leader_memory.txt", 1, rows)


if __name__ == "__main__":
    main()
