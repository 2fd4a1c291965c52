"""What a rank hands to the flow's process holds no tensor on a device."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import torch
from forked_programs import run_program
from prefect_torch.tasks.rank.program import call, cpu_pickle
from prefect_torch.tasks.rank.program.cpu_pickle import dump_on_cpu

SUPPORT = Path(__file__).parents[2] / "support"
DUMP = """
import sys
import pretended_gpus
pretended_gpus.hold_tensors()
import torch
from prefect_torch.tasks.rank.program import call, cpu_pickle
from prefect_torch.tasks.rank.program.cpu_pickle import dump_on_cpu

class MyError(Exception):
    pass

tensor = torch.arange(4.0).to("fakegpu")
assert tensor.device.type == "fakegpu"
sys.stdout.buffer.write(dump_on_cpu({"nested": [tensor, tensor], "error": MyError(tensor), "function": lambda: tensor}))
"""


def test_tensors_of_a_device_arrive_on_the_cpu_where_nobody_knows_the_device():
    environment = {**os.environ, "PRETENDED_GPUS": "1", "PRETENDED_MACHINE": "any", "PYTHONPATH": str(SUPPORT)}
    pickled = run_program([sys.executable, "-c", DUMP], env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert b"fakegpu" not in pickled
    value = pickle.loads(pickled)
    assert value["nested"][0] is value["nested"][1]
    for tensor in (value["nested"][0], value["error"].args[0], value["function"]()):
        assert tensor.device.type == "cpu"
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_lies_on_the_cpu_keeps_what_it_shares():
    model = torch.nn.Linear(2, 2)
    loaded = pickle.loads(dump_on_cpu([model, model.weight, model.state_dict(), lambda: 3]))
    assert loaded[0].weight is loaded[1]
    assert torch.equal(loaded[2]["weight"], model.weight)
    assert loaded[3]() == 3


class Named(torch.Tensor):
    """A subclass that holds its data itself, as torchvision's images do."""


def test_subclasses_bring_their_storage(monkeypatch):
    """The CPU stands for the device, since no subclass can be made of a pretended one's tensors."""
    asked = []
    monkeypatch.setattr(cpu_pickle, "_is_elsewhere", lambda data: asked.append(type(data)) or True)
    named = torch.arange(3.0).as_subclass(Named)
    parameter = torch.nn.Parameter(torch.arange(2.0))
    loaded = pickle.loads(dump_on_cpu([named, parameter]))
    assert (type(loaded[0]), loaded[0].tolist()) == (Named, [0.0, 1.0, 2.0])
    assert (type(loaded[1]), loaded[1].tolist()) == (torch.nn.Parameter, [0.0, 1.0])
    assert set(asked) == {torch.Tensor, torch.UntypedStorage}


def test_what_a_rank_returns_and_raises_goes_this_way(monkeypatch):
    monkeypatch.setattr(cpu_pickle, "_is_elsewhere", lambda data: True)
    asked = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: asked.append(tensor.tolist()) or tensor.clone())
    returned = call._dump_value({"weight": torch.ones(2)})
    raised = call.failure_of(ValueError("with a tensor", torch.zeros(2)), "user").exception
    assert asked == [[1.0, 1.0], [0.0, 0.0]]
    assert pickle.loads(returned)["weight"].tolist() == [1.0, 1.0]
    assert pickle.loads(raised).args[1].tolist() == [0.0, 0.0]


def test_of_a_returned_dict_what_cannot_be_pickled_is_dropped_alone(capsys):
    assert pickle.loads(call._dump_value({"loss": 0.5, "lock": threading.Lock()})) == {"loss": 0.5}
    assert capsys.readouterr().err.startswith("lock of the return value is dropped, since it cannot be pickled")
    assert call._dump_value({"lock": threading.Lock()}) is None
    assert capsys.readouterr().err.startswith("the return value is dropped, since it cannot be pickled")
