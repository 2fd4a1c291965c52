"""Page-locked memory, copies and digests with a real driver: what tests/ckpt/state shows with a simulated one."""

import gc
import logging
import subprocess
import sys
import weakref

import pytest
import torch
from gpu_states import GIB, Holder
from prefect_torch.ckpt import get_checkpoint, report
from prefect_torch.ckpt.state.loading import read
from prefect_torch.ckpt.state.objects.flatten import Leaf
from prefect_torch.ckpt.state.objects.values import capture_values, digest_tensors
from prefect_torch.ckpt.state.staging import device_copies, host_memory
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
from prefect_torch.ckpt.state.staging.host_memory import HostMemory
from ranks import Attempt, in_training
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gpus(1)
DEVICE = torch.device("cuda", 0)
STEP = 2**20


@pytest.fixture
def small_steps(monkeypatch):
    for module in (host_memory, device_copies):
        monkeypatch.setattr(module, "REGISTRATION_BYTES", STEP)


def is_locked(memory):
    """Return for each step of a memory whether it is page-locked."""
    return [memory.tensor[start : start + 1].is_pinned() for start in range(0, len(memory.tensor), STEP)]


def test_memory_is_locked_as_a_whole_and_unlocked_before_a_larger_one_takes_its_place(small_steps):
    tensor = torch.randn(1_000_000, device=DEVICE)
    buffer = StagingBuffer([(tensor.dtype, tensor.shape)])
    buffer.stage([tensor])
    assert not any(is_locked(buffer._memory))
    buffer.register()
    assert all(is_locked(buffer._memory))
    tensor.mul_(2)
    buffer.stage([tensor])
    assert torch.equal(buffer._views[0], tensor.cpu())
    pages, larger = weakref.ref(buffer._memory._pages), torch.randn(2_000_000, device=DEVICE)
    grown = StagingBuffer([(larger.dtype, larger.shape)], previous=buffer)
    assert pages() is None
    grown.stage([larger])
    assert torch.equal(grown._views[0], larger.cpu())


def test_a_step_that_the_driver_refuses_leaves_none_locked_and_the_next_kernel_well(small_steps, caplog):
    host_memory._warn_of_refusal.cache_clear()
    memory = HostMemory(3 * STEP)
    second = memory.tensor.data_ptr() + STEP
    assert int(torch.cuda.cudart().cudaHostRegister(second, STEP, 0)) == 0  # by somebody else: it is refused then
    try:
        with caplog.at_level(logging.WARNING):
            memory.register(DEVICE)
        assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2.0] * 3
        assert is_locked(memory) == [False, True, False]
    finally:
        torch.cuda.cudart().cudaHostUnregister(second)
    assert caplog.text.count("the driver does not page-lock memory of the host (CUDA error") == 1


END_WITH_LOCKED_MEMORY = """
import torch
from prefect_torch.ckpt.state.staging.host_memory import HostMemory
memory = HostMemory(10_000_000)
memory.register(torch.device("cuda", 0))
assert memory.tensor.is_pinned()
print("locked", flush=True)
"""


def test_a_process_that_ends_with_locked_memory_ends_well():
    ended = subprocess.run([sys.executable, "-c", END_WITH_LOCKED_MEMORY], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, "CUDA" in ended.stderr) == (0, "locked\n", False), ended.stderr


class Copies(TorchDispatchMode):
    """Lists the types of the devices between which each call copies."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "copy_" in func.overloadpacket.__name__:
            found = [it for it in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
            self.made.append((func.overloadpacket.__name__, sorted({it.device.type for it in found})))
        return func(*args, **(kwargs or {}))


def test_a_report_copies_with_one_call_from_the_gpu_and_then_one_from_the_cpu():
    tensors = [torch.ones(5), torch.ones(3, device=DEVICE), torch.ones(2), torch.ones(4, device=DEVICE)]
    buffer = StagingBuffer([(torch.float32, tuple(tensor.shape)) for tensor in tensors])
    with Copies() as copies:
        buffer.stage(tensors)
    assert copies.made == [("_foreach_copy_", sorted(["cpu", DEVICE.type])), ("_foreach_copy_", ["cpu"])]


def copies_to_the_host(work):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    return sum("Memcpy DtoH" in event.name for event in profile.events())


def test_a_loose_tensor_of_4_gib_is_digested_by_the_gpu(figure, timed):
    tensor = torch.randn(GIB, device=DEVICE)
    leaves = [Leaf("average", ("average",), tensor), *(Leaf(str(size), (str(size),), tensor[:size]) for size in (1, 20_000))]
    before = digest_tensors(leaves)
    with timed("digest of 4 GiB"):
        assert digest_tensors(leaves) == before
    assert copies_to_the_host(lambda: digest_tensors(leaves)) == 1
    assert copies_to_the_host(lambda: capture_values(leaves[1:])) == 1
    tensor[GIB // 2] += 1
    assert digest_tensors(leaves)["average"] != before["average"]
    tensor[[0, GIB - 1]] = tensor[[GIB - 1, 0]]
    swapped = digest_tensors(leaves)["average"]
    tensor[[0, GIB - 1]] = tensor[[GIB - 1, 0]]
    assert digest_tensors(leaves)["average"] != swapped


def test_a_load_has_eight_slots_of_memory_and_gives_them_back(store, monkeypatch):
    weight = torch.randn(32 << 20, device=DEVICE)  # 128 MiB
    with in_training(Attempt(store).session()):
        report({}, state={"model": Holder(weight=weight)}, upload="sync")
    made, slots = HostMemory.__init__, []

    def observe(self, size):
        made(self, size)
        slots.append((size, weakref.ref(self)))

    monkeypatch.setattr(read.HostMemory, "__init__", observe)
    into = Holder(weight=torch.empty_like(weight))
    with in_training(Attempt(store).session()):
        get_checkpoint().load_state({"model": into})
    assert torch.equal(into.weight, weight)
    gc.collect()
    assert [(size, memory()) for size, memory in slots] == [(8 * 4 * 2**20, None)]
