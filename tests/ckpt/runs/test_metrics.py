import enum
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt.runs.metrics import clean_metrics, find_metric, flatten_metrics, from_json, to_json, with_numbers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
nested = st.recursive(
    st.dictionaries(st.text(), leaves, max_size=4), lambda inner: st.dictionaries(st.text(), leaves | inner, max_size=4)
)


class Phase(str, enum.Enum):
    TRAIN = "train"


class Level(enum.IntEnum):
    HIGH = 3


class Ratio(float):
    pass


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(2.0), 2.0),
        (np.str_("x"), "x"),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(7), 7),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (np.float16(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (Phase.TRAIN, "train"),
        (Level.HIGH, 3),
        (Ratio(0.5), 0.5),
        (True, True),
        (10**400, 10**400),
        (None, None),
    ],
)
def test_a_scalar_becomes_a_plain_python_value(value, cleaned):
    result = clean_metrics({"m": value})["m"]
    assert result == cleaned
    assert type(result) is type(cleaned)


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(1), [1], (1,), {1, 2}, object(), 1j, b"x", np.complex64(1)])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ValueError, match="metric 'eval/loss' is of type"):
        clean_metrics({"eval": {"loss": value}})


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(2)])
def test_a_refused_array_is_named_with_its_shape(value):
    with pytest.raises(ValueError, match=rf"is of type {type(value).__name__} with the shape \(2,\); report numbers"):
        clean_metrics({"loss": value})


def test_what_contains_itself_is_refused_by_name():
    metrics: dict = {}
    metrics["again"] = metrics
    with pytest.raises(ValueError, match=r"metric 'again/again/.*contain itself"):
        clean_metrics(metrics)


def test_two_dicts_that_contain_each_other_are_refused_by_name():
    one: dict = {}
    one["two"] = {"one": one}
    with pytest.raises(ValueError, match=r"metric 'two/one/.*contain itself"):
        clean_metrics(one)


def test_one_dict_under_two_names_is_no_cycle():
    shared = {"loss": 1.0}
    assert clean_metrics({"a": shared, "b": shared}) == {"a": shared, "b": shared}


@pytest.mark.parametrize("metrics", [None, 3, [("loss", 1)], "loss"])
def test_metrics_are_a_dict(metrics):
    with pytest.raises(ValueError, match="must be a dict"):
        clean_metrics(metrics)


@pytest.mark.parametrize("name", [Phase.TRAIN, np.str_("train")])
def test_a_name_becomes_plain_text(name):
    [(cleaned, _)] = clean_metrics({name: 1}).items()
    assert cleaned == "train"
    assert type(cleaned) is str


@pytest.mark.parametrize("metrics", [{"__float__": 1}, {"eval": {"__float__": "nan"}}])
def test_the_tag_of_what_json_cannot_hold_is_no_name(metrics):
    with pytest.raises(ValueError, match="'__float__' is reserved"):
        clean_metrics(metrics)


@pytest.mark.parametrize(("metrics", "where"), [({1: 2.0}, ""), ({"eval": {1: 2.0}}, " in 'eval'")])
def test_a_name_is_a_string(metrics, where):
    with pytest.raises(ValueError, match=f"^the metric name 1{where} is no string: give '1'$"):
        clean_metrics(metrics)


def test_cleaned_metrics_do_not_change_with_the_callers():
    callers = {"eval": {"loss": 1.0}}
    cleaned = clean_metrics(callers)
    callers["eval"]["loss"] = 2.0
    assert cleaned == {"eval": {"loss": 1.0}}


@given(nested.filter(lambda metrics: "__float__" not in repr(metrics)))
def test_plain_metrics_are_cleaned_to_themselves(metrics):
    assert repr(clean_metrics(metrics)) == repr(metrics)


@given(nested)
def test_strict_json_holds_every_metric(metrics):
    text = json.dumps(to_json(metrics), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(metrics)


def test_an_infinity_survives_json():
    assert from_json(json.loads(json.dumps(to_json({"a": math.inf, "b": -math.inf}), allow_nan=False))) == {
        "a": math.inf,
        "b": -math.inf,
    }


def test_a_metric_is_found_by_name_first_and_by_path_then():
    assert find_metric({"a/b": 1, "a": {"b": 2}}, "a/b") == 1
    assert find_metric({"a": {"b": 2}}, "a/b") == 2
    assert find_metric({"a": 1}, "a/b") is None
    assert find_metric({}, "a") is None


@pytest.mark.parametrize(
    "metrics",
    [{"n": {"s": {"a": 5}}}, {"n": {"s/a": 5}}, {"n/s": {"a": 5}}, {"n/s/a": 5}, {"n": {}, "n/s": {"a": 5}}],
    ids=range(5),
)
def test_a_name_with_slashes_is_found_at_any_level(metrics):
    assert find_metric(metrics, "n/s/a") == 5
    assert find_metric(metrics, "n/s/b") is None


def test_a_number_is_found_before_a_dict_of_the_same_name():
    assert find_metric({"": {"a": 1}, "/a": {"": 2}}, "/a") == 1
    assert find_metric({"a": {"b": {"c": 1}}}, "a/b") == {"c": 1}
    assert find_metric({"": {"/": None}, "//": {"": 1}}, "//") is None


def test_nested_metrics_flatten_to_paths():
    assert dict(flatten_metrics({"loss": 1, "eval": {"top": {"k": 2}}})) == {"loss": 1, "eval/top/k": 2}


@given(st.recursive(leaves, lambda inner: st.dictionaries(st.text("ab/"), inner, min_size=1, max_size=3), max_leaves=8))
def test_every_flattened_name_finds_its_metric(value):
    metrics = {"m": value}
    flat = list(flatten_metrics(metrics))
    names = Counter(name for name, _ in flat)  # {"a": {"b": 1}, "a/b": 2} has two of one name
    assert all(repr(find_metric(metrics, name)) == repr(leaf) for name, leaf in flat if names[name] == 1)


@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.just("__float__"), inner), max_leaves=8))
def test_what_looks_like_the_tag_survives_json(value):
    assert repr(from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))) == repr(value)


def test_an_integer_that_nobody_can_print_is_refused():
    assert clean_metrics({"m": 2**13_999}) == {"m": 2**13_999}
    with pytest.raises(ValueError, match="metric 'a/m' is an integer of 16610 bits, and 14000 are the most"):
        clean_metrics({"a": {"m": 10**5000}})


@pytest.fixture
def mesh():
    """Return a mesh of two ranks, of which this process is the first and the other does nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


@pytest.mark.parametrize("read", [True, False])
def test_a_partial_sum_is_no_number_on_any_rank(mesh, read):
    part = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"metric 'norm' is a DTensor with .* still to be reduced: give its full_tensor\(\)"):
        clean_metrics({"norm": part}, read=read)
    with pytest.raises(ValueError, match="still to be reduced"):
        with_numbers({"norm": [part]})


def test_a_sum_that_every_rank_has_is_a_number(mesh):
    whole = DTensor.from_local(torch.tensor(1.0), mesh, [Replicate()], run_check=False)
    assert clean_metrics({"norm": whole}) == with_numbers({"norm": whole}) == {"norm": 1.0}
