"""What Ray Train's documentation promises of reports, checkpoints, retention, restores and results, and what happens here.

Of Ray 2.60, with what Tune adds to the function of a trial. Ranks are threads wherever that is enough; what needs processes
shares one training of two ranks.
"""

import logging
import os
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointCorruptError,
    CheckpointStore,
    CommitFailedError,
    ReportMismatchError,
    RetentionPolicy,
    get_checkpoint,
    get_context,
    report,
)
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.decisions import DecisionPoints
from prefect_torch.ckpt.reporting.events import DecisionRequest, ReportEvent
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    RankFailedError,
    RayCluster,
    Result,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    TrainingFailedError,
    train,
)
from prefect_torch.flows.arguments import gpus_of
from prefect_torch.flows.sweeps.limits import limits_of, reached_limit
from prefect_torch.tasks import prepare_data_loader
from prefect_torch.tasks.gang import gang_run
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.options.storage import configured_storage
from prefect_torch.tasks.prepare import data_loader
from prefect_torch.tasks.rank.program.call import _call, failure_of
from prefect_torch.tasks.rank.user_code.function_reference import check_signature
from prefect_torch.tasks.training.restarts import Restarts, _failures_before
from prunes import prune_as_leader
from pydantic import ValidationError
from ranks import Attempt, as_rank, folder, read_files
from ray_behaviours import behaviour
from ray_behaviours_ranks import fail_after_the_checkpoint, leave, tell_place, train_with_a_failure
from torch.distributed.constants import default_pg_nccl_timeout
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler


@pytest.fixture
def remote(tmp_path):
    return CheckpointStore.open(f"memory://{tmp_path}", "run")


def commit(store, tmp_path, *all_metrics, **files):
    """Report a checkpoint for each of `all_metrics` in one attempt, and return the last."""
    session = Attempt(store).session()
    for metrics in all_metrics or [{}]:
        session.report(metrics, folder(tmp_path / "c", **(files or {"model": "x"})))
    return store.checkpoint(store.list()[-1])


def epochs(manifests):
    return [manifest.metrics["epoch"] for manifest in manifests]


# ray.train.report


@behaviour(
    "ray.train.report",
    "is a barrier: all workers call it the same number of times",
    verdict="better",
    reason="a rank that leaves early, or reports another step, is an error on every rank instead of an unlimited wait, and "
    "one that is late is named in the log",
    short="ranks that disagree are an error, not a wait",
)
def test_a_rank_that_reports_less_often_is_an_error_on_the_others(store):
    errors = Attempt(store, 2).run(lambda session, rank: [session.report({}) for _ in range(2 - rank)])
    assert isinstance(errors[0], ReportMismatchError)
    assert "rank 1 returned after 1 report, while rank 0 waits for it in report 2" in str(errors[0])


@behaviour("ray.train.report", "attaches the metrics of rank 0 alone to the checkpoint", verdict="same")
def test_rank_0s_metrics_are_the_checkpoints(store, tmp_path):
    def train_fn(session, rank):
        session.report({"rank": rank}, folder(tmp_path / str(rank), **{f"of-{rank}": "x"}))

    assert Attempt(store, 2).run(train_fn) == [None, None]
    assert store.latest().metrics == {"rank": 0}


@behaviour("ray.train.report", "registers a checkpoint as soon as one worker reports one", verdict="same")
def test_one_rank_with_a_checkpoint_is_enough(store, tmp_path):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "c", model="x") if rank == 1 else None)

    assert Attempt(store, 2).run(train_fn) == [None, None]
    assert [entry.path for entry in store.latest().files] == ["model"]


@behaviour("ray.train.report", "merges the checkpoints of all workers into one directory", verdict="same")
def test_all_ranks_files_are_one_directory(store, tmp_path):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"model-{rank}": str(rank)}))

    assert Attempt(store, 2).run(train_fn) == [None, None]
    assert read_files(store.checkpoint(store.latest())) == {"model-0": b"0", "model-1": b"1"}


@behaviour("ray.train.report", "accepts files of one name that are equal on all workers", verdict="same")
def test_equal_files_of_one_name_are_one_file(store, tmp_path):
    errors = Attempt(store, 2).run(lambda session, rank: session.report({}, folder(tmp_path / str(rank), vocabulary="a b")))
    assert errors == [None, None]
    assert len(store.latest().files) == 1


@behaviour("ray.train.report", "accepts an empty directory as a checkpoint, and refuses a missing one", verdict="same")
def test_an_empty_folder_is_a_checkpoint(store, tmp_path):
    (tmp_path / "empty").mkdir()
    session = Attempt(store).session()
    session.report({}, Checkpoint.from_directory(tmp_path / "empty"))
    assert read_files(store.checkpoint(store.latest())) == {}
    with pytest.raises(FileNotFoundError, match="there is no directory /nowhere"):
        session.report({}, Checkpoint.from_directory("/nowhere"))


