"""The same measurement for every way, in each of its ranks: how long training stands still, and what goes on behind it."""

import json
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from plan import WORLD_SIZE
from processes import PeakMemory, back_free_memory, cpu_s

COPIES = 3  # what the greediest ways take of memory, as a share of the state's size
ROOT = "STATE_BENCHMARK_ROOT"  # a way that starts its ranks itself says here which process began


def measure(plan, way, training):
    """Measure what `plan` says with `way`, and write it where the leader looks."""
    found = (measure_saves if plan.phase == "save" else measure_resume)(plan, way, training)
    result = Path(plan.folder, f"{plan.phase}-{plan.rank}.json")
    result.with_suffix(".part").write_text(json.dumps(found))
    dist.barrier()  # nobody ends, and has the others fail, before all have measured
    result.with_suffix(".part").rename(result)


def measure_saves(plan, way, training):
    training.stamp(0)
    floor = Floor(training.bytes // WORLD_SIZE, training.device)
    training.ten_steps_s()
    floor.copy_s()
    roots = _roots()
    memory = PeakMemory(roots) if plan.rank == 0 else None
    rounds = [_measure_round(plan, way, training, floor, roots, number) for number in range(plan.rounds)]
    extra_bytes = memory.extra_bytes() if memory else 0
    return {
        "rounds": [{key: value for key, value in of.items() if key != "checksums"} for of in rounds],
        "checksums": rounds[-1]["checksums"],
        "bytes": training.bytes,
        "memory": extra_bytes,
    }


def _measure_round(plan, way, training, floor, roots, number):
    """Save once. In every third round, from the first, training goes on at once; else it waits: all CPU is the save's."""
    goes_on = number % 3 == 0
    training.stamp(number + 1)
    checksums = training.checksums() if number == plan.rounds - 1 else None
    dist.barrier()
    floor_s = floor.copy_s()
    dist.barrier()
    before_s = training.ten_steps_s() if goes_on else None
    dist.barrier()
    if number == 0:
        _back_free_memory(plan, training)
    cpu_before_s = cpu_s(roots) if plan.rank == 0 else 0.0
    dist.barrier()
    training.synchronize()
    started_s = time.perf_counter()
    way.save(number)
    stall_s = time.perf_counter() - started_s
    training.stamp(-1)  # a way that had not copied everything would store this
    durable = Durable(way.wait)
    after_s = training.ten_steps_s() if goes_on else None
    durable_s = durable.at_s() - started_s
    dist.barrier()
    cpu = None if goes_on or plan.rank else cpu_s(roots) - cpu_before_s
    way.forget()
    of_time = {"stall": stall_s, "floor": floor_s, "before": before_s, "after": after_s, "durable": durable_s}
    return {**of_time, "cpu": cpu, "goes_on": goes_on, "checksums": checksums}


def _back_free_memory(plan, training):
    if plan.rank == 0:
        back_free_memory(COPIES * training.bytes)
    dist.barrier()


def measure_resume(plan, way, training):
    way.load()
    resumed_s = time.monotonic() - plan.started_s
    saved = json.loads(Path(plan.folder, "save-0.json").read_text())["checksums"]
    is_right = training.checksums() == saved
    dist.barrier()
    again_s = None
    if plan.is_local:
        if plan.rank == 0:
            evict(plan.url)
        dist.barrier()
        started_s = time.monotonic()
        way.reload()
        again_s = time.monotonic() - started_s
        is_right = is_right and training.checksums() == saved
    return {"resume": resumed_s, "cold": again_s, "is_right": is_right}


class Durable:
    """Notes when `wait` returns, while the training does something else."""

    def __init__(self, wait):
        self._outcome = []
        self._thread = threading.Thread(target=self._watch, args=[wait])
        self._thread.start()

    def at_s(self):
        self._thread.join()
        at_s, error = self._outcome
        if error is not None:
            raise error
        return at_s

    def _watch(self, wait):
        error = None
        try:
            wait()
        except Exception as exc:  # noqa: BLE001 - raised by at_s
            error = exc
        self._outcome = [time.perf_counter(), error]


class Floor:
    """What no way can do without: a copy of the bytes that this rank owns, into memory that is warm, page-locked from a GPU.

    Many bytes are copied as the same part several times, which is too large for any cache.
    """

    PART_BYTES = 256 * 2**20

    def __init__(self, count, device):
        self._times = -(-count // self.PART_BYTES)
        self._source = torch.ones(count // self._times, dtype=torch.uint8, device=device)
        self._target = torch.zeros(self._source.shape, dtype=torch.uint8, pin_memory=device != "cpu")

    def copy_s(self):
        self._target.copy_(self._source)
        started_s = time.perf_counter()
        for _ in range(self._times):
            self._target.copy_(self._source)
        return time.perf_counter() - started_s


def evict(folder):
    """Take the files below `folder` out of the page cache, as on a machine that has not just written them."""
    for file in filter(Path.is_file, Path(folder).rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is dirty stays
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _roots():
    if ROOT in os.environ:
        return [int(os.environ[ROOT])]
    ranks = [0] * WORLD_SIZE
    dist.all_gather_object(ranks, os.getpid())
    return ranks
