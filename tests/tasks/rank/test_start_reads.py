"""What a rank reads of a run before its function is called: little, and most of it once on each machine."""

import shutil
from contextlib import ExitStack

import pytest
from counting_storage import CountingStorage
from prefect_torch.ckpt import CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import claim_key
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import LoginError
from prefect_torch.ckpt.storage.synced.first_download import download_run
from prefect_torch.tasks import SyncConfig
from prefect_torch.tasks.rank import main
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.failures import of_exception
from prefect_torch.tasks.rank.user_code.working_dir import StoredDirectory
from rank_specs import rank_spec
from ranks import Attempt, folder


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """A storage with a checkpoint; whoever opens a run opens it there."""
    counting = CountingStorage(LocalStorage(tmp_path / "store"))
    store = CheckpointStore(counting, Layout("run"), StorageSpec(counting.url))
    Attempt(store).session().report({}, folder(tmp_path / "c", a="1"))
    monkeypatch.setattr(CheckpointStore, "open", lambda *_, **__: store)
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


def test_a_login_that_the_flows_process_has_used_is_tried_for_a_while_where_its_source_fails(monkeypatch):
    """A busy STS refuses many ranks at once: that ended the training."""
    tries = iter([LoginError("too many requests")] * 2)

    def fail_twice(*_):
        if (error := next(tries, None)) is not None:
            raise error
        return "the run"

    monkeypatch.setattr(CheckpointStore, "open", fail_twice)
    assert main._open_store(rank_spec()) == "the run"
    tries = iter([LoginError("no such program")] * 2)
    monkeypatch.setattr(main, "_LOGIN_S", 0.0)
    with pytest.raises(StorageError, match=r"^no such program$") as caught:
        main._open_store(rank_spec())
    assert of_exception(caught.value, in_function=False) == "infrastructure"


def test_a_rank_on_another_machine_sees_the_claim_of_each_attempt_in_a_synced_directory(tmp_path):
    """Without it, rank 0 there could commit nothing after the first attempt, until the restarts were used up."""
    copy = "cp -a --no-target-directory {source} {target}"
    options = SyncConfig(upload=copy, download=copy, target=str(tmp_path / "there")).transport().options()
    here, other = (StorageSpec(str(tmp_path / name), options, RetryPolicy(0, 0, 0)) for name in ("here", "other"))
    leader = CheckpointStore.open(here, "run")
    for number in (1, 2, 3):
        download_run(here, "run")
        claim = claim_key(leader, claim_attempt(leader, Owner.current(), world_size=1))
        spec = rank_spec(storage=other, attempt=number, reports=ReportSettings(claim=claim))
        check_fence(main._open_run(spec), claim)


@pytest.mark.parametrize("working_dir", [None, StoredDirectory("/", 1, "", "")])
def test_rank_0_serves_the_groups_store_before_it_downloads_anything(monkeypatch, working_dir):
    """Ranks of other machines may have all files already, and wait for the store for minutes only."""
    steps = []

    def fail(*_):
        steps.append("opens the run")
        raise ValueError("no such run")

    monkeypatch.setattr(main, "_prepare", lambda _: None)
    monkeypatch.setattr(main, "enter_paths", lambda *_, **__: None)
    monkeypatch.setattr(main, "_unpack", lambda *_: (None, None))
    monkeypatch.setattr(main, "connect", lambda *_: None)
    monkeypatch.setattr(main.GroupStore, "open", lambda _: steps.append("serves the store"))
    monkeypatch.setattr(main, "_open_run", fail)
    result = main._run(rank_spec(master_host="rank0", working_dir=working_dir), ExitStack(), ExitStack())
    assert (result.kind, result.error) == ("final", "ValueError: no such run")
    assert steps == ["serves the store", "opens the run"]


def test_a_rank_on_another_machine_sees_the_claim_of_a_run_that_was_deleted_and_begun_again(tmp_path):
    """That machine still has the deleted claim of the same number."""
    copy = "cp -a --no-target-directory {source} {target}"
    options = SyncConfig(upload=copy, download=copy, target=str(tmp_path / "there")).transport().options()
    here, other = (StorageSpec(str(tmp_path / name), options, RetryPolicy(0, 0, 0)) for name in ("here", "other"))
    for _ in range(2):
        leader = CheckpointStore.open(here, "run")
        claim = claim_key(leader, claim_attempt(leader, Owner.current(), world_size=1))
        check_fence(main._open_run(rank_spec(storage=other, reports=ReportSettings(claim=claim))), claim)
        for deleted in ("here", "there"):
            shutil.rmtree(tmp_path / deleted / "run")
