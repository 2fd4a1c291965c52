"""A device "simgpu" in this process, whose streams run as late as their edges allow: nothing before something waits for it.

It has what a wrong wait needs in order to be seen. Kernels are queued, also those of copies marked as non-blocking, and read
their memory when they run. Each thread has a current stream of its own. Memory that is freed is handed at once to the next
allocation on its stream. Copies follow ATen/native/cuda/Copy.cu: of strided tensors by a temporary on the device, and of
conjugated views by conjugating the host's memory before the bytes have arrived. cudaHostRegister page-locks memory of the host,
and the next kernel of the thread raises its errors; a copy must lie in one registered range or in none.

PrivateUse1 can be registered once in a process and remains: run such code in a process of its own (`simulated`).
"""

import contextlib
import functools
import math
import threading
from collections import Counter
from types import SimpleNamespace

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

PAGE_BYTES = 4096
NAME = "simgpu"
DEVICE = torch.device("cpu")  # this device, once it is registered

_DEVICE_TYPE = 20  # PrivateUse1 in c10/core/DeviceType.h
counts = Counter()  # synchronize, kernels, events, streams
_lock = threading.RLock()
_of_thread = threading.local()


_streams = []


class Stream(torch.Stream):
    """A queue of kernels."""

    def __new__(cls, device=None, priority=0):
        with _lock:
            stream = super().__new__(cls, stream_id=len(_streams), device_index=0, device_type=_DEVICE_TYPE)
            _streams.append(stream)
        return stream

    def __init__(self, device=None, priority=0):
        counts["streams"] += 1
        self._queue = []
        self._num_begun = 0

    def put(self, kernel):
        with _lock:
            self._queue.append(kernel)

    def run(self, until):
        with _lock, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            while self._num_begun < until:
                kernel, self._queue[self._num_begun] = self._queue[self._num_begun], None
                self._num_begun += 1
                kernel()

    def synchronize(self):
        counts["synchronize"] += 1
        self.run(len(self._queue))

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.put(event.run)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._stream, self._until = None, 0

    def record(self, stream=None):
        counts["events"] += 1
        self._stream = stream or current_stream()
        self._until = len(self._stream._queue)

    def run(self):
        if self._stream is not None:
            self._stream.run(self._until)

    def synchronize(self):
        counts["synchronize"] += 1
        self.run()

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def query(self):
        return self._stream is None or self._stream._num_begun >= self._until


_default = Stream()


def current_stream(device=None):
    return getattr(_of_thread, "stream", _default)


@contextlib.contextmanager
def stream(chosen):
    before = current_stream()
    _of_thread.stream = chosen
    try:
        yield
    finally:
        _of_thread.stream = before


@contextlib.contextmanager
def device(index):
    before = getattr(_of_thread, "has_device", False)
    _of_thread.has_device = True
    try:
        yield
    finally:
        _of_thread.has_device = before


def fail_after(num_kernels):
    """Have this thread's launch after so many others raise."""
    _of_thread.left = num_kernels


def _launch(kernel, host_tensor=None):
    error = getattr(_of_thread, "error", 0)
    _of_thread.left = getattr(_of_thread, "left", math.inf) - 1
    if error or _of_thread.left == -1:
        _of_thread.error = 0
        raise RuntimeError(f"CUDA error {error} of an earlier call in this thread")
    counts["kernels"] += 1
    if host_tensor is not None:
        host.in_flight[id(host_tensor)] = host_tensor.range
    current_stream().put(kernel)


class _Block:
    """Memory of a stream, in use until its storage is freed and the work is done that other streams had for it then."""

    def __init__(self, storage, raw, stream):
        self.storage, self.bytes = StorageWeakRef(storage), storage.nbytes()
        self.raw, self._stream, self._recorded, self._until = raw, stream, [], None

    def is_free_for(self, stream, wanted):
        if stream is not self._stream or self.raw.numel() < wanted or not self.storage.expired():
            return False
        if self._until is None:
            self._until = [(recorded, len(recorded._queue)) for recorded in self._recorded]
        return all(recorded._num_begun >= until for recorded, until in self._until)

    def record(self, stream):
        self._recorded.append(stream)


