"""States of a GPU whose streams run as late as they may: what is stored and loaded, and what it costs."""

import ctypes
import gc
import logging
import re
import threading
import weakref
from collections import defaultdict

import pytest
import simulated_gpu as gpu
import torch
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.state.staging import buffer, device_copies, host_memory
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
from prefect_torch.ckpt.state.staging.host_memory import HostMemory
from ranks import Attempt
from simulated_processes import Mutant, failure_of, on_simulated_gpu
from torch.utils._python_dispatch import TorchDispatchMode


def stored(store, state, world_size=1):
    """Report what `state(rank)` returns, have the training go on at once, and return the checkpoint."""

    def train(session, rank):
        mine = state(rank)
        session.report({}, state=mine)
        go_on(mine)

    errors = Attempt(store, world_size).run(train)
    assert errors == [None] * world_size, errors
    return store.checkpoint(store.latest())


def go_on(value):
    """Change all tensors on the device, as the next step does."""
    if isinstance(value, dict):
        for item in value.values():
            go_on(item)
    elif isinstance(value, torch.nn.Module):
        go_on(dict(value.state_dict()))
    elif isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            go_on(state)
    elif isinstance(value, torch.Tensor) and gpu.is_simulated(value):
        value.detach().fill_(7)


class Scaled(torch.nn.Module):
    """A module that derives something on its device when it is loaded."""

    def __init__(self, scale):
        super().__init__()
        self.scale = torch.nn.Parameter(scale)
        self.twice = None

    def load_state_dict(self, state_dict, *args, **kwargs):
        loaded = super().load_state_dict(state_dict, *args, **kwargs)
        self.twice = 2 * self.scale.detach()
        return loaded


