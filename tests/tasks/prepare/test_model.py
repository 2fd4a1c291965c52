"""Models of one rank, as if it were one of two; real ranks are in tests/flows/test_prepared_training.py."""

import subprocess
import sys

import pytest
import simulated_gpu as gpu
import torch
import torch.distributed as dist
from prefect_torch.tasks import get_device, prepare_model
from prefect_torch.tasks.prepare.model import _blocks
from simulated_processes import on_simulated_gpu
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class Tower(nn.Module):
    """Has blocks in containers, at several depths, and parameters outside of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])
        self.levels = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)]), nn.Identity()])
        self.neck = nn.Module()
        self.neck.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def blocks_of(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in _blocks(model)]


def test_blocks_are_the_items_of_the_outermost_containers_that_have_parameters():
    assert blocks_of(Tower()) == ["layers.0", "layers.1", "levels.0.0", "neck.head.0"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Tanh())) == ["0", "1"]
    assert blocks_of(nn.Linear(2, 2)) == []


def test_a_block_that_shares_a_parameter_with_anything_else_is_none():
    tower = Tower()
    tower.layers[0][0].weight = tower.layers[1][0].weight
    tower.neck.head[0] = tower.out = nn.Linear(4, 4)
    assert blocks_of(tower) == ["levels.0.0"]
    layer = nn.Linear(4, 4)
    assert blocks_of(nn.Sequential(layer, layer, nn.Linear(4, 4))) == ["2"]


def test_a_single_rank_keeps_its_model():
    model = nn.Linear(2, 1)
    assert prepare_model(model) is model
    assert prepare_model(model, parallel_strategy="fsdp2") is model
    assert type(model) is nn.Linear


@pytest.mark.parametrize("device", [torch.device("meta"), "meta"])
def test_a_model_moves_to_the_device_given(device):
    assert prepare_model(nn.Linear(2, 1), move_to_device=device).weight.is_meta
    assert not prepare_model(nn.Linear(2, 1), move_to_device=False).weight.is_meta
    assert get_device() == torch.device("cuda" if torch.cuda.is_available() else "cpu")


@on_simulated_gpu
def test_a_script_computes_on_the_gpu_of_any_type_that_torch_has():
    assert get_device() == gpu.DEVICE


@pytest.fixture
def one_of_eight():
    """Rank 0 of eight, the others of which only answer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def moved_wholes(monkeypatch):
    """The models that are moved as a whole."""
    moved, to = [], nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda model, *arguments: (moved.append(model), to(model, *arguments))[1])
    return moved


def test_a_model_is_sharded_block_by_block_and_never_moved_as_a_whole(one_of_eight, moved_wholes):
    tower = prepare_model(Tower(), parallel_strategy="fsdp2")
    assert moved_wholes == []
    assert [name for name, part in tower.named_modules() if isinstance(part, FSDPModule)] == ["", *blocks_of(Tower())]
    assert all(parameter.to_local().numel() <= 8 for parameter in tower.parameters())
    plain = prepare_model(Tower())
    assert moved_wholes == [plain.module]


def test_a_model_without_data_is_sharded_without_any(one_of_eight, moved_wholes):
    with torch.device("meta"):
        tower = Tower()
    assert prepare_model(tower, parallel_strategy="fsdp2") is tower
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in tower.parameters())
    tower.to_empty(device="cpu")
    assert {parameter.device.type for parameter in tower.parameters()} == {"cpu"}
    assert moved_wholes == []


class WithHead(nn.Module):
    """A head on a model, which has what the head lacks."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 1)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_what_passes_on_names_to_a_compiled_parallel_model_is_not_parallel_itself(one_of_eight):
    parallel = prepare_model(nn.Linear(4, 4))
    compiled = torch.compile(parallel, backend="eager")
    assert prepare_model(compiled) is compiled
    assert type(prepare_model(WithHead(compiled))) is type(parallel)


def test_a_single_rank_leaves_a_model_without_data_to_its_caller():
    with torch.device("meta"):
        tower = Tower()
    assert prepare_model(tower, parallel_strategy="fsdp2").embedding.weight.is_meta


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("zero", "parallel_strategy='zero': give 'ddp', 'fsdp2' or None"),
        ("fsdp", "parallel_strategy='fsdp': give 'fsdp2'"),
    ],
)
def test_an_unknown_strategy_is_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        prepare_model(nn.Linear(2, 1), parallel_strategy=strategy)


def test_preparing_imports_neither_prefect_nor_fsdp():
    """A script is imported in its flow's process, too, which trains no model."""
    program = (
        "import sys; from prefect_torch.tasks import get_device, prepare_data_loader, prepare_model; "
        "assert not {'prefect', 'torchdata', 'torch.distributed.fsdp', 'torch.distributed.tensor'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