class Memory:
    """The device's memory: blocks, each of the stream that it was allocated on."""

    def __init__(self):
        self._blocks = {}
        self.peak_bytes = 0

    @property
    def live_bytes(self):
        return sum(block.bytes for block in self._blocks.values() if not block.storage.expired())

    def allocate(self, size, stride, dtype, *, fresh=False):
        tensor = torch._C._acc.create_empty_tensor(tuple(size), dtype)
        storage = tensor.untyped_storage()
        at = 0, tuple(size), tuple(stride)
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(DispatchKeySet(DispatchKey.Meta), tensor, storage, *at)
        with _lock, torch.inference_mode(False):
            wanted, mine = storage.nbytes(), current_stream()
            freed = () if fresh else self._blocks.items()
            free = next((key for key, block in freed if block.is_free_for(mine, wanted)), None)
            garbage = (
                torch.full((wanted,), 0xAB, dtype=torch.uint8, device="cpu") if free is None else self._blocks.pop(free).raw
            )
            self._blocks[storage._cdata] = _Block(storage, garbage, mine)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def block(self, tensor):
        return self._blocks[tensor.untyped_storage()._cdata]

    def of(self, tensor):
        """Return the memory behind a tensor, which holds its values once the streams have run."""
        raw = self.block(tensor).raw.untyped_storage()
        return _within(raw, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def address(self, storage):
        return self._blocks[storage._cdata].raw.data_ptr()

    @contextlib.contextmanager
    def peak(self):
        """Yield an object whose `bytes` are, in the end, those of temporaries: the most that were in use, less those before."""
        before, found = self.live_bytes, SimpleNamespace(bytes=None)
        self.peak_bytes = before
        yield found
        found.bytes = self.peak_bytes - before


memory = Memory()


class HostRegistrations:
    """cudaHostRegister and cudaHostUnregister, with CUDA's error codes."""

    def __init__(self):
        self.ranges, self.in_flight = {}, {}
        self.threads = []  # of each call, with its name
        self.refuse_from = math.inf
        self.locked_peak_bytes = 0

    def cudaHostRegister(self, start, size, flags):  # noqa: N802 - CUDA's name
        assert getattr(_of_thread, "has_device", False), "would make a context on the thread's current device, GPU 0"
        assert flags == 1
        assert start % PAGE_BYTES == 0
        assert _is_mapped(start, size)
        with _lock:
            self.threads.append(("register", threading.current_thread()))
            if sum(name == "register" for name, _ in self.threads) > self.refuse_from:
                return self._failed(2)
            if self._touching(start, size):
                return self._failed(712)
            self.ranges[start] = size
            self.locked_peak_bytes = max(self.locked_peak_bytes, sum(self.ranges.values()))
            return 0

    def cudaHostUnregister(self, start):  # noqa: N802 - CUDA's name
        assert getattr(_of_thread, "has_device", False), "would make a context on the thread's current device, GPU 0"
        with _lock:
            self.threads.append(("unregister", threading.current_thread()))
            if start not in self.ranges:
                return self._failed(713)
            size = self.ranges.pop(start)
            assert _is_mapped(start, size), "unmapped before it was unregistered"
            assert not any(low < start + size and start < high for low, high in self.in_flight.values()), "copies are under way"
            return 0

    def _failed(self, code):
        _of_thread.error = code
        return code

    def _touching(self, start, size):
        return [(low, low + length) for low, length in self.ranges.items() if low < start + size and start < low + length]

    def check(self, tensor):
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        touching = self._touching(start, end - start)
        if touching and (len(touching) > 1 or touching[0][0] > start or touching[0][1] < end):
            raise RuntimeError("CUDA error: invalid argument: a copy within more than one registration")


host = HostRegistrations()


def _is_mapped(start, size):
    at = start
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - not a file
        for line in maps:
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            if low <= at < high:
                at = high
    return at >= start + size


class _HostTensor:
    """A tensor of the host that a queued copy uses, and does not keep alive."""

    def __init__(self, tensor):
        host.check(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._at = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.range = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def take(self):
        del host.in_flight[id(self)]
        assert not self._storage.expired(), "the host's memory was freed before a copy"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return _within(storage, self._dtype, *self._at)


def _within(storage, dtype, *at):
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *at)


def is_simulated(tensor):
    return tensor.device.type == NAME


def _copy_from(source, target, non_blocking=False):
    if is_simulated(source) and is_simulated(target):
        read, write, flags = memory.of(source), memory.of(target), (source.is_conj(), source.is_neg())
        _launch(lambda: write.copy_(_as_seen(read, *flags)))
    elif is_simulated(source):
        _copy_to_host(source, target, non_blocking)
    else:
        _copy_to_device(source, target, non_blocking)
    return target


def _as_seen(raw, is_conj, is_neg):
    raw = raw.conj_physical() if is_conj else raw
    return raw.neg() if is_neg else raw


def _needs_no_temporary(source, target):
    dense = source.is_contiguous() and target.is_contiguous()
    return source.dtype == target.dtype and source.shape == target.shape and (dense or _is_dense_like(source, target))


def _is_dense_like(source, target):
    extent = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)) + 1
    return source.stride() == target.stride() and extent == source.numel()


