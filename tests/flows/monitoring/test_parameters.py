"""What a person sees of the parameters of a call, whatever they are."""

import enum
import json
import math
import pickle
from argparse import Namespace
from array import array
from collections import UserDict, UserList, deque
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prefect_torch.ckpt import Checkpoint, RetentionPolicy
from prefect_torch.flows import ScalingConfig, train
from prefect_torch.flows.monitoring.parameters import as_shown
from pydantic import BaseModel

CIRCLE = {"a": [1]}
CIRCLE["a"].append(CIRCLE)
DEEP = []
for _ in range(5000):
    DEEP = [DEEP]


class Pairs(torch.utils.data.Dataset):
    """A dataset whose samples `dict` takes for pairs of keys and values."""

    def __getitem__(self, index):
        raise AssertionError("a sample is read")


class Loader(BaseModel):
    source: object


@dataclass
class Login:
    user: str
    password: str = field(repr=False)


class Seed(int):
    """An int as of ruamel.yaml."""


class Incomplete(UserDict):
    """A mapping with a value that is asked for, and missing, as an OmegaConf may have one."""

    def __getitem__(self, key):
        raise ValueError(f"missing value: {key}")


class IncompleteList(UserList):
    """A list with a value that is asked for, and missing."""

    def __iter__(self):
        raise ValueError("missing value: 0")


class Settings:
    """An object whose unknown attributes are keys that are missing."""

    def __getattr__(self, name):
        raise KeyError(name)


class Loss(enum.Enum):
    L1 = "l1"
    OBJECT = object()


def function():
    pass


SHOWN = [
    (2**64 - 1, 2**64 - 1),
    (2**64, str(2**64)),
    (-(2**63) - 1, str(-(2**63) - 1)),
    (10**5000, hex(10**5000)),
    (Seed(5), 5),
    (Seed(2**64), str(2**64)),
    (math.nan, "nan"),
    (-math.inf, "-inf"),
    ("caf\udce9\0", "caf\\udce9\\x00"),
    ((1, {2}), [1, [2]]),
    ({1: None, "\ud800": True, (2, 3): 4}, {"1": None, "\\ud800": True, "[2, 3]": 4}),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (torch.tensor(0.5), 0.5),
    (torch.empty((), device="meta"), "<torch.Tensor>"),
    (torch.zeros(3), "<torch.Tensor>"),
    (np.zeros(3), "<numpy.ndarray>"),
    (Pairs(), f"<{__name__}.Pairs>"),
    (torch.nn.Linear(1, 1), "<torch.nn.modules.linear.Linear>"),
    (torch.float16, "torch.float16"),
    (torch.device("cpu"), "cpu"),
    (Loss.L1, "l1"),
    (Loss.OBJECT, "<object>"),
    (Namespace(lr=0.1), {"lr": 0.1}),
    (SimpleNamespace(lr=0.1), {"lr": 0.1}),
    (RetentionPolicy, f"{RetentionPolicy.__module__}:RetentionPolicy"),
    (partial(function, 1), f"{__name__}:function"),
    (lambda: None, f"{__name__}:<lambda>"),
    (b"x", "<bytes>"),
    (Settings(), f"<{__name__}.Settings>"),
    (Incomplete(lr=None), f"<{__name__}.Incomplete>"),
    (UserList([64, {"a": deque([0.5])}]), [64, {"a": [0.5]}]),  # as OmegaConf has its lists
    (IncompleteList([None]), f"<{__name__}.IncompleteList>"),
    (array("d", [1]), "<array.array>"),
    (Loader(source=2**64), {"source": str(2**64)}),
    (Loader(source="a\0"), {"source": "a\\x00"}),
    (Loader(source=Pairs()), f"<{__name__}.Loader>"),
    (Path("caf\udce9"), "caf\\udce9"),
    (Decimal("inf"), "inf"),
    (CIRCLE, {"a": [1, "<dict>"]}),
]


@pytest.mark.parametrize(("value", "shown"), SHOWN, ids=range(len(SHOWN)))
def test_a_value_is_shown_as_json_or_by_its_name(value, shown):
    assert as_shown({"x": [value]}) == {"x": [shown]}
    assert json.dumps(as_shown(value), allow_nan=False).encode()


def test_what_prefect_encodes_itself_stays_as_it_is():
    given = {"scaling": ScalingConfig(num_workers=2), "path": Path("/a"), "time": timedelta(1)}
    assert as_shown(given) == given
    assert train.serialize_parameters({"config": given})["config"] == {
        "scaling": {"num_workers": 2, "use_gpu": False},
        "path": "/a",
        "time": 86400.0,
    }


def test_a_checkpoint_is_shown_as_its_path(tmp_path):
    assert train.serialize_parameters({"resume_from": Checkpoint(tmp_path)}) == {"resume_from": str(tmp_path)}


def test_a_dataclass_is_shown_with_the_fields_that_its_text_has():
    assert as_shown(RetentionPolicy(3))["num_to_keep"] == 3
    assert as_shown(Login("me", "hidden")) == {"user": "me"}


def test_any_depth_is_shown():
    assert len(pickle.dumps(as_shown(DEEP))) < 1000
