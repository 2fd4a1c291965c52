import pytest
from prefect_torch.ckpt import FileEntry, ReportMismatchError
from prefect_torch.ckpt.agreement import Agreement, Intent, agree, merge_files


def test_without_a_checkpoint_nothing_is_stored():
    assert agree([Intent(0, 5), Intent(1, 5)], attempt=1) == Agreement(5)


def test_one_rank_is_enough_for_a_checkpoint():
    agreement = agree([Intent(0, 5), Intent(1, 5, "sync", ["x"])], attempt=3)
    assert agreement.checkpoint_id.startswith("000003-00000005-")


def test_different_steps_name_both_ranks():
    with pytest.raises(ReportMismatchError, match="rank 1 reported step 6 but rank 0 reported step 5"):
        raise agree([Intent(0, 5), Intent(1, 6)], attempt=1).refusal.error()


def test_different_ways_to_upload_name_both_ranks():
    agreement = agree([Intent(0, 1, "sync"), Intent(1, 1, "async")], attempt=1)
    assert "rank 1 reported with upload='async' but rank 0" in agreement.refusal.message


def test_a_shared_name_belongs_to_the_lowest_rank():
    intents = [Intent(0, 1), Intent(1, 1, "sync", ["a", "same"]), Intent(2, 1, "sync", ["same"])]
    assert agree(intents, attempt=1).owners == {"same": 1}


def test_metadata_of_a_lower_rank_counts():
    intents = [Intent(0, 1, "sync", [], {"a": 0}), Intent(1, 1, "sync", [], {"a": 1, "b": 1})]
    assert agree(intents, attempt=1).metadata == {"a": 0, "b": 1}


def test_agreements_and_intents_travel():
    refused = agree([Intent(0, 5), Intent(1, 6)], attempt=1)
    assert Agreement.decode(refused.encode()) == refused
    intent = Intent(1, 2, "async", ["ü/x"], {"a": [1]})
    assert Intent.decode(intent.encode()) == intent


def entry(path, rank, digest="d", size=1):
    return FileEntry(path, size, digest, rank)


def test_equal_files_are_one_file():
    merged = merge_files([[entry("b", 0)], [entry("b", 1), entry("a", 1)]])
    assert [(file.path, file.rank) for file in merged] == [("a", 1), ("b", 0)]


@pytest.mark.parametrize("other", [entry("b", 3, digest="e"), entry("b", 3, size=2)])
def test_different_files_of_one_name_name_both_ranks(other):
    with pytest.raises(ReportMismatchError, match="rank 0 and rank 3 both reported a file 'b'"):
        merge_files([[entry("b", 0)], [other]])


def test_a_file_where_another_rank_has_a_folder_names_both_ranks():
    with pytest.raises(ReportMismatchError, match="rank 1 reported a file 'a/b' where rank 0 reported a folder"):
        merge_files([[entry("a/b/c/d", 0)], [entry("a/b", 1)]])
