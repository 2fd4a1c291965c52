"""Models of one rank, as if it were one of two; real ranks are in tests/flows/test_prepared_training.py."""

import subprocess
import sys

import pytest
import torch
from prefect_torch.tasks import get_device, prepare_model
from prefect_torch.tasks.prepare.model import _blocks
from torch import nn


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


def test_preparing_imports_no_prefect():
    program = (
        "import sys; from prefect_torch.tasks import get_device, prepare_data_loader, prepare_model; "
        "assert not {'prefect', 'torchdata'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
