"""What the prune task asks before it deletes; that prunes prune is shown with a real server in tests/flows."""

import pytest
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import CheckpointStore, FencedError, RetentionPolicy
from prefect_torch.tasks.prune_task import prune_checkpoints
from ranks import Attempt, folder


def prune(store, attempt):
    with disable_run_logger():
        return prune_checkpoints.fn(store.spec, "run", RetentionPolicy(1), attempt=attempt)


def test_an_overtaken_attempt_deletes_nothing(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    first = Attempt(store)
    session = first.session()
    for _ in range(3):
        session.report({}, folder(tmp_path / "c", model="x"))
    second = Attempt(store)
    with pytest.raises(FencedError, match="attempt 1 of run 'run' was overtaken by attempt 2"):
        prune(store, first.number)
    assert len(store.list()) == 3
    prune(store, second.number)
    assert len(store.list()) == 1