@behaviour("ray.train.report", "stores the targets of links, and no file modes", verdict="same")
def test_a_link_is_stored_as_its_target(store, tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    (tmp_path / "c/model").chmod(0o700)
    (tmp_path / "c/best").symlink_to("model")
    (tmp_path / "c/linked").symlink_to(folder(tmp_path / "parts", part="y").path)
    Attempt(store).session().report({}, checkpoint)
    assert read_files(store.checkpoint(store.list()[-1])) == {"model": b"x", "best": b"x", "linked/part": b"y"}
    stored = Path(store.checkpoint(store.list()[-1]).path)
    assert not (stored / "best").is_symlink()
    assert not (stored / "model").stat().st_mode & 0o100


@behaviour(
    "ray.train.report",
    "leaves out a link to nothing without a word",
    verdict="refused",
    reason="it is a ValueError that names the link",
)
def test_a_link_to_nothing_is_no_part_of_a_checkpoint(store, tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    (tmp_path / "c/best").symlink_to("gone")
    with pytest.raises(ValueError, match="best is a link to nothing"):
        Attempt(store).session().report({}, checkpoint)


@behaviour(
    "ray.train.report",
    "stores empty subdirectories",
    verdict="different",
    reason="only files are stored, so that a checkpoint is the same in every storage; create a directory that you expect",
)
def test_an_empty_subfolder_is_not_stored(store, tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    (tmp_path / "c/logs").mkdir()
    Attempt(store).session().report({}, checkpoint)
    with store.checkpoint(store.list()[-1]).as_directory() as directory:
        assert [path.name for path in Path(directory).iterdir()] == ["model"]


@behaviour("ray.train.report", "may be called in a thread that the function has started", verdict="same")
def test_a_thread_may_report(store, tmp_path):
    with as_rank(Attempt(store).session()):
        thread = threading.Thread(target=report, args=({"epoch": 1}, folder(tmp_path / "c", model="x")))
        thread.start()
        thread.join()
    assert epochs(store.list()) == [1]


@behaviour(
    "ray.train.report",
    "lets files of one name collide without an error: the last uploaded stays",
    verdict="better",
    reason="different files of one name fail the report on every rank and name both ranks",
    short="files of one name never overwrite each other",
)
def test_different_files_of_one_name_are_an_error(store, tmp_path):
    errors = Attempt(store, 2).run(lambda session, rank: session.report({}, folder(tmp_path / str(rank), model=str(rank))))
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert store.list() == []


@behaviour(
    "ray.train.report",
    "accepts files of one name in which torch.save has stored the same tensors of each worker's own GPU",
    verdict="refused",
    reason="they differ, since each holds the number of its GPU: save on rank 0 alone, or from the CPU",
)
def test_torch_save_stores_the_number_of_a_gpu(store, tmp_path, monkeypatch):
    def train_fn(session, rank):
        session.report({}, Checkpoint.from_directory(tmp_path / str(rank)))

    def report_tensors_of(devices):
        for rank, device in enumerate(devices):
            monkeypatch.setattr(torch.serialization, "location_tag", lambda storage, device=device: device)
            torch.save(torch.zeros(2), Path(folder(tmp_path / str(rank)).path, "model.pt"))
        return Attempt(store, 2).run(train_fn)

    assert report_tensors_of(["cpu", "cpu"]) == [None, None]
    errors = report_tensors_of(["cuda:0", "cuda:1"])
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert "save equal tensors on rank 0 alone, or from the CPU" in str(errors[0])


@behaviour(
    "ray.train.report",
    "names the checkpoint's directory after checkpoint_dir_name, which must be unique",
    verdict="different",
    reason="ids consist of attempt and step, and are never used twice; a name of your own goes into the metadata",
)
def test_a_checkpoint_is_named_by_attempt_and_step(store, tmp_path):
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"), step=7)
    assert store.latest().id.startswith("000001-00000007-")
    with pytest.raises(TypeError, match="checkpoint_dir_name"):
        report({}, None, checkpoint_dir_name="mine")


@behaviour(
    "ray.train.report",
    "uploads synchronously by default, and returns after the upload",
    verdict="better",
    reason="the manifest is written by then, too, so that a kill right after the return resumes from this checkpoint; Ray's "
    "controller records the checkpoint later",
    short="a returned report is durable",
)
def test_a_returned_report_is_what_the_next_attempt_restores(store, tmp_path):
    session = Attempt(store).session()
    for epoch in range(3):
        session.report({"epoch": epoch}, folder(tmp_path / "c", model=str(epoch)))
    assert Attempt(store).restored.metrics == {"epoch": 2}  # of a training that never said how it ended


@behaviour(
    "ray.train.report",
    "with upload mode ASYNC returns immediately, so the local directory must live until the upload is done",
    verdict="better",
    reason="the files are taken over before it returns: a TemporaryDirectory may be deleted",
)
def test_an_async_report_takes_the_files_over(store, uploads_may_go_on):
    def train_fn(session, rank):
        with tempfile.TemporaryDirectory() as directory:
            session.report({}, folder(Path(directory), model="x"), upload="async")
        assert store.list() == []
        uploads_may_go_on.set()

    assert Attempt(store).run(train_fn) == [None]
    assert read_files(store.checkpoint(store.latest())) == {"model": b"x"}


@behaviour(
    "ray.train.report",
    "with ASYNC waits, by the documentation, until the previous upload is done; its code queues any number of checkpoints",
    verdict="better",
    reason="the next report does wait, so that at most `CheckpointConfig.max_in_flight` (1) checkpoints take up space",
)
def test_one_upload_is_under_way_at_a_time(store, tmp_path, uploads_may_go_on):
    second_returned = threading.Event()

    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "a", model="x"), upload="async")
        session.report({}, folder(tmp_path / "b", model="y"), upload="async")
        second_returned.set()

    training = threading.Thread(target=lambda: Attempt(store).run(train_fn))
    training.start()
    assert not second_returned.wait(0.1)
    uploads_may_go_on.set()
    training.join(30)
    assert len(store.list()) == 2


@behaviour(
    "ray.train.report",
    "accepts a different upload mode from each worker",
    verdict="refused",
    reason="all ranks with a checkpoint use the same mode, or the report fails on every rank",
)
def test_ranks_upload_in_one_way(store, tmp_path):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), upload=("sync", "async")[rank])

    errors = Attempt(store, 2).run(train_fn)
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert "use one way on every rank" in str(errors[0])


@behaviour(
    "ray.train.report",
    "deletes the local directory after an ASYNC upload, and leaves it after a SYNC one",
    verdict="different",
    reason="an async report takes the files immediately and leaves the directory empty, to be used again or deleted",
)
def test_a_sync_report_leaves_the_folder(store, tmp_path):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "sync", model="x"))
        session.report({}, folder(tmp_path / "async", model="x"), upload="async")

    assert Attempt(store).run(train_fn) == [None]
    assert (tmp_path / "sync/model").read_text() == "x"
    assert list((tmp_path / "async").iterdir()) == []


@behaviour(
    "ray.train.report",
    "ends the training when an ASYNC upload fails",
    verdict="different",
    reason="the next report, or the end of the function, raises the failure on every rank, which may catch it and continue",
)
def test_a_failed_async_upload_is_raised_by_the_next_report_on_every_rank(store, tmp_path, monkeypatch):
    def no_space(self, key, path):
        raise OSError("the disk is gone")

    def train_fn(session, rank):
        monkeypatch.setattr(LocalStorage, "put_file", no_space)
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), upload="async")
        with pytest.raises(CommitFailedError):
            session.report({}, folder(tmp_path / f"again-{rank}", **{f"m{rank}": "x"}))

    assert Attempt(store, 2).run(train_fn) == [None, None]


@behaviour(
    "ray.train.report",
    "with upload mode NO_UPLOAD registers what the user has uploaded",
    verdict="missing",
    reason="files that the report does not store are no checkpoint: their digests would be unknown",
    short="no `NO_UPLOAD`, no `checkpoint_upload_fn`",
)
def test_there_is_no_report_without_an_upload(store, tmp_path):
    with pytest.raises(ValueError, match="give 'sync' or 'async'"):
        Attempt(store).session().report({}, folder(tmp_path / "c", model="x"), upload="no_upload")


@behaviour(
    "ray.train.report",
    "calls a checkpoint_upload_fn of the user's",
    verdict="missing",
    reason="as for NO_UPLOAD; for a storage of your own, use an fsspec filesystem",
)
def test_there_is_no_upload_function():
    with pytest.raises(TypeError, match="checkpoint_upload_fn"):
        report({}, None, checkpoint_upload_fn=print)


@behaviour(
    "ray.train.report",
    "with validation=True starts a validation of the checkpoint",
    verdict="different",
    reason="`evaluate(…, watch=True)`, a separate flow, finds new checkpoints automatically, from any machine",
)
def test_a_report_starts_no_validation():
    with pytest.raises(TypeError, match="validation"):
        report({}, None, validation=True)


@behaviour(
    "ray.train.report",
    "refuses metrics that hold torch tensors",
    verdict="better",
    reason="a 0-d tensor becomes its number; one with a shape is refused before anything is stored",
)
def test_tensors_of_one_number_are_numbers(store, tmp_path):
    assert commit(store, tmp_path, {"loss": torch.tensor(0.5)}).metrics == {"loss": 0.5}
    with pytest.raises(ValueError, match="metric 'loss' is of type Tensor"):
        Attempt(store).session().report({"loss": torch.zeros(2)})


@behaviour(
    "ray.train.report",
    "requires metrics that can be serialized",
    verdict="better",
    reason="numpy's numbers become numbers, other objects are a ValueError in the caller's line; an np.float32 ends Ray's run",
)
def test_numpys_numbers_are_numbers(store, tmp_path):
    assert commit(store, tmp_path, {"loss": np.float32(0.5)}).metrics == {"loss": 0.5}
    with pytest.raises(ValueError, match="metric 'when' is of type object"):
        Attempt(store).session().report({"when": object()})


@behaviour(
    "ray.train.report",
    "does not keep metrics that are reported without a checkpoint",
    verdict="better",
    reason="every report is in the history, the UI and the result",
    short="metrics without a checkpoint are kept",
)
def test_metrics_without_a_checkpoint_are_recorded(store):
    attempt = Attempt(store)
    assert attempt.run(lambda session, rank: session.report({"loss": 0.5})) == [None]
    assert [(event.record.metrics, event.record.checkpoint) for event in attempt.events()] == [({"loss": 0.5}, None)]


@behaviour(
    "ray.train.report",
    "accepts lists as metrics",
    verdict="refused",
    reason="metrics are numbers, strings and dicts of them; a list is a ValueError in the caller's line",
)
def test_a_list_is_no_metric(store):
    with pytest.raises(ValueError, match="metric 'losses' is of type list"):
        Attempt(store).session().report({"losses": [1.0]})