def make_training(seed, device, **options):
    """Return a model and its optimizer after a step; where `device` is the simulated GPU, the step is still in its queue."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(values.to(device))
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def check_equal(state, other):
    for one, two in zip(tensors_in(state), tensors_in(other), strict=True):
        assert torch.equal(one.detach().cpu(), two.detach().cpu())


def tensors_in(state):
    states = [state["optimizer"].state[parameter] for parameter in state["model"].parameters()]
    return [
        *state["model"].state_dict().values(),
        *(of_parameter[name] for of_parameter in states for name in sorted(of_parameter)),
    ]


def odd_tensors():
    base = torch.arange(24_000.0)
    return {
        "conjugated": (base + 1j).conj(),
        "negated": (base + 1j).conj().imag,
        "channels last": base.reshape(10, 8, 20, 15).contiguous(memory_format=torch.channels_last),
        "transposed": base.reshape(200, 120).t(),
        "expanded": base[:20].expand(1000, 20),
        "every second": base[::2],
        "scalar": base[3],
        "empty": base[:0],
        "bfloat16": base.bfloat16(),
        "bool": base.bool(),
    }


def odd_tensor(name):
    """Return the tensor on the simulated GPU, its flags and strides as they are on the CPU."""
    tensor = odd_tensors()[name]
    if tensor.is_conj():
        return gpu.on_device(tensor.conj()).conj()
    if tensor.is_neg():
        return gpu.on_device(torch.arange(24_000.0) + 1j).conj().imag
    return gpu.on_device(tensor)


def stage(tensors, previous=None):
    buffer = StagingBuffer([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], previous=previous)
    buffer.stage(tensors)
    return buffer


def staged_values(buffer):
    return [view.clone() for view in buffer._views]


class Calls(TorchDispatchMode):
    """Lists the operations, each with the types of the devices of its tensors."""

    def __init__(self):
        super().__init__()
        self.made, self.num_to_host = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = [it for it in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        self.made.append((func.overloadpacket.__name__, [it.device.type for it in found]))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_cpu and any(gpu.is_simulated(it) for it in found):
            self.num_to_host += 1
        return result


@on_simulated_gpu
def test_a_report_stores_the_values_of_its_call(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    checkpoint = stored(store, lambda _: make_training(1, gpu.DEVICE))
    loaded = make_training(2, "cpu")
    checkpoint.load_state(loaded)
    check_equal(loaded, make_training(1, "cpu"))


@on_simulated_gpu
def test_a_report_stores_the_values_of_the_current_stream(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")

    def state(_):
        stream = gpu.Stream()
        stream.wait_stream(gpu.current_stream())
        gpu._of_thread.stream = stream  # of this rank's thread, from now on
        return make_training(1, gpu.DEVICE)

    loaded = make_training(2, "cpu")
    stored(store, state).load_state(loaded)
    check_equal(loaded, make_training(1, "cpu"))


@pytest.mark.parametrize("what", [*odd_tensors()])
@on_simulated_gpu
def test_odd_tensors_are_stored_as_they_look(what, tmp_path):
    device_copies._STRIDED_BYTES = 4096
    tensor = odd_tensor(what)
    buffer = stage([tensor])
    assert torch.equal(staged_values(buffer)[0], odd_tensors()[what])


@on_simulated_gpu
def test_a_report_takes_little_memory_of_the_gpu(tmp_path):
    device_copies._STRIDED_BYTES = 2**16
    names = ["channels last", "transposed", "expanded", "every second", "conjugated", "negated"]
    strided = [gpu.on_device(odd_tensors()[name]) if name != "conjugated" else odd_tensor(name) for name in names]
    with gpu.memory.peak() as temporaries:
        stage(strided)
    assert 0 < temporaries.bytes <= 2**16


@on_simulated_gpu
def test_a_report_waits_once_and_makes_no_stream(tmp_path):
    tensors = [gpu.on_device(torch.ones(3)) for _ in range(50)]
    before = gpu.counts.copy()
    stage([*tensors, torch.ones(5)])
    spent = gpu.counts - before
    assert (spent["synchronize"], spent["events"], spent["streams"]) == (1, 1, 0)


@on_simulated_gpu
def test_the_gpu_copies_with_one_call_and_before_the_cpu(tmp_path):
    tensors = [torch.ones(5), gpu.on_device(torch.ones(3)), torch.ones(2), gpu.on_device(torch.ones(4))]
    buffer = StagingBuffer([(torch.float32, tuple(tensor.shape)) for tensor in tensors])
    with Calls() as calls:
        buffer.stage(tensors)
    copies = [devices for name, devices in calls.made if name == "_foreach_copy_"]
    assert [sorted({*devices}) for devices in copies] == [["cpu", gpu.NAME], ["cpu"]]
    assert [name for name, _ in calls.made if "copy_" in name] == ["_foreach_copy_"] * 2


@on_simulated_gpu
def test_a_copy_that_fails_leaves_none_under_way(tmp_path):
    tensors = [gpu.on_device(torch.ones(5)) for _ in range(3)]
    gpu.fail_after(2)
    with pytest.raises(RuntimeError, match="CUDA error"):
        stage(tensors)
    assert not gpu.host.in_flight


@on_simulated_gpu
def test_memory_is_locked_in_the_background_and_of_exact_size(tmp_path):
    host_memory.REGISTRATION_BYTES = device_copies.REGISTRATION_BYTES = 2**18
    store = CheckpointStore.open(tmp_path, "run")
    at_stage, at_growth, buffers = [], [], []
    usual, made = StagingBuffer.stage, StagingBuffer.__init__

    def observe(self, tensors):
        at_stage.append(len(gpu.host.ranges))
        usual(self, tensors)

    def keep(self, *args, **kwargs):
        made(self, *args, **kwargs)
        if len(buffers) == 1:
            at_growth.append((buffers[0][0](), len(gpu.host.ranges)))
        buffers.append((weakref.ref(self._memory._pages), len(self.data)))

    def train(session, rank):
        model = torch.nn.Linear(500, 500, device=gpu.DEVICE)
        for _ in range(2):
            go_on(model)
            session.report({}, state={"model": model})
        session.report({}, state={"model": model, "more": torch.nn.Linear(700, 700, device=gpu.DEVICE)})
        session.wait_for_commits()

    buffer.StagingBuffer.stage, buffer.StagingBuffer.__init__ = observe, keep
    assert Attempt(store).run(train) == [None]
    (_, first_bytes), (_, second_bytes) = buffers
    assert at_stage[0] == 0
    assert at_stage[1] == -(-first_bytes // 2**18)
    assert at_growth == [(None, 0)]  # given back before the larger one was used
    assert gpu.host.locked_peak_bytes == second_bytes
    assert {name for name, *_ in gpu.host.threads} == {"register", "unregister"}
    assert not any(thread is threading.main_thread() for name, thread in gpu.host.threads if name == "register")


@on_simulated_gpu
def test_where_pages_cannot_be_locked_reports_go_on_with_one_warning(tmp_path):
    host_memory.REGISTRATION_BYTES = device_copies.REGISTRATION_BYTES = 2**18
    gpu.host.refuse_from = 1
    warned = []
    logging.getLogger(host_memory.__name__).addFilter(lambda record: warned.append(record.getMessage()))
    store = CheckpointStore.open(tmp_path, "run")
    checkpoint = stored(store, lambda _: make_training(1, gpu.DEVICE))
    assert not gpu.host.ranges  # all or nothing
    loaded = make_training(2, gpu.DEVICE)
    checkpoint.load_state(loaded)
    check_equal(loaded, make_training(1, "cpu"))
    for number in range(3):
        buffer = stage([gpu.on_device(torch.full((300_000,), float(number)))])
        buffer.register()
        buffer.stage([gpu.on_device(torch.full((300_000,), float(number)))])
        assert staged_values(buffer)[0].unique().tolist() == [number]
    assert len(warned) == 1
    assert "CUDA error 2" in warned[0]


@on_simulated_gpu
def test_no_copy_crosses_a_registration(tmp_path):
    host_memory.REGISTRATION_BYTES = device_copies.REGISTRATION_BYTES = 2**16
    device_copies._STRIDED_BYTES = 2**14
    tensors = [
        gpu.on_device(torch.arange(40_000.0).reshape(100, 400)),
        gpu.on_device(torch.arange(30_000.0).reshape(3, 10_000).t()),
    ]
    buffer = stage(tensors)
    buffer.register()
    assert len(gpu.host.ranges) == 5
    buffer.stage(tensors)
    assert all(torch.equal(gpu.values(tensor), view) for tensor, view in zip(tensors, staged_values(buffer), strict=True))


@on_simulated_gpu
def test_locked_memory_is_not_given_to_forked_processes_and_is_unlocked_before_it_is_unmapped(tmp_path):
    memory = HostMemory(10_000)
    memory.register(gpu.DEVICE)
    start = memory.tensor.data_ptr()
    with open("/proc/self/smaps") as file:  # noqa: PTH123 - not a file
        flags = file.read().split(f"{start:x}-")[1].split("VmFlags:")[1].split("\n")[0].split()
    assert "dc" in flags  # not copied on fork
    view = memory.tensor[:5]
    del memory
    gc.collect()
    assert not gpu.host.ranges  # though somebody still uses it
    assert view.tolist() == [0] * 5
    assert ctypes.string_at(start, 5) == b"\0" * 5


@pytest.mark.parametrize("world_size", [1, 2])
@on_simulated_gpu
def test_tensors_that_no_module_holds_are_compared_by_the_gpu(world_size, tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    common, own = torch.arange(100_000.0), torch.arange(90_000.0)

    def state(rank):
        signs = torch.ones(90_000)
        signs[[1, 3]] = -1 if rank else 1  # which a sum of words of 64 bits with odd weights does not see
        with_own = gpu.on_device(own * signs).mul_(2)
        return {"common": gpu.on_device(common).mul_(2), "own": with_own, "small": gpu.on_device(common[:5]).mul_(rank + 1)}

    checkpoint = stored(store, state, world_size)
    for rank in range(world_size):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state(rank).items()}
        checkpoint.load_state(loaded, rank=rank, world_size=world_size)
        assert torch.equal(loaded["common"].cpu(), 2 * common)
        assert torch.equal(loaded["own"].cpu(), state(rank)["own"].cpu())
        assert torch.equal(loaded["small"].cpu(), common[:5] * (rank + 1))
    fresh = {"common": torch.zeros(100_000)}
    checkpoint.load_state(fresh, rank=0, world_size=3)  # one copy is stored for all
    assert torch.equal(fresh["common"], 2 * common)


@on_simulated_gpu
def test_all_digests_come_to_the_host_with_one_copy_and_all_small_tensors_with_another(tmp_path):
    from prefect_torch.ckpt.state.objects.flatten import Leaf  # noqa: PLC0415 - of a mutant, perhaps
    from prefect_torch.ckpt.state.objects.values import capture_values, digest_tensors  # noqa: PLC0415

    leaves = [Leaf(str(size), (str(size),), gpu.on_device(torch.arange(float(size)))) for size in (1, 3, 20_000, 30_001)]
    before = gpu.counts.copy()
    with Calls() as calls:
        digest_tensors(leaves)
        captured = capture_values([*leaves, Leaf("n", ("n",), 3)])
    assert calls.num_to_host == 2
    assert (gpu.counts - before)["synchronize"] == 2
    assert [value.name for value in captured] == ["1", "3", "20000", "30001", "n"]


@on_simulated_gpu
def test_a_load_waits_for_the_current_stream_and_is_there_for_every_other(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    large = torch.arange(2_000_000.0)  # several reads, or the calling thread does the only one
    checkpoint = stored(store, lambda _: {**make_training(1, gpu.DEVICE), "large": gpu.on_device(large)})
    before = {**make_training(2, gpu.DEVICE), "large": torch.zeros_like(large, device=gpu.DEVICE)}
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.stream(stream):
        go_on(before["model"])
        checkpoint.load_state(before)
    expected = {**make_training(1, "cpu"), "large": large}
    for tensor, other in zip(before["model"].state_dict().values(), expected["model"].state_dict().values(), strict=True):
        assert torch.equal(gpu.values(tensor), other)  # with nothing more awaited
    stream.synchronize()
    check_equal(before, expected)


@on_simulated_gpu
def test_strided_tensors_are_there_for_every_stream_after_a_load(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    large, small = torch.arange(2_000_000.0).reshape(2000, 1000), torch.arange(6.0).reshape(2, 3)
    checkpoint = stored(store, lambda _: {"large": large, "small": small, "scaled": Scaled(small)})
    state = {"large": gpu.on_device(torch.zeros(1000, 2000)).t(), "small": gpu.on_device(torch.zeros(3, 2)).t()}
    scaled = Scaled(gpu.on_device(torch.zeros(2, 3)))
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.stream(stream):
        checkpoint.load_state(state)
    assert torch.equal(gpu.values(state["large"]), large)  # with nothing more awaited
    assert torch.equal(gpu.values(state["small"]), small)
    with gpu.stream(stream):
        checkpoint.load_state({"scaled": scaled})
    assert torch.equal(gpu.values(scaled.twice), 2 * small)


@on_simulated_gpu
def test_a_load_takes_neither_memory_of_the_gpu_nor_of_the_host_for_whole_tensors(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    whole = torch.arange(12_000_000.0).reshape(3000, 4000)
    checkpoint = stored(store, lambda _: {"it": gpu.on_device(whole), "strided": gpu.on_device(whole)})
    targets = {"it": torch.zeros_like(whole, device=gpu.DEVICE), "strided": gpu.on_device(torch.zeros(4000, 3000)).t()}
    sizes, made = [], HostMemory.__init__
    HostMemory.__init__ = lambda self, size: sizes.append(size) or made(self, size)
    gc.collect()
    gpu.host.locked_peak_bytes = sum(gpu.host.ranges.values())
    locked_before = gpu.host.locked_peak_bytes
    with gpu.memory.peak() as temporaries:
        checkpoint.load_state(targets)
    assert sizes == [8 * 4 * 2**20]
    assert gpu.host.locked_peak_bytes - locked_before == 8 * 4 * 2**20
    assert sum(gpu.host.ranges.values()) == locked_before  # given back
    assert 0 < temporaries.bytes <= 8 * 4 * 2**20  # of blocks for the strided one
    for target in targets.values():
        assert torch.equal(target.cpu(), whole)


@on_simulated_gpu
def test_options_and_steps_of_an_optimizer_are_on_the_device_where_it_wants_them(tmp_path):
    def make(lr, **options):
        model = torch.nn.ParameterDict({"scale": torch.ones((), device=gpu.DEVICE), "w": torch.ones(3, device=gpu.DEVICE)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr, device=gpu.DEVICE), foreach=False, **options)
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(5.0, device=gpu.DEVICE if options else "cpu"),
                "exp_avg": torch.ones_like(parameter),
                "exp_avg_sq": torch.ones_like(parameter),
            }
        return {"model": model, "optimizer": optimizer}

    for number, options in enumerate(({}, {"capturable": True})):
        store = CheckpointStore.open(tmp_path, f"run-{number}")
        checkpoint = stored(store, lambda _, options=options: make(0.5, **options))
        loaded = make(0.25, **options)
        loaded["optimizer"].state.clear()
        checkpoint.load_state(loaded)
        optimizer = loaded["optimizer"]
        assert optimizer.param_groups[0]["lr"].device == gpu.DEVICE
        assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.5)
        for state in optimizer.state.values():
            assert state["step"].device.type == (gpu.NAME if options else "cpu")
            assert state["exp_avg"].device == gpu.DEVICE


class Recurrent:
    """An object that keeps the hidden state of an LSTM as the LSTM returns it: a tuple."""

    def __init__(self, value):
        self.hidden = hidden(value)

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]


def hidden(value):
    return (torch.full((2, 3), value, device=gpu.DEVICE), torch.full((2, 3), value))


@on_simulated_gpu
def test_tensors_of_a_tuple_are_loaded_to_the_devices_of_those_that_it_has(tmp_path):
    def state(value):
        return {"hidden": hidden(value), "of each layer": [hidden(value)], "it": Recurrent(value)}

    loaded = state(0.0)
    stored(CheckpointStore.open(tmp_path, "run"), lambda _: state(2.0)).load_state(loaded)
    for found in (loaded["hidden"], loaded["of each layer"][0], loaded["it"].hidden):
        assert [it.device for it in found] == [gpu.DEVICE, torch.device("cpu")]
        assert all(bool((it.cpu() == 2).all()) for it in found)


@on_simulated_gpu
def test_tensors_of_an_empty_defaultdict_are_loaded_to_the_device_of_those_that_it_makes(tmp_path):
    sums, loaded = (defaultdict(lambda: torch.zeros(3, device=gpu.DEVICE)) for _ in range(2))
    sums["train"] += 2
    stored(CheckpointStore.open(tmp_path, "run"), lambda _: {"sums": dict(sums)}).load_state({"sums": loaded})
    assert loaded["train"].device == gpu.DEVICE
    assert loaded["train"].tolist() == [2, 2, 2]


class Average:
    """An object that keeps the tensors that it is given, small and large."""

    def __init__(self, value):
        self.shadow = {str(size): torch.full((size,), value, device=gpu.DEVICE) for size in (3, 100_000)}

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        self.shadow = dict(state)


@on_simulated_gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_tensors_of_an_object_are_loaded_into_those_that_it_has_on_the_gpu(world_size, tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    checkpoint = stored(store, lambda _: {"ema": Average(2.0)}, world_size)
    for average in (Average(0.0), Average(0)):  # of another dtype, too
        before = dict(average.shadow)
        checkpoint.load_state({"ema": average}, rank=0, world_size=world_size)
        for name, tensor in average.shadow.items():
            assert (tensor.device, tensor.dtype, tensor[0].item()) == (gpu.DEVICE, torch.float32, 2.0)
            assert before[name][0].item() == (2.0 if before[name].dtype == torch.float32 else 0)


class ReplayBuffer:
    """An object with tensors on the device that is iterated over as a list is."""

    def __init__(self, value):
        self.rewards = [torch.full((size,), value, device=gpu.DEVICE) for size in (3, 100_000)]

    def __getitem__(self, index):
        return self.rewards[index]

    def __iter__(self):
        return iter(self.rewards)

    def state_dict(self):
        return {"rewards": self.rewards}

    def load_state_dict(self, state):
        self.rewards = state["rewards"]


@on_simulated_gpu
def test_tensors_of_an_object_with_items_are_loaded_into_those_that_it_has_on_the_gpu(tmp_path):
    buffer = ReplayBuffer(0.0)
    before = list(buffer)
    stored(CheckpointStore.open(tmp_path, "run"), lambda _: {"buffer": ReplayBuffer(2.0)}).load_state({"buffer": buffer})
    for tensor, former in zip(buffer, before, strict=True):
        assert tensor.data_ptr() == former.data_ptr()
        assert (tensor.device, tensor[0].item()) == (gpu.DEVICE, 2.0)


MUTANTS = {
    "staging does not wait": (
        test_a_report_stores_the_values_of_its_call,
        Mutant("ckpt.state.staging.device_copies", "arrivals.callback(copied.synchronize)", "pass"),
    ),
    "the event is not recorded": (
        test_a_report_stores_the_values_of_its_call,
        Mutant("ckpt.state.staging.device_copies", "copied.record(streams.current_stream(device))", "pass"),
    ),
    "the event is recorded before the copies": (
        test_a_report_stores_the_values_of_its_call,
        Mutant(
            "ckpt.state.staging.device_copies",
            "copied = streams.Event()",
            "(copied := streams.Event()).record(); copied.record = lambda _: 0",
        ),
    ),
    "the event is recorded only after success": (
        test_a_copy_that_fails_leaves_none_under_way,
        Mutant(
            "ckpt.state.staging.device_copies",
            "            finally:  #",
            "            except ZeroDivisionError: pass\n            else:  #",
        ),
    ),
    "the event is recorded on another stream": (
        test_a_report_stores_the_values_of_the_current_stream,
        Mutant(
            "ckpt.state.staging.device_copies",
            "copied.record(streams.current_stream(device))",
            "copied.record(streams.Stream(device))",
        ),
    ),
    "copies have a stream of their own": (
        test_a_report_stores_the_values_of_its_call,
        Mutant(
            "ckpt.state.staging.device_copies",
            "                _copy(pairs, non_blocking=True)",
            "                with streams.stream(streams.Stream(device)): _copy(pairs, non_blocking=True)",
        ),
    ),
    "copies wait one by one": (
        test_a_report_waits_once_and_makes_no_stream,
        Mutant("ckpt.state.staging.device_copies", "_copy(pairs, non_blocking=True)", "_copy(pairs, non_blocking=False)"),
    ),
    "small tensors are not awaited": (
        test_tensors_that_no_module_holds_are_compared_by_the_gpu,
        Mutant(
            "ckpt.state.staging.device_copies",
            'torch.cat([bytes_of(tensors[place]) for place in places]).to("cpu"), 0',
            "torch.empty(sum(it.nbytes for it in tensors), dtype=torch.uint8), 0\n"
            "        raw.copy_(torch.cat([bytes_of(tensors[place]) for place in places]), non_blocking=True)",
        ),
    ),
    "torch conjugates the host's memory": (
        test_odd_tensors_are_stored_as_they_look,
        Mutant(
            "ckpt.state.staging.device_copies", "target.copy_(source.resolve_conj().resolve_neg(), ", "target.copy_(source, "
        ),
    ),
    "strided tensors are gathered whole": (
        test_a_report_takes_little_memory_of_the_gpu,
        Mutant("ckpt.state.staging.device_copies", "REGISTRATION_BYTES if is_plain else _STRIDED_BYTES", "REGISTRATION_BYTES"),
    ),
    "copies cross registrations": (
        test_no_copy_crosses_a_registration,
        Mutant("ckpt.state.staging.device_copies", "REGISTRATION_BYTES if is_plain else", "2**40 if is_plain else"),
    ),
    "loading does not wait for the current stream": (
        test_a_load_waits_for_the_current_stream_and_is_there_for_every_other,
        Mutant("ckpt.state.loading.read", "wait_for_current_streams(slots.devices)", "pass"),
    ),
    "loading waits for another stream": (
        test_a_load_waits_for_the_current_stream_and_is_there_for_every_other,
        Mutant(
            "ckpt.state.staging.device_copies",
            "streams.current_stream(device).synchronize()",
            "streams.Stream(device).synchronize()",
        ),
    ),
    "strided blocks are not awaited": (
        test_strided_tensors_are_there_for_every_stream_after_a_load,
        Mutant("ckpt.state.loading.tensor_blocks", "wait_for_current_streams([self.box.device])", "pass"),
    ),
    "what follows the reads is not awaited": (
        test_strided_tensors_are_there_for_every_stream_after_a_load,
        Mutant("ckpt.state.loading.load", "wait_for_current_streams(plan.devices)", "pass"),
    ),
    "blocks are still to be copied when their slot is reused": (
        test_a_load_takes_neither_memory_of_the_gpu_nor_of_the_host_for_whole_tensors,
        Mutant("ckpt.state.loading.tensor_blocks", "target.copy_(source)", "target.copy_(source, non_blocking=True)"),
    ),
    "memory that does not suffice is kept": (
        test_memory_is_locked_in_the_background_and_of_exact_size,
        Mutant("ckpt.state.staging.buffer", "memory.release()", "pass"),
    ),
    "memory is unmapped before it is unlocked": (
        test_locked_memory_is_not_given_to_forked_processes_and_is_unlocked_before_it_is_unmapped,
        Mutant(
            "ckpt.state.staging.host_memory", "weakref.finalize(self, _unregister", "weakref.finalize(self._pages, _unregister"
        ),
    ),
    "memory is locked on GPU 0": (
        test_memory_is_locked_in_the_background_and_of_exact_size,
        Mutant("ckpt.state.staging.host_memory", "with module.device(device):", "if True:"),
    ),
    "a refusal is left to the next kernel": (
        test_where_pages_cannot_be_locked_reports_go_on_with_one_warning,
        Mutant(
            "ckpt.state.staging.host_memory",
            "pool.submit(self._register, self._pages, device).result()",
            "self._register(self._pages, device)",
        ),
    ),
    "a refused part leaves the others locked": (
        test_where_pages_cannot_be_locked_reports_go_on_with_one_warning,
        Mutant("ckpt.state.staging.host_memory", "_unregister(device, registered, os.getpid())  #", "pass  #"),
    ),
    "locked memory is copied by forks": (
        test_locked_memory_is_not_given_to_forked_processes_and_is_unlocked_before_it_is_unmapped,
        Mutant("ckpt.state.staging.host_memory", "pages.madvise(mmap.MADV_DONTFORK)", "pass"),
    ),
    "options are built on the CPU": (
        test_options_and_steps_of_an_optimizer_are_on_the_device_where_it_wants_them,
        Mutant("ckpt.state.loading.optimizers", "where, _options_of(optimizer.param_groups[number], where))", "where, {})"),
    ),
    "the step of a scalar parameter is on the device": (
        test_options_and_steps_of_an_optimizer_are_on_the_device_where_it_wants_them,
        Mutant("ckpt.state.loading.optimizers", 'key == "step" and not has_step_on_device', "False"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_wait_that_is_missing_is_noticed(name, tmp_path):
    test, mutant = MUTANTS[name]
    more = {"world_size": 2} if "world_size" in test.__wrapped__.__code__.co_varnames[:2] else {}
    more |= {"what": "conjugated"} if "what" in test.__wrapped__.__code__.co_varnames[:2] else {}
    failure = failure_of(test, {"tmp_path": tmp_path, **more}, mutant)
    assert re.match("AssertionError|RuntimeError: CUDA error", (failure or "it passes").splitlines()[-1]), failure
