"""`report(state=...)` from a GPU: what is stored is what the tensors held, and the training is held up for little."""

import io

import pytest
import torch
from gpu_states import GIB, SLEEP, Holder, pinned_bytes, resident_bytes
from prefect_torch.ckpt import get_checkpoint, report
from ranks import Attempt, in_training
from torch import nn

pytestmark = pytest.mark.gpus(1)

FLOAT8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


def restore(store, state):
    """Load `state` from the latest checkpoint, as the next attempt would."""
    with in_training(Attempt(store).session()):
        get_checkpoint().load_state(state)
    return state


def content(tensor):
    """Return the bytes of a tensor in the order of its elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


@pytest.mark.parametrize("size", [64, 4096])
def test_a_report_holds_the_values_of_its_moment(store, size):
    model, other = nn.Linear(size, size, device="cuda"), torch.randn(size, size, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(other).square().mean().backward()
    with in_training(Attempt(store).session()):
        for _ in range(3):
            torch.cuda._sleep(SLEEP)
            with torch.no_grad():
                for _ in range(50):
                    model.weight.copy_((model.weight @ other).tanh())
            expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            report({}, state={"model": model, "optimizer": optimizer})
            optimizer.step()
            model.weight.data.zero_()
            torch.cuda._sleep(SLEEP)
    fresh = nn.Linear(size, size)
    restore(store, {"model": fresh})
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, expected[name].cpu()), name


ODD = {
    "conjugated": lambda: torch.randn(300, 300, dtype=torch.complex64, device="cuda").conj(),
    "negated": lambda: torch.randn(300, 300, dtype=torch.complex64, device="cuda").conj().imag,
    "channels_last": lambda: torch.randn(8, 64, 32, 32, device="cuda").to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(500, 300, device="cuda").t(),
    "expanded": lambda: torch.randn(300, 1, device="cuda").expand(300, 500),
    "sliced": lambda: torch.randn(600, 500, device="cuda")[::2, 1::3],
    "scalar": lambda: torch.tensor(3.5, device="cuda"),
    "empty": lambda: torch.empty(0, 7, device="cuda"),
    "bfloat16": lambda: torch.randn(300, 500, dtype=torch.bfloat16, device="cuda"),
    "bool": lambda: torch.rand(300, 500, device="cuda") > 0.5,
    **{str(dtype): lambda dtype=dtype: torch.randn(300, 500, device="cuda").to(dtype) for dtype in FLOAT8},
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", ["in a module", "alone"])
def test_odd_tensors_are_stored_as_they_are(store, kind, place):
    tensor = ODD[kind]()
    torch.cuda._sleep(SLEEP)
    state = {"it": Holder(tensor=tensor) if place == "in a module" else tensor}
    with in_training(Attempt(store).session()):
        report({}, state=state, upload="sync")
    for device in ("cpu", "cuda"):
        into = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        restored = restore(store, {"it": Holder(tensor=into) if place == "in a module" else into})["it"]
        restored = restored.tensor if place == "in a module" else restored
        assert restored.device.type == device
        assert torch.equal(content(restored), content(tensor))


def test_what_a_state_takes_of_the_machines_memory_is_its_size(store, figure, timed):
    """Also after it has grown: nothing of the first copy is left."""
    model = Holder(weight=torch.randn(3 * GIB // 4, device="cuda"))  # 3 GiB, no power of two
    before = resident_bytes()
    with in_training(Attempt(store).session()):
        for name in ("first report of 3 GiB", "second report of 3 GiB"):
            with timed(name):
                report({}, state={"model": model}, upload="async")
            report({}, upload="sync")
        taken = resident_bytes() - before
        model.register_buffer("grown", torch.randn(GIB // 2, device="cuda"))  # 2 GiB
        report({}, state={"model": model}, upload="sync")
        grown = resident_bytes() - before
    figure("machine's memory for 3 GiB", taken / GIB, "GiB")
    figure("machine's memory for 5 GiB", grown / GIB, "GiB")
    figure("in torch's pinned cache", pinned_bytes() / GIB, "GiB")
    assert taken <= 3.2 * GIB
    assert grown <= 5.2 * GIB
    assert pinned_bytes() <= 5.2 * GIB


def test_a_report_takes_no_memory_of_a_full_gpu(store):
    weights = [torch.randn(1024, 1024, 8, 8, device="cuda").to(memory_format=torch.channels_last) for _ in range(4)]
    model = Holder(**{f"weight{number}": weight for number, weight in enumerate(weights)})
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    filler = torch.empty(max(0, free - total // 20), dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    with in_training(Attempt(store).session()):
        for _ in range(40):
            report({}, state={"model": model})
            assert torch.cuda.memory_reserved() <= reserved + (64 << 20)
    del filler


def test_many_small_tensors_hold_a_report_up_for_little(store, figure, timed):
    tensors = {f"x{number}": torch.full((16,), float(number), device="cuda") for number in range(4000)}
    model = Holder(**tensors)
    with in_training(Attempt(store).session()):
        report({}, state={"model": model}, upload="sync")
        with timed("report of 4000 tensors") as reported:
            report({}, state={"model": model}, upload="async")
    with timed("torch.save of 4000 tensors") as saved:
        torch.save(model.state_dict(), io.BytesIO())
    with timed("one copy of 4000 tensors"):
        torch._foreach_copy_([torch.empty(16) for _ in tensors], list(tensors.values()))
    assert reported["s"] < saved["s"]


def test_a_report_copies_as_fast_as_the_bus_allows(store, figure, timed):
    weight = torch.randn(GIB, device="cuda")  # 4 GiB
    pinned = torch.empty(GIB, pin_memory=True)
    with in_training(Attempt(store).session()):
        for _ in range(2):  # the first copies make the memory resident
            report({}, state={"model": Holder(weight=weight)}, upload="sync")
            pinned.copy_(weight)
        with timed("bare pinned copy of 4 GiB") as bare:
            pinned.copy_(weight, non_blocking=True)
        with timed("report of 4 GiB") as reported:
            report({}, state={"model": Holder(weight=weight)}, upload="async")
    figure("share of a bare copy's speed", bare["s"] / reported["s"], "")
    assert reported["s"] <= bare["s"] / 0.8


def test_a_large_loose_tensor_is_copied_to_the_machine_once(store, figure, timed):
    average = torch.randn(GIB // 4, device="cuda")  # 1 GiB, given as a value and not as a module's
    with in_training(Attempt(store).session()):
        report({}, state={"ema": {"weight": average}}, upload="sync")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile, timed("report of a loose GiB"):
            report({}, state={"ema": {"weight": average}}, upload="async")
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    figure("copies to the machine", len(copies), "")
    figure("time of these", sum(event.device_time for event in copies) / 1e6, "s")
    assert 1 <= len(copies) <= 1 + GIB // (64 << 20)  # in pieces of 64 MiB, each once
