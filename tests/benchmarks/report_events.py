"""What reports cost the process that leads a training: its CPU time for each, and its memory.

    python tests/benchmarks/report_events.py [--reports 1000000]

Reports without a checkpoint, two metrics each, are sent by a process of their own, rank 0's, over a real TCPStore, as fast
as the leader receives them. The leader's part is what it does in a training: it receives them, stores the metric history on
local disk, and keeps the view that pages show. The store's own threads are in its process and count.

Writes results/report_events.txt.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import EventReceiver, EventSender, ReportEvent
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.flows.monitoring.pages.run_view import RunView
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, connect
from prefect_torch.tasks.training.observers import AttemptStarted
from result_file import write_results


def send(port, count):
    """Be rank 0."""
    key_value = connect(Address("127.0.0.1", port))
    sender = EventSender(key_value)
    for step in range(count):
        metrics = {"loss": 1 / (step + 1), "accuracy": 0.5}
        sender.send(ReportEvent(MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00")))


def resident_mib():
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def lead(folder, count):
    """Receive `count` reports; yield a row after each tenth."""
    store = CheckpointStore.open(folder, "run")
    attempt = claim_attempt(store, Owner.current(), world_size=1)
    view = RunView(store, RetentionPolicy(3, "loss", "min"))
    view.record(AttemptStarted(attempt, None), time.time())
    history = HistoryWriter(store, attempt.number)
    rendezvous = Rendezvous()
    receiver, received = EventReceiver(rendezvous.serve()), 0
    command = [sys.executable, __file__, "--port", str(rendezvous.address.port), "--reports", str(count)]
    with subprocess.Popen(command) as rank:
        cpu_s = time.process_time()
        while received < count and rank.poll() in (None, 0):
            before = received
            for event in receiver.drain():
                view.record(event, time.time())
                history.append(event.record)
                received += 1
                if received % (count // 10) == 0:
                    now_s = time.process_time()
                    each_us = 1e6 * (now_s - cpu_s) / (count // 10)
                    yield f"{received:>9} reports  {each_us:6.1f} us of CPU each  {resident_mib():6.1f} MiB"
                    cpu_s = now_s
            if history.is_due():
                history.flush()
            if received == before:
                time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=1_000_000)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port is not None:
        send(options.port, options.reports)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for row in lead(folder, options.reports):
            rows.append(row)
            print(row, flush=True)
    write_results("report_events.txt", 1, rows)


if __name__ == "__main__":
    main()
