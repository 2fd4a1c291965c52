"""What a rank reads of a run before its function is called: little, and most of it once on each machine."""

import pytest
from counting_storage import CountingStorage
from prefect_torch.ckpt import CheckpointStore, StorageSpec
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.tasks.rank import main
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from rank_specs import rank_spec
from ranks import Attempt, folder


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """A storage with a checkpoint; whoever opens a run opens it there."""
    counting = CountingStorage(LocalStorage(tmp_path / "store"))
    store = CheckpointStore(counting, Layout("run"), StorageSpec(counting.url))
    Attempt(store).session().report({}, folder(tmp_path / "c", a="1"))
    monkeypatch.setattr(CheckpointStore, "open", lambda *_: store)
    return counting


@pytest.mark.parametrize(("local_rank", "requests"), [(0, {"list": 1}), (1, {})])
def test_one_rank_of_a_machine_looks_at_the_run_and_none_reads_the_manifest_again(storage, local_rank, requests):
    store = CheckpointStore.open(storage.url, "run")
    (manifest,) = store.list()
    restored = CheckpointRef(store.spec, "run", manifest.id).with_manifest(manifest)
    spec = rank_spec(local_rank=local_rank, local_world_size=2, restored=restored, storage=store.spec)
    storage.taken()
    main._open_run(spec)
    assert spec.restored.open().id == manifest.id
    assert storage.taken() == requests
