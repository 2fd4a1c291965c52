from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import FileEntry, ReportMismatchError
from prefect_torch.ckpt.reporting.agreement import Agreement, Intent, decide, decode_intents, merge_intents
from prefect_torch.ckpt.runs.manifest import merge_files
from prefect_torch.ckpt.state.planner import StateDescription


def test_without_a_checkpoint_nothing_is_stored():
    assert decide([Intent(0, 5), Intent(1, 5)], attempt=1) == Agreement(5)


def test_one_rank_is_enough_for_a_checkpoint():
    agreement = decide([Intent(0, 5), Intent(1, 5, "sync", ["x"])], attempt=3)
    assert agreement.checkpoint_id.startswith("000003-00000005-")


def test_different_steps_name_both_ranks():
    with pytest.raises(ReportMismatchError, match="rank 1 reported step 6 but rank 0 reported step 5"):
        raise decide([Intent(0, 5), Intent(1, 6)], attempt=1).error.exception()


def test_different_ways_to_upload_name_both_ranks():
    agreement = decide([Intent(0, 1, "sync"), Intent(1, 1, "async")], attempt=1)
    assert "rank 1 reported with upload='async' but rank 0" in agreement.error.message


def test_a_shared_name_belongs_to_the_lowest_rank():
    intents = [Intent(0, 1), Intent(1, 1, "sync", ["a", "same"]), Intent(2, 1, "sync", ["same"])]
    assert decide(intents, attempt=1).owners == {"same": 1}


def test_metadata_of_a_lower_rank_counts():
    intents = [Intent(0, 1, "sync", [], {"a": 0}), Intent(1, 1, "sync", [], {"a": 1, "b": 1})]
    assert decide(intents, attempt=1).metadata == {"a": 0, "b": 1}


def test_agreements_and_intents_travel():
    refused = decide([Intent(0, 5), Intent(1, 6)], attempt=1)
    assert Agreement.decode(refused.encode()) == refused
    intent = Intent(1, 2, "async", ["ü/x"], {"a": [1]})
    assert decode_intents(intent.encode()) == [intent]


STATE = StateDescription({"epoch": "d"}, {"t": "e"}, None, {"p": "f"})
ALIKE = st.builds(
    Intent,
    rank=st.just(0),
    step=st.sampled_from([5, 5, 5, 6]),
    upload=st.sampled_from(["sync", "sync", "sync", "async", None]),
    files=st.lists(st.sampled_from("abc"), unique=True),
    metadata=st.dictionaries(st.sampled_from("kl"), st.integers(0, 3)),
    state=st.sampled_from([None, STATE]),
    error=st.sampled_from([None, None, None, "OSError: full"]),
    num_requests=st.sampled_from([0, 0, 1]),
    asks_leader=st.sampled_from(["never", "with a checkpoint", "always"]),
    directory=st.sampled_from(["", "", "x", "y"]),
)


@given(st.lists(ALIKE, min_size=1, max_size=12), st.integers(1, 5))
def test_the_merged_intents_of_machines_are_decided_on_like_those_of_ranks(alike, per_node):
    intents = [replace(intent, rank=rank) for rank, intent in enumerate(alike)]
    encoded = [intent.encode() for intent in intents]
    nodes = [merge_intents(encoded[first : first + per_node]) for first in range(0, len(encoded), per_node)]
    merged = [intent for node in nodes for intent in decode_intents(node)]
    assert [state for intent in merged for state in intent.states] == [intent.state for intent in intents]
    with patch("prefect_torch.ckpt.reporting.agreement.new_id", lambda attempt, step: f"{attempt}-{step}"):
        assert decide(merged, attempt=1) == decide(intents, attempt=1)


def test_ranks_that_contribute_alike_are_one_intent():
    encoded = [Intent(rank, 5, "sync", [f"model-{rank}.pt"], {"k": rank}).encode() for rank in (8, 9, 10)]
    (merged,) = decode_intents(merge_intents(encoded))
    assert merged == Intent(
        8, 5, "sync", ["model-8.pt"], {"k": 8}, following=[(["model-9.pt"], None, ""), (["model-10.pt"], None, "")]
    )


def test_of_ranks_that_share_a_directory_the_lowest_adopts_its_files():
    intents = [Intent(rank, 1, "async", ["a"], directory=it) for rank, it in enumerate(["x", "y", "x", "", "", "y", "x"])]
    assert decide(intents, attempt=1).sharing == [2, 5, 6]


@given(st.lists(st.sets(st.sampled_from(["a", "b", "c"])), min_size=1, max_size=4))
def test_who_stores_a_shared_file_is_who_the_manifest_names(paths_by_rank):
    agreement = decide([Intent(rank, 1, "sync", sorted(paths)) for rank, paths in enumerate(paths_by_rank)], attempt=1)
    merged = merge_files([[FileEntry(path, 1, "d", rank) for path in paths] for rank, paths in enumerate(paths_by_rank)])
    shared = {path for path in "abc" if sum(path in paths for paths in paths_by_rank) > 1}
    assert agreement.owners == {file.path: file.rank for file in merged if file.path in shared}


def test_a_mismatch_stores_nothing():
    refused = decide([Intent(0, 5, "sync", ["a"]), Intent(1, 6, "sync", ["a"])], attempt=1)
    assert refused.checkpoint_id is None
    assert refused.owners == {}


def test_a_rank_without_a_checkpoint_has_no_say_in_how_to_upload():
    assert decide([Intent(0, 1), Intent(1, 1, "async"), Intent(2, 1, "async")], attempt=1).upload == "async"


def test_a_decision_travels():
    decided = decide([Intent(0, 1, "async", ["a"], {"k": [1]}), Intent(1, 1, "async", ["a"])], attempt=1)
    assert Agreement.decode(decided.encode()) == decided