def _copy_to_host(source, target, non_blocking):
    whole = source.expand(target.shape)
    if not _needs_no_temporary(whole, target):
        gathered = memory.allocate(whole.shape, _dense_stride(whole.shape), source.dtype)
        strided, dense = memory.of(whole), memory.of(gathered)
        _launch(lambda: dense.copy_(strided))
    else:
        gathered = whole
    direct = gathered is whole or (target.is_contiguous() and target.dtype == source.dtype)
    arrived = target if direct else torch.empty(whole.shape, dtype=source.dtype, device="cpu")
    read, into = memory.of(gathered), _HostTensor(arrived)
    _launch(lambda: into.take().copy_(read), into)
    if not non_blocking:
        current_stream().synchronize()
    if not direct:
        target.copy_(arrived)  # at once, as torch does
    if source.is_conj() != target.is_conj():
        target.copy_(target.clone().conj_physical())
    if source.is_neg() != target.is_neg():
        target.neg_()


def _copy_to_device(source, target, non_blocking):
    source = source.resolve_conj().resolve_neg().to(target.dtype).expand(target.shape)
    direct = _needs_no_temporary(source, target)
    source = source if direct else source.contiguous()
    read = _HostTensor(source)
    if direct or target.is_contiguous():
        write = memory.of(target)
        _launch(lambda: write.copy_(read.take()), read)
        if not non_blocking:
            current_stream().synchronize()
    else:
        dense = memory.allocate(target.shape, _dense_stride(target.shape), target.dtype)
        arrived, write = memory.of(dense), memory.of(target)
        _launch(lambda: arrived.copy_(read.take()), read)
        if not non_blocking:
            current_stream().synchronize()
        _launch(lambda: write.copy_(arrived))  # within the device: whatever `non_blocking` is, nothing waits for it


def _dense_stride(shape):
    return torch.empty(tuple(shape), device="meta").stride()


def _fallback(op, *args, **kwargs):
    """Queue an operation: on tensors of the device, with its results in new ones, or in those that it writes to."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    wanted = op._schema.arguments  # numbers come for tensors of no dimension
    args = [
        torch.tensor(it) if str(of.type) == "Tensor" and isinstance(it, (int, float)) else it
        for of, it in zip(wanted, args, strict=False)  # some have a default
    ]
    behind = tree_map_only(torch.Tensor, lambda it: memory.of(it) if is_simulated(it) else it.clone(), (args, kwargs))
    written = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if written:
        _launch(lambda: op(*behind[0], **behind[1]))
        given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        return given[written[0]] if len(op._schema.returns) else None
    shapes = tree_map_only(torch.Tensor, _meta, (args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    if not any("Tensor" in str(it.type) for it in op._schema.returns):
        current_stream().synchronize()
        return op(*behind[0], **behind[1])
    results = tree_map_only(
        torch.Tensor, lambda it: memory.allocate(it.shape, it.stride(), it.dtype), op(*shapes[0], **shapes[1])
    )
    into = [memory.of(it) for it in tree_flatten(results)[0]]

    def kernel():
        for write, value in zip(into, tree_flatten(op(*behind[0], **behind[1]))[0], strict=True):
            write.copy_(value)

    _launch(kernel)
    return results


def _meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty(size, *, dtype=None, memory_format=None, **_):
    shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return memory.allocate(size, shape.stride(), dtype or torch.get_default_dtype())


def _empty_strided(size, stride, *, dtype=None, **_):
    return memory.allocate(size, stride, dtype or torch.get_default_dtype())


def _item(tensor):
    current_stream().synchronize()
    return memory.of(tensor).item()


def _viewed_by(op):
    return lambda *args, **kwargs: op.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)  # as for any strided tensor


def _record_stream(tensor, stream):
    memory.block(tensor).record(_streams[stream.stream_id])


def _synchronize(device=None):
    for each in _streams:
        each.synchronize()


def _copied_deeply(usual):
    """Return torch's `__deepcopy__`, which would copy the storage's memory, of which this device's have none."""

    def copied(tensor, memo):
        if not is_simulated(tensor):
            return usual(tensor, memo)
        if id(tensor) not in memo:
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else copy
        return memo[id(tensor)]

    return copied


