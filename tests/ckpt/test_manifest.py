import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointCorruptError, FileEntry, Manifest
from prefect_torch.ckpt.manifest import attempt_of, is_id, new_id


def make_manifest(**changes):
    fields = {
        "id": "000002-00000007-0123abcd",
        "step": 7,
        "attempt": 2,
        "metrics": {"loss": 0.25, "eval": {"best": True, "note": "ü"}},
        "files": (FileEntry("a/model.pt", 3, "0" * 32, 0), FileEntry("b.pt", 0, "1" * 32, 1)),
        "world_size": 2,
        "parent": None,
        "created_at": datetime(2026, 11, 21, 4, 5, 6, 789, tzinfo=timezone.utc),
        "metadata": {"author": "me"},
    }
    return Manifest(**{**fields, **changes})


@given(st.integers(1, 999_999), st.integers(0, 99_999_999), st.integers(1, 999_999), st.integers(0, 99_999_999))
def test_ids_sort_as_attempt_and_step(attempt, step, other_attempt, other_step):
    first, second = new_id(attempt, step), new_id(other_attempt, other_step)
    assert is_id(first)
    assert attempt_of(first) == attempt
    if (attempt, step) != (other_attempt, other_step):
        assert (first < second) == ((attempt, step) < (other_attempt, other_step))


def test_an_id_is_never_reused():
    assert len({new_id(1, 1) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(("attempt", "step"), [(0, 0), (1, -1), (1, 10**8), (10**6, 0)])
def test_what_would_not_sort_is_no_id(attempt, step):
    with pytest.raises(ValueError, match="is not within"):
        new_id(attempt, step)


@given(st.dictionaries(st.text(), st.floats() | st.text() | st.booleans() | st.none(), max_size=5))
def test_a_manifest_comes_back(metrics):
    if "__float__" in metrics:
        return
    manifest = make_manifest(metrics=metrics)
    assert repr(Manifest.decode(manifest.encode(), "here")) == repr(manifest)


def test_a_manifest_is_strict_json():
    data = make_manifest(metrics={"loss": float("nan")}).encode()

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(data, parse_constant=refuse)["body"]["format"] == 1


@pytest.mark.parametrize("position", range(0, 620, 7))
def test_any_changed_byte_is_found(position):
    data = bytearray(make_manifest().encode())
    position %= len(data)
    data[position] ^= 1
    with pytest.raises(CheckpointCorruptError, match="here"):
        Manifest.decode(bytes(data), "here")


@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_a_cut_manifest_is_found(length):
    with pytest.raises(CheckpointCorruptError):
        Manifest.decode(make_manifest().encode()[:length], "here")


@pytest.mark.parametrize("data", [b"null", b"[]", b"{}", b'{"body":1,"digest":"x"}', b"\xff\xfe"])
def test_other_json_is_no_manifest(data):
    with pytest.raises(CheckpointCorruptError):
        Manifest.decode(data, "here")


def test_the_size_is_that_of_all_files():
    assert make_manifest().total_bytes == 3