@behaviour("ray.train.report", "raises outside of a training function", verdict="same")
@pytest.mark.parametrize("call", [lambda: report({}), get_checkpoint, get_context])
def test_outside_of_a_training_it_raises(call):
    with pytest.raises(RuntimeError, match="may be called only inside the function"):
        call()


# ray.train.Checkpoint


@behaviour("ray.train.Checkpoint", "from_directory refers to a local directory, and reads nothing", verdict="same")
def test_a_checkpoint_of_a_folder_is_a_reference(tmp_path):
    assert Checkpoint.from_directory(tmp_path / "later").path == str(tmp_path / "later")


@behaviour("ray.train.Checkpoint", "as_directory gives a local directory in place, without a copy", verdict="same")
def test_a_local_checkpoint_is_read_in_place(store, tmp_path):
    checkpoint = commit(store, tmp_path)
    with checkpoint.as_directory() as directory:
        assert directory == checkpoint.path


@behaviour("ray.train.Checkpoint", "as_directory downloads a remote one and deletes the copy afterwards", verdict="same")
def test_a_remote_checkpoint_is_downloaded_for_as_long_as_it_is_read(remote, tmp_path, node):
    with commit(remote, tmp_path).as_directory() as directory:
        assert Path(directory, "model").read_text() == "x"
        assert node in Path(directory).parents
    assert not Path(directory).exists()


@behaviour(
    "ray.train.Checkpoint",
    "as_directory downloads once for all processes of a node that hold the same Checkpoint object",
    verdict="better",
    reason="separate but equal handles share the download, too",
)
def test_equal_handles_share_one_download(remote, tmp_path, node):
    manifest = commit(remote, tmp_path).manifest
    counting = FaultyStorage(remote.storage)
    all_read = threading.Barrier(4)
    seen = Counter()

    def read():
        with CheckpointStore(counting, Layout("run"), remote.spec).checkpoint(manifest).as_directory() as directory:
            seen[directory] += 1
            all_read.wait(20)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert list(seen.values()) == [4]
    assert counting.counts()["get_file"] == 1


@behaviour("ray.train.Checkpoint", "to_directory(path) writes the files into path", verdict="same")
def test_to_directory_copies(remote, tmp_path):
    assert Path(commit(remote, tmp_path).to_directory(tmp_path / "mine"), "model").read_text() == "x"


@behaviour(
    "ray.train.Checkpoint",
    "to_directory() without a path gives processes of a node one temporary directory",
    verdict="different",
    reason="each call returns a new one, which the caller may change and has to delete",
)
def test_to_directory_without_a_path_is_the_callers_own(remote, tmp_path, node):
    checkpoint = commit(remote, tmp_path)
    assert checkpoint.to_directory() != checkpoint.to_directory()


@behaviour(
    "ray.train.Checkpoint",
    "returns the files that are in the directory",
    verdict="better",
    reason="a file that differs from the committed one raises an error that names the file",
    short="damaged files are never returned",
)
def test_a_checkpoint_that_changed_is_never_handed_out(store, tmp_path):
    checkpoint = commit(store, tmp_path)
    Path(checkpoint.path, "model").write_text("y")
    with pytest.raises(CheckpointCorruptError, match="model differs"), checkpoint.as_directory():
        pass


@behaviour("ray.train.Checkpoint", "get_metadata is empty if none was set", verdict="same")
def test_there_is_no_metadata_at_first(tmp_path):
    assert folder(tmp_path / "c", model="x").get_metadata() == {}


