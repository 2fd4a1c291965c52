import threading

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting import peers
from ranks import Attempt


def test_a_rank_that_is_waited_for_is_named(tmp_path, monkeypatch):
    lines, told = [], threading.Event()

    def record(*arguments):
        lines.append(arguments[0] % arguments[1:])
        told.set()

    monkeypatch.setattr(peers, "_SILENT_S", 0.1)
    monkeypatch.setattr(peers._logger, "warning", record)

    def train_fn(session, rank):
        if rank == 1:
            assert told.wait(20)  # as in a collective that rank 0 never comes to
        session.report({})

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]
    assert "rank 0 has waited 0.1 s in report 0 for rank 1, and goes on" in lines[0]