def _address(usual):
    return lambda storage: memory.address(storage) if storage.device.type == NAME else usual(storage)


class Generator:
    """The state of the device's random generator, as torch's modules of devices give and take it."""

    def __init__(self):
        self.state = torch.zeros(16, dtype=torch.uint8, device="cpu")

    def get_rng_state(self, device=None):
        return self.state.clone()

    def set_rng_state(self, state, device=None):
        self.state = state.clone()


generator = Generator()

_libraries = []


def register():
    """Register the device, once in a process, and return it."""
    global DEVICE  # noqa: PLW0603 - there is none before
    state = {"is_initialized": True, "is_available": True, "current_device": 0, "device_count": 1, "_is_in_bad_fork": False}
    module = SimpleNamespace(**{name: lambda value=value: value for name, value in state.items()})
    module.manual_seed_all = lambda seed: None
    module.set_device = lambda device: None  # there is one
    module.mem_get_info = lambda device=None: (2**40 - memory.live_bytes, 2**40)
    module.get_rng_state, module.set_rng_state = generator.get_rng_state, generator.set_rng_state
    module.__name__ = f"torch.{NAME}"
    for function in (Stream, Event, current_stream, stream, device):
        setattr(module, function.__name__, function)
    module.synchronize, module.cudart = _synchronize, lambda: host
    _setup_privateuseone_for_python_backend(NAME, module)
    aten = torch.library.Library("aten", "IMPL")
    any_other = torch.library.Library("_", "IMPL")
    any_other.fallback(_fallback, "PrivateUse1")
    for op in (torch.ops.aten.as_strided.default, torch.ops.aten.view.default, torch.ops.aten._reshape_alias.default):
        aten.impl(op, _viewed_by(op), "PrivateUse1")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("_local_scalar_dense", _item, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("record_stream", _record_stream, "PrivateUse1")
    for overload in ("default", "start", "start_step"):
        made = getattr(torch.ops.aten.arange, overload)
        aten.impl(made, functools.partial(_fallback, made), "PrivateUse1")
    for flag in ("Conjugate", "Negative"):
        aten.impl("_copy_from", torch.library.fallthrough_kernel, flag)
    _libraries.extend((aten, any_other))
    torch.Tensor.__deepcopy__ = _copied_deeply(torch.Tensor.__deepcopy__)
    torch.UntypedStorage.data_ptr = _address(torch.UntypedStorage.data_ptr)
    DEVICE = torch.device(NAME, 0)
    torch.set_num_threads(1)  # processes are forked from this one
    return DEVICE


def on_device(tensor):
    """Return a tensor of the device with the same values, shape and strides, all of them in place."""
    # Fresh memory, since it is written at once: kernels of a block's last owner may still be queued.
    placed = memory.allocate(tensor.shape, tensor.stride(), tensor.dtype, fresh=True)
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel():  # as one line: elements may share memory
        memory.of(placed).as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,)))
    return placed


def values(tensor):
    """Return a tensor's values as they are now in memory, whatever is queued."""
    return _as_seen(memory.of(tensor).clone(), tensor.is_conj(), tensor.is_neg())
