"""`load_state` into a GPU."""

import threading

import pytest
import torch
from gpu_states import GIB, SLEEP, Holder, resident_bytes
from prefect_torch.ckpt import RandomState, get_checkpoint, report
from ranks import Attempt, in_training
from torch import nn

pytestmark = pytest.mark.gpus(1)


def test_what_was_queued_on_the_callers_stream_comes_before_the_load(store):
    expected = torch.randn(4096, 4096)
    with in_training(Attempt(store).session()):
        report({}, state={"model": Holder(weight=expected.cuda())}, upload="sync")
    with in_training(Attempt(store).session()), torch.cuda.stream(torch.cuda.Stream()):
        into = Holder(weight=torch.empty(4096, 4096, device="cuda"))
        torch.cuda._sleep(SLEEP)
        into.weight.fill_(7.0)
        get_checkpoint().load_state({"model": into})
        loaded = into.weight.clone()
    torch.cuda.synchronize()
    assert torch.equal(loaded.cpu(), expected)


def test_a_load_takes_little_of_the_machines_memory(store, figure, timed):
    weight = torch.randn(GIB, device="cuda")  # 4 GiB
    with in_training(Attempt(store).session()):
        report({}, state={"model": Holder(weight=weight)}, upload="sync")
    into = Holder(weight=torch.empty_like(weight))
    before, peak, is_done = resident_bytes(), [0], threading.Event()

    def watch():
        while not is_done.wait(0.01):
            peak[0] = max(peak[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    with in_training(Attempt(store).session()):
        watcher.start()
        with timed("load of 4 GiB") as load:
            get_checkpoint().load_state({"model": into})
        is_done.set()
        watcher.join()
    figure("speed", 4 / load["s"], "GiB/s")
    figure("peak of the machine's memory", (peak[0] - before) / GIB, "GiB")
    assert torch.equal(into.weight, weight)
    assert peak[0] - before < GIB


def test_the_generator_of_the_gpu_draws_again_what_it_drew_after_the_report(store):
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    with in_training(Attempt(store).session()):
        report({}, state={"random": RandomState()}, upload="sync")
    drawn = torch.rand(1000, device="cuda"), torch.rand(10)
    with in_training(Attempt(store).session()):
        get_checkpoint().load_state({"random": RandomState()})
    assert torch.equal(torch.rand(1000, device="cuda"), drawn[0])
    assert torch.equal(torch.rand(10), drawn[1])


OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True),
    "a tensor as learning rate": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.01, device="cuda"), capturable=True
    ),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Training:
    """A training with mixed precision, the same bit for bit whenever it is repeated."""

    def __init__(self, make_optimizer):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
        self.model.register_parameter("scale", nn.Parameter(torch.ones((), device="cuda")))  # as CLIP's logit_scale
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
        self.state = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def step(self, number):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).cuda()
        with torch.autocast("cuda", torch.float16):
            loss = (self.model(batch) * self.model.scale).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_training_goes_on_as_if_undisturbed(store, kind):
    undisturbed = Training(OPTIMIZERS[kind])
    with in_training(Attempt(store).session()):
        for number in range(3):
            undisturbed.step(number)
        report({}, state=undisturbed.state, upload="sync")
    expected = [undisturbed.step(number) for number in range(3, 6)]
    resumed = Training(OPTIMIZERS[kind])
    with in_training(Attempt(store).session()):
        get_checkpoint().load_state(resumed.state)
        assert [resumed.step(number) for number in range(3, 6)] == expected
    for mine, other in zip(resumed.optimizer.param_groups, undisturbed.optimizer.param_groups, strict=True):
        if isinstance(other["lr"], torch.Tensor):
            assert mine["lr"].device == other["lr"].device
    for parameter, values in resumed.optimizer.state.items():
        steps = {name: value.device for name, value in values.items() if isinstance(value, torch.Tensor)}
        needs_gpu = kind in ("fused", "capturable", "a tensor as learning rate")
        assert "step" not in steps or (steps["step"].type == "cuda") == needs_gpu, (kind, parameter.shape)