@behaviour("ray.train.Checkpoint", "set_metadata replaces, update_metadata adds", verdict="same")
def test_metadata_is_replaced_or_added_to(tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    checkpoint.set_metadata({"a": 1})
    checkpoint.set_metadata({"b": 2})
    checkpoint.update_metadata({"c": 3})
    assert checkpoint.get_metadata() == {"b": 2, "c": 3}


@behaviour("ray.train.Checkpoint", "keeps its metadata when it is reported", verdict="same")
def test_metadata_is_reported_with_the_files(store, tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    checkpoint.set_metadata({"a": 1})
    Attempt(store).session().report({}, checkpoint)
    committed = store.checkpoint(store.latest())
    assert committed.get_metadata() == {"a": 1}
    committed.update_metadata({"b": 2})
    assert store.checkpoint(store.latest()).get_metadata() == {"a": 1, "b": 2}


@behaviour("ray.train.Checkpoint", "is not itself a path", verdict="same")
def test_a_checkpoint_is_no_path(tmp_path):
    with pytest.raises(TypeError):
        os.fspath(Checkpoint.from_directory(tmp_path))


@behaviour(
    "ray.train.Checkpoint",
    "is created from any URI",
    verdict="refused",
    reason="it takes a local folder, or the path or URL of a committed checkpoint; another URL is refused, since its files "
    "could not be verified",
)
def test_a_checkpoint_is_made_of_what_is_committed(store, tmp_path):
    checkpoint = commit(store, tmp_path)
    assert Checkpoint(checkpoint.path).id == checkpoint.id
    with pytest.raises(ValueError, match="is not a committed checkpoint"):
        Checkpoint("s3://bucket/folder")


@behaviour(
    "ray.train.Checkpoint",
    "has a path without the URI's scheme, and a pyarrow filesystem",
    verdict="different",
    reason="the path has the scheme, and `store.storage` takes the place of the filesystem; no pyarrow",
)
def test_a_remote_path_has_its_scheme(remote, tmp_path):
    checkpoint = commit(remote, tmp_path)
    assert checkpoint.path.startswith("memory://")
    assert checkpoint.store.storage.url.startswith("memory://")


@behaviour(
    "ray.train.Checkpoint",
    "holds only files: from_dict and to_dict are removed",
    verdict="better",
    reason="`report(…, state={…})` stores live objects and plain values, `load_state` restores them at any number of ranks",
    short="live objects: `state=`",
)
def test_a_dict_is_a_state(store):
    state = {"epoch": 3, "weights": torch.arange(3.0)}
    assert Attempt(store).run(lambda session, rank: session.report({}, state=state)) == [None]
    restored = {"epoch": 0, "weights": torch.zeros(3)}
    store.checkpoint(store.latest()).load_state(restored)
    assert restored["epoch"] == 3
    assert torch.equal(restored["weights"], state["weights"])


# ray.train.get_checkpoint


@behaviour("ray.train.get_checkpoint", "is None on a fresh start", verdict="same")
def test_a_fresh_start_has_no_checkpoint(store):
    assert Attempt(store).session().restored is None


@behaviour("ray.train.get_checkpoint", "is the latest reported checkpoint after a failure", verdict="same")
def test_the_latest_checkpoint_is_restored_not_the_best(store, tmp_path):
    commit(store, tmp_path, {"epoch": 0, "loss": 0.1}, {"epoch": 1, "loss": 0.9})
    assert Attempt(store).session().restored.metrics["epoch"] == 1


@behaviour("ray.train.get_checkpoint", "is the same on all workers", verdict="same")
def test_all_ranks_restore_the_same_checkpoint(store, tmp_path):
    commit(store, tmp_path, {})
    seen = []
    Attempt(store, 3).run(lambda session, rank: seen.append(session.restored.id))
    assert seen == [store.latest().id] * 3


@behaviour(
    "ray.train.get_checkpoint",
    "becomes the last checkpoint that this worker reported",
    verdict="different",
    reason="it stays the one that the attempt resumed from; later ones are in `CheckpointStore.list()`",
    short="it stays the restored one",
)
def test_the_restored_checkpoint_stays_during_the_attempt(store, tmp_path):
    session = Attempt(store).session()
    start_session(session)
    try:
        report({}, folder(tmp_path / "c", model="x"))
        assert get_checkpoint() is None
    finally:
        start_session(None)


@behaviour(
    "ray.train.get_checkpoint",
    "fails the run at its start when a checkpoint that its snapshot lists is gone",
    verdict="better",
    reason="a damaged one is quarantined with a warning, and the one before is restored; one deleted by hand is no error",
    short="a damaged one is quarantined",
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(store, tmp_path, caplog):
    latest = commit(store, tmp_path, {"epoch": 0}, {"epoch": 1})
    Path(latest.path, "model").unlink()
    assert Attempt(store).restored.metrics == {"epoch": 0}
    assert f"checkpoint {latest.id} of run 'run' is damaged and set aside" in caplog.text


# ray.train.get_context


@behaviour("ray.train.get_context", "has world rank and size, local rank and size, and node rank", verdict="same")
def test_a_rank_knows_its_place(store):
    context = Attempt(store, 2).session(1).context
    assert (context.world_rank, context.world_size) == (1, 2)
    assert (context.local_rank, context.local_world_size, context.node_rank) == (1, 2, 0)


@behaviour("ray.train.get_context", "returns them by methods, get_world_rank() and so on", verdict="same")
def test_a_place_is_told_by_methods_and_by_attributes(store):
    context = Attempt(store, 2).session(1).context
    getters = [name for name in dir(context) if name.startswith("get_")]
    assert len(getters) == 6
    for name in getters:
        attribute = name.removeprefix("get_").replace("experiment_name", "run_name")
        assert getattr(context, name)() == getattr(context, attribute)


@behaviour("ray.train.get_context", "has the run's name", verdict="same")
def test_a_rank_knows_its_run(store):
    assert Attempt(store).session().context.run_name == "run"


@behaviour(
    "ray.train.get_context",
    "get_storage() returns where the run is stored",
    verdict="missing",
    reason="a training function does not write there; give its path or URL in the config if it reads there",
    short="no `get_storage()`",
)
def test_a_rank_is_not_told_the_storage(store):
    assert not hasattr(Attempt(store).session().context, "get_storage")


# ray.train.get_preemption_info


@behaviour(
    "ray.train.get_preemption_info",
    "is None until a node is about to be preempted, then has the node and the time; all workers call it equally often",
    verdict="different",
    reason="`should_checkpoint()` is a bool, the same on every rank, without the node and the time",
    short="a bool: `should_checkpoint()`",
)
def test_all_ranks_are_told_alike_to_checkpoint(store):
    told = []
    for is_about_to_end in (False, True):
        attempt = Attempt(store, 2)
        attempt.ends_soon = is_about_to_end
        attempt.run(lambda session, rank: told.append(session.context.should_checkpoint()))
    assert told == [False, False, True, True]


# ray.train.get_all_reported_checkpoints


@behaviour(
    "ray.train.get_all_reported_checkpoints",
    "returns the reported checkpoints that were kept, with their metrics",
    verdict="better",
    reason="`CheckpointStore.list()` does so from any process, also of a run that has ended",
    short="from any process, at any time",
)
def test_reported_checkpoints_are_listed_from_anywhere(store, tmp_path):
    commit(store, tmp_path, {"epoch": 0}, {"epoch": 1})
    assert epochs(CheckpointStore.open(tmp_path / "store", "run").list()) == [0, 1]


@behaviour(
    "ray.train.get_all_reported_checkpoints",
    "with COMMITTED waits until the latest report is uploaded",
    verdict="different",
    reason="a listed checkpoint is committed; that of a sync report is committed when the report returns",
)
def test_what_is_listed_is_committed(store, tmp_path, uploads_may_go_on):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "c", model="x"), upload="async")
        assert store.list() == []
        uploads_may_go_on.set()

    assert Attempt(store).run(train_fn) == [None]
    store.verify(store.latest())


@behaviour(
    "ray.train.get_all_reported_checkpoints",
    "with VALIDATED has the metrics of validations, in place of reported ones of the same name",
    verdict="different",
    reason="they are stored under the evaluation's name, next to the reported ones, which do not change",
)
def test_attached_metrics_stand_under_their_own_name(store, tmp_path):
    checkpoint = commit(store, tmp_path, {"loss": 0.5})
    store.attach_metrics(checkpoint.id, {"loss": 0.4}, name="eval")
    assert store.latest().metrics == {"loss": 0.5, "eval": {"loss": 0.4}}


@behaviour(
    "ray.train.get_all_reported_checkpoints",
    "has the status of each validation: pending, validated, timed out, failed",
    verdict="missing",
    reason="the metrics have each finished evaluation; the flow runs of the others show their states",
    short="no status of validations",
)
def test_a_manifest_has_no_status(store, tmp_path):
    assert not hasattr(commit(store, tmp_path).manifest, "status")


# ray.train.CheckpointConfig


def kept(store, tmp_path, metrics, **policy):
    """Return the epochs of what a policy keeps of checkpoints with `metrics`."""
    commit(store, tmp_path, *({"epoch": epoch, **it} for epoch, it in enumerate(metrics)))
    prune_as_leader(store, CheckpointConfig(**policy).policy())
    return epochs(store.list())


LOSSES = [{"loss": loss} for loss in (0.5, 0.1, 0.9, 0.7)]


@behaviour("ray.train.CheckpointConfig", "keeps all checkpoints by default", verdict="same")
def test_all_are_kept(store, tmp_path):
    assert kept(store, tmp_path, LOSSES) == [0, 1, 2, 3]


@behaviour("ray.train.CheckpointConfig", "num_to_keep without a score keeps the most recent", verdict="same")
def test_the_newest_are_kept(store, tmp_path):
    assert kept(store, tmp_path, LOSSES, num_to_keep=2) == [2, 3]


@behaviour("ray.train.CheckpointConfig", "num_to_keep with a score keeps the best, by default the highest", verdict="same")
def test_the_best_are_kept(store, tmp_path):
    with pytest.warns(UserWarning, match="'loss' looks like a loss"):
        assert kept(store, tmp_path, [*LOSSES, {"loss": 0.8}], num_to_keep=2, checkpoint_score_attribute="loss") == [2, 4]


@behaviour("ray.train.CheckpointConfig", 'with order "min" the lowest scores are the best', verdict="same")
def test_a_low_score_may_be_good(store, tmp_path):
    config = {"num_to_keep": 2, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}
    assert kept(store, tmp_path, LOSSES, **config)[:2] == [0, 1]


@behaviour("ray.train.CheckpointConfig", "never deletes the latest, which may be one more than num_to_keep", verdict="same")
def test_the_latest_is_kept_besides(store, tmp_path):
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}
    assert kept(store, tmp_path, LOSSES, **config) == [1, 3]


@behaviour("ray.train.CheckpointConfig", "num_to_keep must be at least 1, and the order max or min", verdict="same")
@pytest.mark.parametrize("wrong", [{"num_to_keep": 0}, {"num_to_keep": -1}, {"checkpoint_score_order": "best"}])
def test_a_policy_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        CheckpointConfig(**wrong)


@behaviour("ray.train.CheckpointConfig", 'a score "a/b" is found in nested metrics', verdict="same")
def test_a_nested_metric_ranks(store, tmp_path):
    metrics = [{"eval": {"loss": loss}} for loss in (0.9, 0.1, 0.5)]
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "eval/loss", "checkpoint_score_order": "max"}
    assert kept(store, tmp_path, metrics, **config) == [0, 2]


@behaviour("ray.train.CheckpointConfig", 'a score "a/b/c" is found whichever names have the slashes', verdict="same")
@pytest.mark.parametrize("nested", [{"a": {"b": {"c": 5}}}, {"a": {"b/c": 5}}, {"a/b": {"c": 5}}, {"a/b/c": 5}], ids=range(4))
def test_a_score_is_found_by_every_spelling(store, tmp_path, nested):
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "a/b/c", "checkpoint_score_order": "max"}
    assert kept(store, tmp_path, [nested, {"a/b/c": 4}, {"a/b/c": 3}], **config) == [0, 2]


