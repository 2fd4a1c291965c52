"""NumPy's arrays and scalars in a state come back as what they were: their type, dtype, shape and bytes."""

import copy
import json

import numpy as np
import pytest
import torch
from prefect_torch.ckpt import CheckpointCorruptError, RankLocal, StateMismatchError
from ranks import Attempt
from states import check_equal

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def report(store, state, world_size=1):
    """Report what `state(rank)` returns."""
    assert Attempt(store, world_size).run(lambda session, rank: session.report({}, state=state(rank))) == [None] * world_size


def load(store, state, rank=0, world_size=1, **arguments):
    store.checkpoint(store.latest()).load_state(state, rank=rank, world_size=world_size, **arguments)
    return state


def check_same(found, expected):
    assert type(found) is type(expected)
    assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_into_nothing_and_into_the_memory_of_an_array(store, dtype):
    small, large = ((np.arange(count) % 100).reshape(2, -1).astype(dtype) for count in (6, 90_000))
    report(
        store,
        lambda _: {"small": small, "large": large, "scalar": small[1, 2], "empty": small[:0], "0-d": np.array(small[0, 1])},
    )
    found = load(store, {"small": None, "large": None, "scalar": None, "empty": None, "0-d": None})
    for name, expected in {
        "small": small,
        "large": large,
        "scalar": small[1, 2],
        "empty": small[:0],
        "0-d": np.array(small[0, 1]),
    }.items():
        check_same(found[name], expected)
    targets = {"small": np.zeros_like(small), "large": np.zeros_like(large)}
    found = load(store, dict(targets))
    assert all(found[name] is target for name, target in targets.items())
    check_same(targets["small"], small)
    check_same(targets["large"], large)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_of_scalars_is_one_tensor(store, dtype):
    """As a history of means; a list of several types is stored item by item."""
    short, long = (list((np.arange(count) % 100).astype(dtype)) for count in (3, 90_000))
    mixed = [np.float32(1), np.float64(2), 3.0]
    report(store, lambda rank: {"short": short[rank:], "long": long, "mixed": mixed}, 2)
    for target in ([], [0.0], short, [np.float16(1), "text"], None):
        found = load(store, {name: copy.copy(target) for name in ("short", "long", "mixed")}, 1, 2)
        for name, expected in {"short": short[1:], "long": long, "mixed": mixed}.items():
            assert type(found[name]) is list
            assert [(type(it), it) for it in found[name]] == [(type(it), it) for it in expected]
    with pytest.raises(StateMismatchError, match="'long' is one value in the checkpoint, without the items of the list"):
        load(store, {"long": [torch.zeros(3)]}, 1, 2)
    files = store.latest().files
    assert not any("long." in entry.path for entry in files)
    assert sum(entry.bytes for entry in files) < 2 * np.array(long).nbytes + 100_000


def test_they_are_found_in_containers_and_states_of_objects(store):
    class Counter:
        def __init__(self):
            self.counts = np.zeros(3)

        def state_dict(self):
            return {"counts": self.counts, "best": [np.float32(0.5), {"at": np.int64(7)}]}

        def load_state_dict(self, state):
            self.state = state

    counter, other = Counter(), Counter()
    counter.counts += [1, 2, 3]
    report(store, lambda _: {"counter": counter, "list": [np.ones(2), 1, "a"], "by number": {7: np.bool_(True)}})
    found = load(store, {"counter": other, "list": [np.zeros(2), 0, ""], "by number": {}})
    check_same(other.state["counts"], counter.counts)
    check_same(other.state["best"][0], np.float32(0.5))
    check_same(other.state["best"][1]["at"], np.int64(7))
    check_same(found["list"][0], np.ones(2))
    assert found["list"][1:] == [1, "a"]
    check_same(found["by number"][7], np.bool_(True))


def test_ranks_keep_their_own_where_they_differ_and_share_what_is_equal(store):
    def state(rank):
        return {
            "own": np.arange(3) + rank,
            "large": np.full((300, 200), float(rank)),
            "same": np.ones(4),
            "marked": RankLocal(np.int8(rank)),
        }

    report(store, state, 2)
    for rank in range(2):
        fresh = {"own": np.zeros(3, int), "large": np.zeros((300, 200)), "same": None, "marked": RankLocal(None)}
        found = load(store, fresh, rank, 2)
        check_same(found["own"], np.arange(3) + rank)
        check_same(found["large"], np.full((300, 200), float(rank)))
        check_same(found["same"], np.ones(4))
        check_same(found["marked"].value, np.int8(rank))
    found = load(store, {"own": np.zeros(3, int)}, rank_local=lambda name, values, rank, world_size: sum(values))
    check_same(found["own"], np.array([1, 3, 5]))


