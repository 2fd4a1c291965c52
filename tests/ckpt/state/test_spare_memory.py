"""Memory for the first report of a state, touched before that report."""

import ctypes
import errno
import mmap
import os
import sys
import threading

import pytest
import torch
from forked_programs import run_program
from prefect_torch.ckpt.state import expected_size
from prefect_torch.ckpt.state.plan import TensorShard, plan_writes
from prefect_torch.ckpt.state.staging import spare_memory
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
from prefect_torch.ckpt.state.staging.host_memory import HostMemory
from ranks import Attempt, as_rank, folder, in_training
from states import check_equal

MIB = 2**20
pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="needs mincore to see pages")


def resident_bytes(tensor):
    """Return how much of the tensor's memory has pages."""
    num_pages = -(-len(tensor) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    start, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mincore(start, size, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def expected():
    spare_memory.expect_reports(expected=True)
    yield
    spare_memory.expect_reports(expected=False)


@pytest.fixture
def prepared(monkeypatch):
    """Return the memory that is prepared, all of it touched before the training goes on."""
    found = []

    def prepare(size, _prepare=spare_memory.prepare):
        if (spare := _prepare(size)) is not None:
            spare.wait()
            found.append(spare)

    monkeypatch.setattr(spare_memory, "prepare", prepare)
    return found


def test_prepared_memory_has_all_its_pages_before_it_is_taken(expected):
    assert resident_bytes(HostMemory(16 * MIB).tensor) == 0
    spare_memory.prepare(16 * MIB).wait()
    assert resident_bytes(spare_memory.take(16 * MIB).tensor) == 16 * MIB


def test_memory_is_taken_while_it_is_still_touched_and_nothing_writes_to_it_afterwards(expected):
    spare_memory.prepare(64 * MIB)
    memory = spare_memory.take(64 * MIB).tensor
    memory[::4096] = 1
    assert not any(thread.name == "prefect-torch-spare-memory" for thread in threading.enumerate())
    assert memory[::4096].all()


def test_memory_that_is_too_large_is_given_back_behind_what_is_needed(expected):
    spare_memory.prepare(16 * MIB).wait()
    memory = spare_memory.take(5 * MIB + 1)
    whole = memory.tensor.untyped_storage().nbytes()
    assert len(memory.tensor) == 5 * MIB + mmap.PAGESIZE
    assert resident_bytes(torch.empty(0, dtype=torch.uint8).set_(memory.tensor.untyped_storage())) == len(memory.tensor) < whole


def test_memory_that_is_too_small_is_given_back_before_other_is_allocated(expected):
    spare_memory.prepare(8 * MIB).wait()
    assert spare_memory.take(8 * MIB + 1) is None
    assert spare_memory.release() is None


class WithoutHugePages(mmap.mmap):
    """Memory of a kernel that knows no huge pages."""

    def madvise(self, option, *part):
        if option == mmap.MADV_HUGEPAGE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().madvise(option, *part)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no system without them gives such advice")
def test_a_kernel_without_huge_pages_has_memory_for_states(expected, monkeypatch):
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    spare_memory.prepare(8 * MIB).wait()
    assert resident_bytes(spare_memory.take(6 * MIB).tensor) == 6 * MIB


@pytest.mark.parametrize(
    ("what", "error"), [("mmap.mmap", OSError(errno.ENOMEM, "")), ("threading.Thread.start", RuntimeError())]
)
def test_where_no_memory_can_be_prepared_the_training_goes_on(expected, monkeypatch, what, error):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(what, fail)
        assert spare_memory.prepare(8 * MIB) is None
    assert spare_memory.take(8 * MIB) is None


def test_a_process_that_reports_nothing_keeps_no_memory():
    assert spare_memory.prepare(16 * MIB) is None


def test_the_end_of_a_session_ends_the_thread(store):
    with as_rank(Attempt(store).session()):
        spare_memory.prepare(256 * MIB)
    assert not any(thread.name == "prefect-torch-spare-memory" for thread in threading.enumerate())


def test_small_states_start_no_thread(expected):
    assert spare_memory.prepare(spare_memory.LEAST_BYTES - 1) is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_first_report_after_a_load_stages_into_touched_memory(store, world_size, monkeypatch, prepared):
    buffers = []

    def buffer(*arguments, **options):
        buffers.append(StagingBuffer(*arguments, **options))
        return buffers[-1]

    monkeypatch.setattr("prefect_torch.ckpt.state.save.StagingBuffer", buffer)

    def state(value):
        return {"model": torch.nn.Linear(1500, 2500).requires_grad_(False), "large": torch.full((3_000_000,), float(value))}

    def first(session, rank):
        session.report({}, state=state(1))

    assert Attempt(store, world_size).run(first) == [None] * world_size
    attempt = Attempt(store, world_size)
    loaded = state(0)
    with as_rank(attempt.session(0)):
        attempt.restored.load_state(loaded)
        (spare,) = prepared
        buffers.clear()
        assert attempt.run(lambda session, rank: session.report({}, state=loaded)) == [None] * world_size
    assert len(buffers) == world_size
    assert spare._memory is None, "no rank has staged into it"
    again = state(0)
    store.checkpoint(store.latest()).load_state(again)
    check_equal(again, loaded)


def test_the_second_step_of_an_optimizer_prepares_memory_for_all_that_have_stepped(store, prepared):
    models = [torch.nn.Linear(1000, 1000) for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models[:2]]
    expected_size.note_module(models[2])
    with in_training(Attempt(store).session()) as session:
        expected_size.watch_steps(lambda: 2**40)
        for number in (0, 1, 0):
            assert not prepared
            models[number](torch.ones(1, 1000)).sum().backward()
            optimizers[number].step()
        (spare,) = prepared
        assert 7 * 4_004_000 < spare.size < 7 * 4_004_000 + MIB
        state = {"models": torch.nn.ModuleList(models), "optimizers": optimizers}
        session.report({}, state=state)
        assert spare._memory is None, "the report has staged elsewhere"


def test_an_optimizer_steps_while_a_part_of_its_model_is_not_initialized(store, prepared):
    model = torch.nn.ModuleList([torch.nn.Linear(1000, 2000), torch.nn.LazyLinear(10), torch.nn.LazyBatchNorm1d()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected_size.note_module(model)
    with as_rank(Attempt(store).session()):
        expected_size.watch_steps(lambda: 2**40)
        for _ in range(2):
            model[0](torch.ones(1, 1000)).sum().backward()
            optimizer.step()
    (spare,) = prepared
    assert 8_008_000 < spare.size < 8_008_000 + MIB


def test_steps_prepare_no_more_than_a_quarter_of_the_available_memory(store, prepared):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with as_rank(Attempt(store).session()):
        expected_size.watch_steps(lambda: 8_000_000)
        for _ in range(3):
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
    assert not prepared


@pytest.mark.parametrize("available", [1, 3])
def test_a_load_prepares_no_more_than_half_of_the_available_memory(store, prepared, available):
    state = {"model": torch.nn.Linear(4, 4), "large": torch.ones(4 * MIB)}
    with in_training(Attempt(store).session()) as session:
        session.report({}, state=state)
    attempt = Attempt(store)
    with as_rank(attempt.session()):
        expected_size.watch_steps(lambda: available * 16 * MIB)
        attempt.restored.load_state({"model": state["model"]})  # its size does not tell that of the optimizer to come
    assert len(prepared) == (available > 2)


def test_a_report_of_a_directory_gives_the_memory_back(store, tmp_path):
    with in_training(Attempt(store).session()) as session:
        spare_memory.prepare(16 * MIB)
        session.report({}, folder(tmp_path / "files", weights="x"))
        assert spare_memory.release() is None


MEASURE = """
from pathlib import Path
import torch
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
torch.use_deterministic_algorithms(True)
StagingBuffer([(torch.float32, (8,))])  # what any first buffer costs
Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
buffer = StagingBuffer([(torch.float32, (2**26,))])
print(peak() - before)
"""


def test_a_buffer_of_256_mib_costs_less_than_32_mib_before_it_is_filled_by_any_algorithms():
    told = run_program([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout
    assert int(told) * 1024 < 32 * MIB


def test_an_estimate_suffices_for_what_a_rank_stages():
    for sizes in ([4_000] * 100, [MIB - 4] * 7, [64 * MIB, 4, 4], [3 * MIB + 4] * 5):
        shards = [_shard(number, size) for number, size in enumerate(sizes)]
        for world_size in (1, 2, 3, 8):
            for of_rank in plan_writes([shards] * world_size):
                chunks = [(torch.float32, (write.stop - write.start,)) for write in of_rank]
                assert len(StagingBuffer(chunks).data) <= expected_size.expected_bytes(sizes, world_size)


def _shard(number, size):
    return TensorShard(f"t{number}", (f"t{number}",), "float32", 4, (size // 4,), (0,), (size // 4,))
