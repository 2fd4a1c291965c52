"""DeepSpeed ZeRO on CPUs: every rank reports its own files, and goes on from them."""

import pytest
from forked_ranks import launch
from prefect_torch.ckpt import CheckpointStore
from rank_processes import RUN


def losses(store):
    return {manifest.step: manifest.metrics["loss"] for manifest in store.list()}


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_goes_on_where_it_was_and_by_another_number_of_ranks_once_converted(tmp_path, stage):
    assert launch("zero_processes", (stage, None), 2, tmp_path) == [0, 0]
    store = CheckpointStore.open(tmp_path, RUN)
    uninterrupted = losses(store)
    assert list(uninterrupted) == [0, 1, 2, 3]
    _, second, *later = store.list()
    assert {entry.rank for entry in second.files if "zero_pp_rank" in entry.path} == {0, 1}
    store.storage.delete([store.layout.manifest(manifest.id) for manifest in later])

    assert launch("zero_processes", (stage, None), 2, tmp_path) == [0, 0]
    assert losses(store) == uninterrupted

    store.storage.delete([store.layout.manifest(manifest.id) for manifest in store.list()[2:]])
    folder = store.checkpoint(second).to_directory(tmp_path / "zero")
    assert launch("zero_processes", (stage, folder), 1, tmp_path) == [0]
    assert losses(store) == pytest.approx(uninterrupted, rel=1e-5)
