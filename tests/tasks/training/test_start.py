"""The checkpoint that an attempt starts from."""

from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.runs.attempts import Owner, claim_attempt, newest_attempt
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.training.start import choose_start
from ranks import Attempt, folder


@pytest.fixture
def seed(tmp_path):
    """The checkpoint of another run, and its file."""
    store = CheckpointStore.open(tmp_path / "store", "seed")
    Attempt(store).session().report({}, folder(tmp_path / "c", model="good"))
    (manifest,) = store.list()
    return CheckpointRef(store.spec, "seed", manifest.id), store.storage.local_path(store.layout.data(manifest.id, "model"))


def start_from(initial, storage=None, **run_config):
    storage = storage or initial.storage
    store = CheckpointStore.open(storage, "run")
    attempt = claim_attempt(store, Owner.current(), world_size=1)
    job = SimpleNamespace(
        initial_checkpoint=initial, run_config=RunConfig(**run_config), storage=storage, run="run", decisions=None
    )
    with disable_run_logger():
        return choose_start(store, job, attempt, SimpleNamespace(notify=lambda event: None))


def test_a_run_without_checkpoints_starts_from_the_initial_one(seed):
    initial, _ = seed
    start = start_from(initial)
    assert start.restored == initial
    assert start.own is None
    assert start.path.endswith(f"/seed/checkpoints/{initial.checkpoint_id}")
    assert newest_attempt(CheckpointStore.open(initial.storage, "run")).resumed_from == start.path


def test_what_must_resume_begins_nowhere_without_a_checkpoint(seed, tmp_path):
    initial, _ = seed
    assert start_from(initial, resume="must").restored == initial
    with pytest.raises(CheckpointNotFoundError, match=r"run 'run' in .*elsewhere has no checkpoint to resume from"):
        start_from(None, CheckpointStore.open(tmp_path / "elsewhere", "run").spec, resume="must")
    assert start_from(None, CheckpointStore.open(tmp_path / "elsewhere", "run").spec).restored is None


@pytest.mark.parametrize("damage", ["evil", "long one"])
def test_an_initial_checkpoint_is_verified_before_any_rank_starts(seed, damage):
    initial, file = seed
    file.write_text(damage)
    with pytest.raises(CheckpointCorruptError, match="model"):
        start_from(initial)


def test_an_initial_checkpoint_is_trusted_where_that_is_asked_for(seed):
    initial, file = seed
    file.write_text("evil")
    assert start_from(initial, verify="none").restored == initial
