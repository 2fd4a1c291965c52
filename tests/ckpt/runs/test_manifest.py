import json
import math
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointCorruptError, FileEntry, Manifest, ReportMismatchError, UnsupportedFormatError
from prefect_torch.ckpt.runs import manifest as manifest_module
from prefect_torch.ckpt.runs.manifest import attempt_of, is_id, merge_files, new_id, step_of


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


steps = st.integers(0, 99_999_999) | st.integers(0, 10**18 - 1) | st.sampled_from([10**8 - 1, 10**8, 10**9, 10**17])


@given(st.integers(1, 3) | st.integers(1, 999_999), steps, st.integers(1, 3) | st.integers(1, 999_999), steps)
def test_ids_sort_as_attempt_and_step(attempt, step, other_attempt, other_step):
    first, second = new_id(attempt, step), new_id(other_attempt, other_step)
    assert is_id(first)
    assert (attempt_of(first), step_of(first)) == (attempt, step)
    if (attempt, step) != (other_attempt, other_step):
        assert (first < second) == ((attempt, step) < (other_attempt, other_step))


def test_an_id_is_never_reused():
    assert len({new_id(1, 1) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(("attempt", "step"), [(0, 0), (1, -1), (1, 10**18), (10**6, 0)])
def test_what_would_not_sort_is_no_id(attempt, step):
    with pytest.raises(ValueError, match="is not within"):
        new_id(attempt, step)


names = st.text() | st.just("__float__")  # the tag of what JSON cannot hold, as a user's own word
leaves = st.floats() | st.integers() | st.text() | st.booleans() | st.none()
nested = st.dictionaries(
    names, st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6), max_size=4
)


@given(nested, nested)
def test_a_manifest_comes_back(metrics, metadata):
    manifest = make_manifest(metrics=metrics, metadata=metadata)
    assert repr(Manifest.decode(manifest.encode(), "here")) == repr(manifest)


names_of_files = st.text(st.characters(codec="utf-8", min_codepoint=32, exclude_characters="/\\"), min_size=1).filter(
    lambda it: it.strip(".")
)
paths = st.lists(names_of_files, min_size=1, max_size=3).map("/".join)
counts = st.integers(0, 2**63 - 1)


@given(st.builds(FileEntry, paths, counts, st.text("0123456789abcdef", min_size=32, max_size=32), counts))
def test_a_file_entry_comes_back(entry):
    assert Manifest.decode(make_manifest(files=(entry,)).encode(), "here").files == (entry,)


def test_a_manifest_is_strict_json():
    data = make_manifest(metrics={"loss": float("nan")}).encode()

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(data, parse_constant=refuse)["body"]["format"] == 1


def is_found_corrupt(data):
    try:
        Manifest.decode(data, "here")
    except CheckpointCorruptError as exc:
        return "here" in str(exc)
    return False


def test_any_flipped_bit_is_found():
    """Also one that leaves the value: 1e-05 and 1E-05, two long decimals of one float, an escape's upper case."""
    data = make_manifest(metrics={"rate": 1e-05, "sum": 0.1 + 0.2, "note": "\u00fc", "worst": -math.inf}).encode()
    flipped = (
        (position, bit, data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
        for position in range(len(data))
        for bit in range(8)
    )
    assert [(position, bit) for position, bit, changed in flipped if not is_found_corrupt(changed)] == []


@given(st.data(), st.integers(1, 255))
def test_any_changed_byte_is_found(data, difference):
    encoded = bytearray(make_manifest().encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= difference
    assert is_found_corrupt(bytes(encoded))


def test_a_manifest_cut_anywhere_is_found():
    data = make_manifest().encode()
    assert [length for length in range(len(data)) if not is_found_corrupt(data[:length])] == []


@pytest.mark.parametrize("more", [b" ", b"\n", b"\0", b"{}"])
def test_a_manifest_with_more_behind_it_is_found(more):
    assert is_found_corrupt(make_manifest().encode() + more)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_manifest_in_another_encoding_is_found(encoding):
    assert is_found_corrupt(make_manifest().encode().decode().encode(encoding))


def test_a_newer_format_asks_for_an_upgrade(monkeypatch):
    monkeypatch.setattr(manifest_module, "FORMAT_VERSION", 2)
    newer = make_manifest().encode()
    monkeypatch.undo()
    with pytest.raises(UnsupportedFormatError, match="here has format 2 and this version reads 1: upgrade"):
        Manifest.decode(newer, "here")


@pytest.mark.parametrize("data", [b"null", b"[]", b"{}", b'{"body":1,"digest":"x"}', b'{"body":NaN}', b"\xff\xfe", b"\0" * 99])
def test_other_bytes_are_no_manifest(data):
    assert is_found_corrupt(data)


def test_the_size_is_that_of_all_files():
    assert make_manifest().total_bytes == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "000001-00000001",
        "000001-00000001-0123abcd\n",
        "000001-00000001-0123ABCD",
        "1-1-0123abcd",
        "\u0660\u0660\u0660\u0660\u0660\u0661-00000001-0123abcd",
    ],
)
def test_what_has_another_form_is_no_id(text):
    assert not is_id(text)


def entry(path, rank, digest="d", size=1):
    return FileEntry(path, size, digest, rank)


def test_equal_files_are_one_file():
    merged = merge_files([[entry("b", 0)], [entry("b", 1), entry("a", 1)]])
    assert [(file.path, file.rank) for file in merged] == [("a", 1), ("b", 0)]


@pytest.mark.parametrize("other", [entry("b", 3, digest="e"), entry("b", 3, size=2)])
def test_different_files_of_one_name_name_both_ranks(other):
    with pytest.raises(ReportMismatchError, match="rank 0 and rank 3 both reported a file 'b'"):
        merge_files([[entry("b", 0)], [other]])


def test_different_files_of_one_name_say_that_torch_save_holds_the_number_of_a_gpu():
    with pytest.raises(ReportMismatchError, match="number of a tensor's GPU: save equal tensors on rank 0 alone, or from"):
        merge_files([[entry("model.pt", 0)], [entry("model.pt", 1, digest="e")]])


def test_a_file_where_another_rank_has_a_folder_names_both_ranks():
    with pytest.raises(ReportMismatchError, match="rank 1 reported a file 'a/b' where rank 0 reported a directory"):
        merge_files([[entry("a/b/c/d", 0)], [entry("a/b", 1)]])


def test_a_folder_where_an_earlier_rank_has_a_file_names_both_ranks():
    with pytest.raises(ReportMismatchError, match="rank 0 reported a file 'a' where rank 1 reported a directory"):
        merge_files([[entry("a", 0)], [entry("a/b", 1)]])


def test_a_name_that_begins_like_another_is_no_folder():
    merged = merge_files([[entry("a", 0)], [entry("a.b", 1), entry("ab/c", 1)]])
    assert [file.path for file in merged] == ["a", "a.b", "ab/c"]


def test_no_rank_has_files():
    assert merge_files([[], []]) == ()


@given(st.lists(st.sets(st.sampled_from(["a", "b/c", "b/d", "e"])), min_size=1, max_size=4))
def test_every_path_is_merged_once_and_belongs_to_the_lowest_rank(paths_by_rank):
    merged = merge_files([[entry(path, rank) for path in paths] for rank, paths in enumerate(paths_by_rank)])
    assert [file.path for file in merged] == sorted(set().union(*paths_by_rank))
    assert all(file.path not in paths for file in merged for paths in paths_by_rank[: file.rank])