@behaviour("ray.train.CheckpointConfig", "a NaN score is worse than any number", verdict="same")
@pytest.mark.parametrize("order", ["max", "min"])
def test_nan_is_worst(store, tmp_path, order):
    metrics = [{"loss": 1.0}, {"loss": float("nan")}, {"loss": 2.0}]
    config = {"num_to_keep": 2, "checkpoint_score_attribute": "loss", "checkpoint_score_order": order}
    assert kept(store, tmp_path, metrics, **config) == [0, 2]


@behaviour("ray.train.CheckpointConfig", "of equal scores the later counts as better", verdict="same")
def test_ties_go_to_the_newer(store, tmp_path):
    metrics = [{"loss": 1.0}, {"loss": 1.0}, {"loss": 0.0}]
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "max"}
    assert kept(store, tmp_path, metrics, **config) == [1, 2]


@behaviour(
    "ray.train.CheckpointConfig",
    "a checkpoint without the score is logged as an error",
    verdict="better",
    reason="it ranks as the worst in both orders; with Ray's min it ranks as the best, and good ones are deleted",
    short="a missing score is worst in both orders",
)
def test_a_missing_score_is_worst_in_both_orders(store, tmp_path):
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}
    assert kept(store, tmp_path, [{"loss": 0.5}, {}, {"loss": 0.9}], **config) == [0, 2]


@behaviour(
    "ray.train.CheckpointConfig",
    "a score must be a number: text ends the run",
    verdict="different",
    reason="a report with text or a bool as the score fails; text that is already stored ranks as a missing score",
)
def test_a_score_of_text_ends_nothing(store, tmp_path):
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "max"}
    assert kept(store, tmp_path, [{"loss": 0.5}, {"loss": "low"}, {"loss": 0.1}], **config) == [0, 2]


@behaviour(
    "ray.train.CheckpointConfig",
    "does not delete a checkpoint whose validation is pending",
    verdict="different",
    reason="one that lacks the score is kept for `evaluation_timeout_s`, if that is given",
)
def test_what_awaits_its_evaluation_is_kept(store, tmp_path):
    config = {"num_to_keep": 1, "checkpoint_score_attribute": "eval/loss", "checkpoint_score_order": "min"}
    metrics = [{"eval": {"loss": 0.5}}, {}, {"eval": {"loss": 0.7}}]
    assert kept(store, tmp_path, metrics, **config, evaluation_timeout_s=600) == [0, 1, 2]
    prune_as_leader(store, CheckpointConfig(**config).policy())
    assert epochs(store.list()) == [0, 2]


@behaviour("ray.train.CheckpointConfig", "checkpoint_frequency and checkpoint_at_end are refused", verdict="same")
@pytest.mark.parametrize("gone", [{"checkpoint_frequency": 1}, {"checkpoint_at_end": True}])
def test_a_frequency_is_no_configuration(gone):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        CheckpointConfig(**gone)


@behaviour(
    "ray.train.CheckpointConfig",
    "ranks a checkpoint when it is reported; a resume with another score or order does not rank it again",
    verdict="better",
    reason="the current policy applies to all checkpoints, old ones, too",
    short="a new policy ranks old checkpoints",
)
def test_a_new_policy_ranks_old_checkpoints(store, tmp_path):
    policy = {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}
    assert kept(store, tmp_path, LOSSES, num_to_keep=3, **policy) == [0, 1, 3]
    Attempt(store)
    prune_as_leader(store, RetentionPolicy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="max"))
    assert epochs(store.list()) == [3]