@pytest.mark.parametrize("view", ["read-only", "reversed", "transposed", "every other", "a file's"])
def test_views_are_stored_by_their_elements_without_a_warning(store, tmp_path, view):
    whole = np.arange(24.0).reshape(4, 6)
    array = {"reversed": whole[::-1], "transposed": whole.T, "every other": whole[:, ::2]}.get(view, whole)
    if view == "read-only":
        array.flags.writeable = False
    if view == "a file's":
        array = np.memmap(tmp_path / "file", "f8", "w+", shape=(4, 6))
        array[:] = whole
    report(store, lambda _: {"it": array})
    check_same(load(store, {"it": None})["it"], np.array(array))


def test_a_report_stores_an_array_as_it_is_when_it_is_called(store):
    small, large = np.zeros(3), np.zeros(100_000)

    def reports(session, rank):
        session.report({}, state={"small": small, "large": large}, upload="async")
        small[:], large[:] = 1, 1
        session.finish()

    assert Attempt(store).run(reports) == [None]
    found = load(store, {"small": None, "large": None})
    assert not found["small"].any()
    assert not found["large"].any()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.zeros(4), r"'it' is float64 \[5\] in the checkpoint, not float64 \[4\]"),
        (np.zeros(5, "f4"), r"'it' is float64 \[5\] in the checkpoint, not float32 \[5\]"),
        (np.zeros(5)[::-1], "'it' is to be loaded into an array that is read-only or reversed: give a copy"),
        (np.broadcast_to(0.0, 5), "'it' is to be loaded into an array that is read-only or reversed: give a copy"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_before_anything_changes(store, target, message):
    report(store, lambda _: {"other": np.ones(2), "it": np.arange(5.0)})
    state = {"other": np.zeros(2), "it": target}
    with pytest.raises(StateMismatchError, match=message):
        load(store, state)
    assert not state["other"].any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"]), r"no tensor has the dtype <U1 of 'it': give its tolist\(\), or another dtype"),
        (np.array([None]), "no tensor has the dtype object of 'it'"),
        (np.datetime64("2020-01-01"), r"no tensor has the dtype datetime64\[D\] of 'it'"),
        (np.arange(3, dtype=">i4"), "no tensor has the dtype >i4 of 'it'"),
        (np.ma.masked_array([1.0]), "the array 'it' is a MaskedArray: give its parts, as plain arrays"),
    ],
)
def test_what_no_tensor_can_hold_is_refused_by_name(store, value, message):
    (error,) = Attempt(store).run(lambda session, _: session.report({}, state={"it": value}))
    with pytest.raises(ValueError, match=message):
        raise error


@pytest.mark.parametrize(
    "value", [np.str_("a"), np.array(["a", "b"]), np.array([1, "a"], dtype=object), np.zeros(2, [("a", "i4"), ("b", "U1")])]
)
def test_the_list_of_what_no_tensor_can_hold_is_stored(store, value):
    report(store, lambda _: {"it": value.tolist()})
    assert load(store, {"it": None})["it"] == value.tolist()


@pytest.mark.parametrize("reported", [[], [np.float64(1)], [np.float64(1)] * 3, {"a": np.zeros(2)}, [{"a": np.float32(1)}]])
@pytest.mark.parametrize("target", [[np.float64(9)] * 2, [np.float64(9), [np.float32(9)]], np.float64(9)])
def test_scalars_are_replaced_by_whatever_is_stored_as_numbers_of_python_are(store, reported, target):
    """As by a training that goes back to a checkpoint within its process, with a list of losses that is longer by now."""
    report(store, lambda _: {"it": reported})
    check_equal(load(store, {"it": copy.copy(target)}), {"it": reported})


def test_arrays_and_tensors_take_each_others_place(store):
    report(store, lambda _: {"tensor": torch.arange(3), "array": np.arange(3)})
    found = load(store, {"tensor": np.zeros(3, int), "array": torch.zeros(3, dtype=torch.int64)})
    assert found["tensor"].tolist() == found["array"].tolist() == [0, 1, 2]
    assert (type(found["tensor"]), type(found["array"])) == (np.ndarray, torch.Tensor)


def test_a_state_without_arrays_is_indexed_as_before(store):
    report(store, lambda _: {"tensor": torch.arange(3)})
    index = json.loads(store.storage.get_bytes(store.layout.data(store.latest().id, ".state.json")))
    assert "arrays" not in index


def test_damage_is_found(store):
    report(store, lambda _: {"small": np.arange(3.0), "large": np.random.default_rng(0).random((300, 200))})
    for name, file in {"large": "__0_0.distcp", "small": "__0_1.distcp"}.items():
        path = store.storage.local_path(store.layout.data(store.latest().id, file))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointCorruptError):
            load(store, {name: None})
