"""What is recorded of a return value, and comes from a rank on another machine."""

import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from prefect_torch.ckpt.runs.metrics import from_json
from prefect_torch.tasks.rank.plain_result import decode_result, encode_result, encode_value
from prefect_torch.tasks.rank.spec import RankResult
from prefect_torch.tasks.training.outcomes import recorded_value
from trainings import Unloadable

CONTAINS_ITSELF = {"a": 1}
CONTAINS_ITSELF["itself"] = CONTAINS_ITSELF


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (
            {"score": np.float32(0.5), "n": np.int64(3), "nested": [torch.tensor(0.25), (1,)]},
            {"score": 0.5, "n": 3, "nested": [0.25, [1]]},
        ),
        ({"score": 0.9, "model": torch.nn.Linear(1, 1), "curve": np.ones(2)}, {"score": 0.9}),
        ({"loss": math.inf}, {"loss": math.inf}),
        (torch.tensor(True), True),
        (None, None),
        (torch.ones(2), None),
        ({"model": object()}, None),
        ({"lost": torch.empty((), device="meta"), "kept": 1}, {"kept": 1}),
        (CONTAINS_ITSELF, {"a": 1}),
    ],
)
def test_what_json_can_hold_of_a_return_value_is_recorded(value, recorded):
    encoded = encode_value(value)
    assert (None if encoded is None else from_json(json.loads(encoded))) == recorded


def test_an_outcome_is_no_place_for_models():
    assert recorded_value(["x" * 1000] * 2000) is None
    assert recorded_value(["x" * 1000]) == ["x" * 1000]
    large = {"loss": math.inf, "curve": [0.5] * 300_000, "text": "x" * 2**20, "f1": 0.9}
    assert recorded_value(large) == {"loss": math.inf, "f1": 0.9}


def test_what_json_can_hold_of_a_return_value_comes_from_another_machine(capsys):
    returned = {"score": np.float32(0.5), "infinite": math.inf, "model": object}
    encoded = encode_result(RankResult(return_value=pickle.dumps(returned)))
    assert pickle.loads(decode_result(encoded).return_value) == {"score": 0.5, "infinite": math.inf}
    assert capsys.readouterr().out == ""
    encoded = encode_result(RankResult(return_value=pickle.dumps(object)))
    assert pickle.loads(decode_result(encoded).return_value) is None
    assert capsys.readouterr().out.startswith("the return value is dropped: from another machine")


def test_a_return_value_that_cannot_be_rebuilt_is_dropped_and_not_the_training(capsys):
    encoded = encode_result(RankResult(return_value=pickle.dumps(Unloadable())))
    assert decode_result(encoded).return_value == pickle.dumps(None)
    assert "RuntimeError('cannot be rebuilt')" in capsys.readouterr().out


@pytest.mark.parametrize("call", [Path.read_text, os.listdir, lambda path: path.rename("b")])
def test_an_error_about_a_file_on_another_machine_names_it(tmp_path, call):
    with pytest.raises(FileNotFoundError) as caught:
        call(tmp_path / "a")
    encoded = encode_result(RankResult(kind="user", exception=pickle.dumps(caught.value)))
    rebuilt = pickle.loads(decode_result(encoded).exception)
    assert (type(rebuilt), str(rebuilt)) == (FileNotFoundError, str(caught.value))
    assert str(tmp_path / "a") in str(rebuilt)


class Number:
    """Looks like a tensor of one number, and is none."""

    ndim = 0

    def item(self):
        raise AttributeError("no such thing")


def test_what_a_value_raises_when_it_is_read_costs_that_value():
    assert encode_value({"score": 0.5, "odd": Number()}) == '{"score": 0.5}'