@behaviour(
    "ray.train.CheckpointConfig",
    "records a deletion before it deletes, so that a crash leaves no dangling entry",
    verdict="same",
)
def test_a_crash_while_pruning_leaves_whole_checkpoints(store, tmp_path, monkeypatch):
    commit(store, tmp_path, {"epoch": 0}, {"epoch": 1})
    delete = LocalStorage.delete

    def stop_at_data(self, keys):
        keys = list(keys)
        if any("/checkpoints/" in key for key in keys):
            raise KeyboardInterrupt
        delete(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", stop_at_data)
        with pytest.raises(KeyboardInterrupt):
            prune_as_leader(store, RetentionPolicy(num_to_keep=1))
    assert epochs(store.list()) == [1]
    store.verify(store.latest())


# ray.train.FailureConfig

MANY = 1000


def restarts_after(kind, budgets):
    """Return how many failures of one kind each begin another attempt; MANY if there is no end of it."""
    restarts = Restarts(budgets, None)
    return next((number for number in range(MANY) if not restarts.count_failure(kind)), MANY)


@behaviour("ray.train.FailureConfig", "max_failures is 0 by default: no restart", verdict="same")
def test_no_restart_after_an_exception_by_default():
    assert restarts_after("user", FailureConfig()) == 0


@behaviour("ray.train.FailureConfig", "-1 restarts without limit", verdict="same")
def test_minus_one_is_without_end():
    assert restarts_after("user", FailureConfig(max_failures=2)) == 2
    assert restarts_after("user", FailureConfig(max_failures=-1)) == MANY
    with pytest.raises(ValidationError):
        FailureConfig(max_failures=-2)


@behaviour("ray.train.FailureConfig", "preemptions have a budget of their own, unlimited by default", verdict="same")
def test_preemptions_are_counted_apart():
    assert restarts_after("preemption", FailureConfig()) == MANY
    assert restarts_after("preemption", FailureConfig(max_failures=-1, max_preemptions=2)) == 2


@behaviour(
    "ray.train.FailureConfig",
    "max_failures counts every failure of a worker: exceptions, killed processes, lost nodes",
    verdict="different",
    reason="it counts only exceptions of the function; lost processes and storages have `max_infrastructure_failures`, 3 by "
    "default, and running out of memory, also as an exception, has `max_out_of_memory_failures`, 0 by default",
    short="separate budgets for lost processes",
)
def test_lost_processes_are_counted_apart():
    assert restarts_after("infrastructure", FailureConfig()) == 3
    assert restarts_after("infrastructure", FailureConfig(max_failures=-1)) == 3
    assert restarts_after("out_of_memory", FailureConfig(max_failures=-1)) == 0


@behaviour("ray.train.FailureConfig", "crashes and interrupts of the driver do not count toward max_failures", verdict="same")
def test_a_killed_flow_process_is_no_failure_of_the_function(store, tmp_path):
    attempt = Attempt(store)  # whose process could not say how it ended
    next_process = replace(Owner.current(), pid=1)
    assert list(_failures_before(store, next_process)) == ["infrastructure"]
    attempt.session().report({}, folder(tmp_path / "c", model="x"))
    assert list(_failures_before(store, next_process)) == ["preemption"]


@behaviour(
    "ray.train.FailureConfig",
    "controller_failure_limit is how often workers may fail to start, without limit by default",
    verdict="different",
    reason="such a start counts as lost processes do: `max_infrastructure_failures`, 3 by default. A crashed flow is run again "
    "by an automation: `serve(…, max_restarts=)`, `resume_crashed`",
)
def test_there_is_no_controller_whose_failures_count():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        FailureConfig(controller_failure_limit=3)


@behaviour(
    "ray.train.FailureConfig",
    "preemption_grace_s is how long survivors continue after the deadline, 0 by default",
    verdict="different",
    reason="`grace_s` is how long all ranks have for a last report, 20 s by default",
)
def test_a_grace_is_for_all_ranks(store):
    termination, attempt, told = Termination(FailureConfig().grace_s), Attempt(store, 2), {}
    assert termination.grace_left_s == 20
    termination.request(KeyboardInterrupt())
    attempt.ends_soon = termination.is_requested

    def train_fn(session, rank):
        told[rank] = session.context.should_checkpoint()
        session.report({})  # within the grace, which holds for this as well

    assert attempt.run(train_fn) == [None, None]
    assert told == {0: True, 1: True}


@behaviour(
    "ray.train.FailureConfig",
    "relax_collectives_on_preemption lets survivors commit without the lost ranks",
    verdict="missing",
    reason="a checkpoint without a rank's files would not be whole",
    short="no commit without the lost ranks",
)
def test_a_report_needs_all_ranks():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        FailureConfig(relax_collectives_on_preemption=True)


def ranks_that_had_to_leave(outcome, *, has_completed):
    """Return the run of a rank whose machine was going to be taken away, by what its function did in the grace."""
    gang = SimpleNamespace(machines=(), outcomes=lambda: {0: outcome}, has_completed=lambda: has_completed, stopped=list[str])
    return GangRun(gang, MemoryKeyValue(), None, Termination(20.0))


LEFT = RankFailedError("machine a is being terminated", None, "preemption")


@behaviour(
    "ray.train.FailureConfig",
    "an exception of a worker during a preemption counts toward max_failures",
    verdict="different",
    reason="it is warned of, with its traceback, and counts as the preemption, since the machine's end may be its cause",
)
def test_an_exception_during_a_preemption_counts_as_the_preemption(monkeypatch, caplog):
    monkeypatch.setattr(gang_run, "get_run_logger", logging.getLogger)
    failed = RankFailedError("rank 0 failed: ValueError: boom", 0, "user", traceback="in train_fn\nValueError: boom")
    with pytest.raises(RankFailedError, match="machine a is being terminated") as caught:
        ranks_that_had_to_leave(failed, has_completed=False)._result(None, LEFT)
    assert caught.value.kind == "preemption"
    assert "rank 0 failed:\nin train_fn\nValueError: boom" in caplog.text


@behaviour("ray.train.FailureConfig", "a run that completes during a preemption is not repeated", verdict="same")
def test_a_training_that_completes_on_a_terminated_machine_has_completed():
    assert ranks_that_had_to_leave("accuracy", has_completed=True)._result(None, LEFT) == "accuracy"


# ray.train.RunConfig and ray.train.ScalingConfig


@behaviour("ray.train.RunConfig", "a run without a name gets a generated one", verdict="same")
def test_an_unnamed_run_gets_a_name(unconfigured):
    first, second = (Path(result.path) for result in unconfigured)
    assert first.parent == second.parent
    assert first != second


@behaviour(
    "ray.train.RunConfig",
    "storage_path is ~/ray_results by default",
    verdict="different",
    reason="it is `./checkpoints` in the directory that the flow runs in",
)
def test_the_default_storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configured_storage(RunConfig().storage).url == str(tmp_path / "checkpoints")


@behaviour(
    "ray.train.RunConfig",
    "accepts any name that a directory may have",
    verdict="refused",
    reason="only letters, digits, `.`, `_` and `-`, since a name is a directory on every storage",
)
def test_a_name_is_a_folder_on_every_storage():
    with pytest.raises(ValidationError, match="use 1 to 200 letters, digits"):
        RunConfig(name="train-trial_id=1")


@behaviour("ray.train.RunConfig", "everything of a run is stored in storage_path/name", verdict="same")
def test_a_run_lies_in_its_folder(store, tmp_path):
    commit(store, tmp_path)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["run"]


@behaviour(
    "ray.train.RunConfig", "the same name and storage_path, started again, continue from the latest checkpoint", verdict="same"
)
def test_the_same_name_continues(store, tmp_path):
    commit(store, tmp_path, {"epoch": 4})
    again = CheckpointStore.open(tmp_path / "store", "run")
    assert Attempt(again).restored.metrics == {"epoch": 4}
    assert Attempt(CheckpointStore.open(tmp_path / "store", "other")).restored is None


@behaviour(
    "ray.train.RunConfig", "a run whose directory was moved or renamed is read and continues in its new place", verdict="same"
)
def test_a_moved_run_continues(store, tmp_path):
    commit(store, tmp_path, {"epoch": 4})
    (tmp_path / "store/run").rename(tmp_path / "moved")
    moved = CheckpointStore.open(tmp_path, "moved")
    assert Result.from_storage(tmp_path, "moved").checkpoint.path == f"{tmp_path}/moved/checkpoints/{moved.latest().id}"
    assert Attempt(moved).restored.metrics == {"epoch": 4}


@behaviour(
    "ray.train.RunConfig",
    "a run needs an intact snapshot file to continue",
    verdict="better",
    reason="there is no such file: each checkpoint has a manifest, and `latest.json` is only a hint, which may be torn",
    short="no single file that must be intact",
)
def test_a_torn_file_stops_nothing(store, tmp_path):
    commit(store, tmp_path, {"epoch": 4})
    (tmp_path / "store/run/latest.json").write_text('{"id": "0000')
    assert Attempt(store).restored.metrics == {"epoch": 4}


@behaviour(
    "ray.train.RunConfig",
    "callbacks are called for reports and exceptions, with the metrics of all workers",
    verdict="refused",
    reason="events and automations report commits and failures, outside of the training; only rank 0's metrics are recorded",
    short="no callbacks with all ranks' metrics",
)
def test_rank_0s_metrics_alone_are_told(store):
    attempt = Attempt(store, 2)
    attempt.run(lambda session, rank: session.report({"rank": rank}))
    assert [event.record.metrics for event in attempt.events() if isinstance(event, ReportEvent)] == [{"rank": 0}]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunConfig(callbacks=[])


@behaviour("ray.train.RunConfig", "refuses arguments that belonged to Ray Tune (verbose, stop, sync_config …)", verdict="same")
@pytest.mark.parametrize("gone", ["sync_config", "verbose", "stop", "progress_reporter", "log_to_file"])
def test_unknown_settings_are_refused(gone):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunConfig(**{gone: None})


@behaviour("ray.train.ScalingConfig", "is one worker without a GPU by default", verdict="same")
def test_one_rank_without_a_gpu_by_default(unconfigured):
    assert [result.return_value for result in unconfigured] == [(1, "cpu")] * 2


@behaviour(
    "ray.train.ScalingConfig",
    "num_workers=(min, max) starts as many workers as there is room for, and every 60 s considers to resize the group",
    verdict="different",
    reason="an attempt keeps its number of ranks; with a cluster, `regrow_after_s=60` requests more machines as often, and the "
    "training continues on them after its next checkpoint",
    short="a group grows only with `regrow_after_s`",
)
def test_the_number_of_ranks_may_be_two_numbers():
    """What an attempt then does is in tests/flows/test_machines.py and test_regrowth.py."""
    scaling = ScalingConfig(num_workers=(2, 8))
    assert (scaling.fewest_workers, scaling.most_workers, scaling.regrow_after_s) == (2, 8, None)
    assert ScalingConfig(**scaling.model_dump(mode="json")) == scaling
    with pytest.raises(ValueError, match="asks a cluster for more machines, and there is none"):
        gpus_of(ScalingConfig(num_workers=(2, 8), regrow_after_s=60), "a training", None)


@behaviour(
    "ray.train.ScalingConfig",
    "num_workers=0 runs the function in the same process",
    verdict="refused",
    reason="a rank is a process of its own; one without Prefect starts in a second or two",
)
def test_there_is_at_least_one_rank():
    with pytest.raises(ValidationError):
        ScalingConfig(num_workers=0)


@behaviour(
    "ray.train.ScalingConfig",
    "resources_per_worker reserves resources",
    verdict="different",
    reason="`RayCluster(resources_per_worker=)` does on a Ray cluster; elsewhere a work pool's job variables reserve them for "
    "the flow run, whose ranks share its machine",
)
def test_resources_are_the_clusters_or_the_work_pools():
    resources = {"CPU": 4.0}
    assert ScalingConfig(cluster=RayCluster(resources_per_worker=resources)).cluster.resources_per_worker == resources
    with pytest.raises(ValidationError, match=r"give cluster=RayCluster\(resources_per_worker="):
        ScalingConfig(resources_per_worker=resources)


@behaviour(
    "ray.train.ScalingConfig",
    "accepts its fields by position, too, as the other configs do",
    verdict="refused",
    reason="a `TypeError` names the field",
)
@pytest.mark.parametrize("config", [ScalingConfig, RunConfig, CheckpointConfig, FailureConfig])
def test_fields_have_names(config):
    with pytest.raises(TypeError, match=f"by name only: {config.__name__}"):
        config(2)


# ray.train.torch


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is the second of two ranks for a data loader."""
    monkeypatch.setattr(data_loader, "get_rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(data_loader, "common_seed", lambda *_: 0)


@behaviour(
    "ray.train.torch.prepare_data_loader",
    "replaces a sampler of the user's by a DistributedSampler, with a warning",
    verdict="refused",
    reason="one that cannot be split among the ranks is a `ValueError`; `shuffle=` and a DistributedSampler are accepted",
)
def test_a_sampler_of_ones_own_is_not_replaced(second_of_two):
    with pytest.raises(ValueError, match="share the data by rank yourself"):
        prepare_data_loader(DataLoader(range(8), sampler=WeightedRandomSampler([1.0] * 8, 8)))
    assert [len(batch) for batch in prepare_data_loader(DataLoader(range(8), 2, shuffle=True))] == [2, 2]


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@behaviour(
    "ray.train.torch.prepare_data_loader",
    "gives every worker an IterableDataset unchanged, so that each reads all of it",
    verdict="refused",
    reason="it is a `ValueError`, unless `add_distributed_sampler=False` says that the dataset splits its data itself",
)
def test_a_stream_is_not_trained_on_by_each_rank_unawares(second_of_two):
    with pytest.raises(ValueError, match="give add_distributed_sampler=False"):
        prepare_data_loader(DataLoader(_Stream()))
    assert len(list(prepare_data_loader(DataLoader(_Stream()), add_distributed_sampler=False))) == 4


@behaviour(
    "ray.train.torch.prepare_data_loader",
    "repeats the order of the first epoch unless loader.sampler.set_epoch(epoch) is called before each epoch",
    verdict="better",
    reason="the loader counts its epochs; calls of `set_epoch` do no harm, except for a `resumable=True` loader that was "
    "iterated twice since the last one and resumes within the second pass",
)
def test_each_epoch_has_an_order_of_its_own(second_of_two):
    def epochs(loader, *, are_set):
        orders = []
        for epoch in range(2):
            if are_set:
                loader.sampler.set_epoch(epoch)
            orders.append(torch.cat(list(loader)).tolist())
        return orders

    unset, set_by_hand = (
        epochs(prepare_data_loader(DataLoader(range(64), 8, shuffle=True)), are_set=are_set) for are_set in (False, True)
    )
    assert unset[0] != unset[1]
    assert set_by_hand == unset


@behaviour(
    "ray.train.torch.prepare_data_loader",
    "drops arguments of the loader, such as persistent_workers and prefetch_factor",
    verdict="better",
    reason="all are kept except the sampler",
)
def test_a_loader_keeps_its_arguments(second_of_two):
    given = DataLoader(range(8), num_workers=1, prefetch_factor=3, persistent_workers=True)
    prepared = prepare_data_loader(given)
    assert (prepared.prefetch_factor, prepared.persistent_workers, prepared.num_workers) == (3, True, 1)


# ray.train.torch.TorchConfig


@behaviour(
    "ray.train.torch.TorchConfig",
    "timeout_s, how long workers wait for each other in a collective, is 1800 s by default, with nccl, too",
    verdict="different",
    reason="torch's own limit, 30 minutes for gloo and 10 for nccl; `ScalingConfig(timeout_s=1800)` for Ray's",
    short="nccl waits for 10 minutes",
)
def test_collectives_have_torchs_own_limits(result):
    assert ScalingConfig(use_gpu=True).timeout_s is None
    assert result.return_value["timeout_s"] == 1800
    assert default_pg_nccl_timeout in (timedelta(minutes=10), None)  # None: a torch without nccl


# ray.train.ValidationConfig


@behaviour("ray.train.ValidationConfig", "fn is called with the checkpoint, and with fn_kwargs by name", verdict="same")
def test_an_evaluation_takes_the_checkpoint_first(store, tmp_path):
    def validate(checkpoint, scale):
        return {"files": len(read_files(checkpoint)) * scale}

    commit(store, tmp_path)
    with as_rank(Attempt(store).session()):
        assert _call(check_signature(validate, evaluates=True), {"scale": 2}, evaluates=True) == {"files": 2}


# ray.train.torch.TorchTrainer and ray.train.Result


@behaviour(
    "ray.train.torch.TorchTrainer",
    "accepts a function with no argument, or with one, the config",
    verdict="different",
    reason="a config for a function with no argument, which Ray ignores, is an error, and one for a function whose argument "
    "has a default is given to it; two arguments are a `TypeError`",
)
def test_a_function_takes_the_config_or_nothing():
    for function in (lambda: None, lambda config: None):
        assert check_signature(function) is function
    for config, value in ((None, 5), ({"a": 1}, {"a": 1})):
        assert _call(check_signature(lambda epochs=5: epochs), config, evaluates=False) == value
    with pytest.raises(TypeError, match="must take one argument, the config, or none"):
        check_signature(lambda config, more: None)


@pytest.fixture(scope="module")
def unconfigured(tmp_path_factory, prefect_server):
    """The results of two trainings for which nothing is given but where they lie."""
    run = RunConfig(storage=str(tmp_path_factory.mktemp("unconfigured")))
    return [train(tell_place, run=run) for _ in range(2)]


@pytest.fixture(scope="module")
def result(tmp_path_factory, prefect_server):
    """The result of one training of two ranks that failed once."""
    storage = str(tmp_path_factory.mktemp("store"))
    keeps = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    return train(
        train_with_a_failure,
        {"losses": [0.5, 0.3, 0.4]},
        ScalingConfig(num_workers=2),
        RunConfig(name="run", storage=storage),
        keeps,
        FailureConfig(max_failures=1),
    )


@behaviour(
    "ray.train.FailureConfig", "max_failures=n restarts all workers at most n times from the latest checkpoint", verdict="same"
)
def test_a_failed_rank_restarts_all_from_the_latest_checkpoint(result):
    assert (result.attempts, result.return_value["start"], result.return_value["attempt"]) == (2, 2, 2)


@behaviour(
    "ray.train.collective",
    "barrier and broadcast_from_rank_zero work between all workers",
    verdict="different",
    reason="use `torch.distributed`: `barrier()` and `broadcast_object_list`",
)
def test_ranks_can_wait_for_each_other_and_tell_each_other(result):
    assert result.return_value["told"] == "told by rank 0"


@behaviour(
    "ray.train.torch.TorchTrainer",
    "runs the function in a working directory of the run, the same for all workers of a node",
    verdict="different",
    reason="in the directory that the flow runs in",
)
def test_ranks_run_in_the_flows_folder(result):
    assert Path(result.return_value["folder"]) == Path.cwd()


@behaviour(
    "ray.train.torch.TorchTrainer",
    "shows the INFO lines of the workers' loggers, since it sets the root logger's level",
    verdict="different",
    reason="a rank's loggers have Python's defaults: call `logging.basicConfig(level=logging.INFO)` in the function",
)
def test_the_loggers_of_ranks_are_as_python_makes_them(result):
    assert result.return_value["logs_info"] is False


@pytest.fixture(scope="module")
def failure(result):
    """What is raised by a training of one rank that begins from another's checkpoint, and fails."""
    other = RunConfig(name="other", storage=result.path.rpartition("/")[0])
    with pytest.raises(ValueError, match="began after epoch") as caught:
        train(fail_after_the_checkpoint, {}, run=other, resume_from=result.checkpoint)
    return caught.value


@behaviour(
    "ray.train.torch.TorchTrainer",
    "fit() raises a TrainingFailedError that has the workers' exceptions",
    verdict="different",
    reason="`train` raises the exception of the function, from a RankFailedError with the rank's own traceback; one "
    "that pickle cannot rebuild is only that RankFailedError",
    short="the function's own error",
)
def test_a_failed_training_raises_what_its_function_raised(failure):
    assert type(failure) is ValueError
    assert isinstance(failure.__cause__, RankFailedError)
    assert "in fail_after_the_checkpoint" in failure.__cause__.traceback
    assert failure_of(UnicodeError("pickled"), "user").exception is not None
    assert failure_of(_UnpicklableError(), "user").exception is None


class _UnpicklableError(Exception):
    """Has what no pickle can have."""

    def __init__(self) -> None:
        super().__init__("not pickled")
        self.lock = threading.Lock()


@behaviour(
    "ray.train.torch.TorchTrainer",
    "resume_from_checkpoint is removed: give the checkpoint in the config",
    verdict="better",
    reason="`resume_from=` begins from the verified checkpoint of another run, as long as this run has none",
    short="`resume_from=`",
)
def test_a_training_begins_from_another_runs_checkpoint(failure):
    assert str(failure) == "began after epoch 2"


@behaviour(
    "ray.train.torch.TorchTrainer",
    "a function that calls sys.exit() has failed",
    verdict="different",
    reason="without a status, or with 0, the function has returned; with another it has failed, and the training restarts",
)
def test_a_function_that_exits_without_a_status_has_returned(tmp_path, prefect_server):
    result = train(leave, run=RunConfig(storage=str(tmp_path), name="exits"))
    assert result.completed
    assert result.return_value is None


@behaviour("ray.train.Result", "return_value is the value that the function returned on rank 0", verdict="same")
def test_the_return_value_is_rank_0s(result):
    assert result.return_value["rank"] == 0


@behaviour(
    "ray.train.Result",
    "metrics are those attached to the last checkpoint",
    verdict="better",
    reason="they are those reported last, with a checkpoint or without; `result.checkpoint.metrics` has the checkpoint's",
)
def test_metrics_are_what_was_reported_last(result):
    assert result.metrics == {"epoch": 3, "loss": 9.0}
    assert result.checkpoint.metrics == {"epoch": 2, "loss": 0.4}


@behaviour("ray.train.Result", "checkpoint is the latest", verdict="same")
def test_the_checkpoint_is_the_latest(result):
    assert read_files(result.checkpoint) == {"epoch": b"2", "of-rank-1": b"2"}


@behaviour(
    "ray.train.Result",
    "best_checkpoints has the num_to_keep best with their metrics, the best last",
    verdict="different",
    reason="the best is first, and a latest that is not among the best, which Ray keeps, but leaves out, is listed, too",
    short="the best first",
)
def test_the_best_checkpoint_is_the_first(result):
    assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [0.3, 0.4]


@behaviour(
    "ray.train.Result",
    "metrics_dataframe has a row for each of best_checkpoints",
    verdict="better",
    reason="it has a row for each report, in order, with step and attempt: with a checkpoint or without, pruned or not; "
    "a value that a logger recorded between reports has `is_logged`",
    short="every report",
)
def test_the_dataframe_has_every_report(result):
    frame = result.metrics_dataframe
    assert list(frame["epoch"]) == [0, 1, 2, 3]
    assert list(frame["attempt"]) == [1, 1, 2, 2]


@behaviour("ray.train.Result", "path is where the run is stored", verdict="same")
def test_the_path_is_the_runs_folder(result):
    assert Path(result.path, "manifests").is_dir()


@behaviour(
    "ray.train.Result",
    "from_path reads metrics and checkpoints back from storage",
    verdict="better",
    reason="also the return value, the history and how each attempt ended",
)
def test_a_result_is_read_back_from_storage(result):
    storage, _, run = result.path.rpartition("/")
    again = Result.from_storage(storage, run)
    assert (again.metrics, again.checkpoint, again.return_value) == (result.metrics, result.checkpoint, result.return_value)
    assert again.best_checkpoints == result.best_checkpoints


@behaviour(
    "ray.train.Result",
    "get_best_checkpoint(metric, mode) ranks best_checkpoints by any metric; a metric that none has is an error",
    verdict="different",
    reason="a latest that is not among the best is ranked, too; the error is a `ValueError`, not a `RuntimeError`",
)
def test_the_best_by_any_metric(result):
    assert result.get_best_checkpoint("epoch", "max").metrics["epoch"] == 2
    assert result.get_best_checkpoint("epoch", "min").metrics["epoch"] == 1
    with pytest.raises(ValueError, match="has a metric 'nosuch'"):
        result.get_best_checkpoint("nosuch", "max")


def failed_run(store, tmp_path):
    """Leave behind what a training does that failed after it had reported its second epoch without a checkpoint."""
    attempt = Attempt(store)
    attempt.session().report({"epoch": 0}, folder(tmp_path / "c", model="x"))
    history = HistoryWriter(store, attempt.number)
    reported_at = store.latest().created_at.isoformat()
    history.append(MetricRecord(1, 0, {"epoch": 0}, store.latest().id, reported_at))
    history.append(MetricRecord(1, 1, {"epoch": 1}, None, reported_at))
    history.flush()
    write_outcome(store, Outcome(1, "failed", None, "user", "ValueError: boom", errors={"1": "ValueError: boom"}))
    return Result.from_storage(tmp_path / "store", "run")


@behaviour(
    "ray.train.Result",
    "error is not loaded by from_path",
    verdict="better",
    reason="it is read from storage, even if no process waited for the training",
)
def test_an_error_is_read_from_storage(store, tmp_path):
    error = failed_run(store, tmp_path).error
    assert isinstance(error, TrainingFailedError)
    assert "boom" in str(error)


@behaviour(
    "ray.train.Result",
    "of a failed or running training is read by from_path, as far as its checkpoints have it: fit() raises",
    verdict="better",
    reason="`Result.from_storage` also has the metrics that were reported without a checkpoint",
    short="errors and all metrics, from storage",
)
def test_a_failed_training_has_a_result(store, tmp_path):
    result = failed_run(store, tmp_path)
    assert (result.metrics, result.completed) == ({"epoch": 1}, False)
    assert [metrics for _, metrics in result.best_checkpoints] == [{"epoch": 0}]


@behaviour(
    "ray.train.Result",
    "the error of a failed training has the exceptions by rank (worker_failures)",
    verdict="different",
    reason="`result.errors` has them as text, also from storage",
)
def test_errors_are_told_by_rank(store, tmp_path):
    assert failed_run(store, tmp_path).errors == {1: "ValueError: boom"}


@behaviour(
    "ray.train.Result",
    "from_path raises a RuntimeError where there is no run",
    verdict="different",
    reason="it raises a FileNotFoundError",
)
def test_no_run_is_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run 'run'"):
        Result.from_storage(tmp_path, "run")


# ray.tune


@behaviour(
    "ray.tune.Tuner",
    "takes a generator function, each of whose values is a report",
    verdict="refused",
    reason="it is a `TypeError`: call `report` instead of `yield`",
)
def test_a_generator_is_no_training_function():
    def train_fn(config):
        yield {"loss": 1.0}

    with pytest.raises(TypeError, match="is async or a generator, so calling it would run nothing"):
        check_signature(train_fn)


@behaviour(
    "ray.tune.report",
    "ends the trial if the metrics have done=True",
    verdict="different",
    reason='`done` is a metric like any other: give `SearchConfig(stop={"done": 1})`, or return from the function',
)
def test_done_ends_a_trial_if_stop_has_it():
    def ends(search):
        """Return whether reports with done=False and done=True ask the sweep, and which limit it finds."""
        points, reports = DecisionPoints(stop=limits_of(search)), [{"loss": 1.0, "done": done} for done in (False, True)]
        asked = [points.includes(0, 1, metrics, has_checkpoint=False) for metrics in reports]
        return asked, [reached_limit(search, DecisionRequest(1, 0, 1, metrics, None)) for metrics in reports]

    assert ends(SearchConfig(metric="loss")) == ([False, False], [None, None])
    assert ends(SearchConfig(metric="loss", stop={"done": 1})) == ([False, True], [None, "done=1 has reached 1"])
