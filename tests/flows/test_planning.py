"""What a training would do, without a training."""

import os
import uuid
from dataclasses import replace

import pytest
from owners import OWNERS
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_servers import api_that_answers
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_keys, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.text import without_login
from prefect_torch.flows import CheckpointConfig, FailureConfig, KubernetesCluster, RunConfig, ScalingConfig, SyncConfig, plan
from prefect_torch.tasks.gang.gpus import allocation, locks
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.gpus.listing import Gpu
from ranks import Attempt, folder

TRAIN_FN = "trainings:train_epochs"


@pytest.fixture
def store(tmp_path):
    """A run whose last training has failed after three checkpoints."""
    store = CheckpointStore.open(tmp_path / "store", "run")
    attempt = Attempt(store)
    session = attempt.session()
    for loss in (0.1, 0.3, 0.2):
        session.report({"loss": loss}, folder(tmp_path / "c", model=str(loss)))
    write_outcome(store, Outcome(attempt.number, "failed"))
    return store


def planned(store, *, name="run", checkpoint=None, scaling=None, failure=None, resume_from=None, **run):
    config = RunConfig(name=name, storage=store.storage.url, **run)
    return plan(TRAIN_FN, {}, scaling, config, checkpoint, failure, resume_from)


def line(plan, subject):
    (found,) = [it for it in plan.lines if it.subject == subject]
    return found.status, found.text


def stored(store):
    return {info.key: info.modified_s for info in store.storage.list("")}


def test_what_a_training_would_warn_of_is_no_reason_not_to_begin(store, tmp_path, caplog):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/data").symlink_to(tmp_path)
    found = planned(store, working_dir=str(tmp_path / "project"))
    assert found.would_begin, found.lines
    assert line(found, "working_dir")[0] == "ok"
    assert "data is left out" in caplog.text


def test_a_plan_says_what_is_resumed_kept_and_pruned_and_changes_nothing(store):
    before = stored(store)
    best = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    found = planned(store, checkpoint=best)
    first, second, third = (manifest.id for manifest in store.list())
    assert found.would_begin
    assert found.resumes_from == store.path_of(third)
    assert list(found.keeps) == [first, third]
    assert found.prunes == (second,)
    assert line(found, "start") == ("ok", f"attempt 2 of run 'run', from {store.path_of(third)}")
    assert line(found, "retention")[1].startswith("2 committed checkpoints stay, 1 go: ")
    assert line(found, "storage")[1].startswith(f"{store.storage.url}: wrote, listed, read and deleted in ")
    assert line(found, "gpus") == ("ok", "1 rank without a GPU")
    assert stored(store) == before


def test_a_plan_counts_on_from_the_checkpoints_of_a_run_without_claims(store):
    store.storage.delete(claim_keys(store))
    (newest,) = (manifest.id for manifest in store.list()[-1:])
    assert line(planned(store), "start") == ("ok", f"attempt 2 of run 'run', from {store.path_of(newest)}")


def test_a_damaged_checkpoint_is_named_and_stays_and_the_one_before_is_resumed(store):
    _, second, third = store.list()
    store.storage.local_path(store.layout.data(third.id, "model")).write_text("longer than it was")
    before = stored(store)
    found = planned(store)
    assert found.would_begin
    assert found.resumes_from == store.path_of(second.id)
    status, text = line(found, "damaged")
    assert status == "warning"
    assert text.startswith(f"{third.id} would be set aside: ")
    assert stored(store) == before


def test_a_run_that_lives_is_refused_unless_it_is_taken_over(store):
    claim_attempt(store, Owner.current(), world_size=1)
    status, text = line(planned(store), "start")
    assert status == "wrong"
    assert f"is being trained by flow run None (process {os.getpid()} on" in text
    assert planned(store, takeover=True).would_begin


def test_nobody_is_told_to_cancel_a_flow_run_that_was_deleted(store):
    claim_attempt(store, Owner.current(str(uuid.uuid4())), world_size=1)
    status, text = line(planned(store), "start")
    assert status == "wrong"
    assert "Prefect's API does not know this flow run" in text
    assert f"(process {os.getpid()} on" in text
    assert "cancel it" not in text


@pytest.mark.parametrize(("status", "said"), [(None, "ConnectError"), (401, "401 Unauthorized")])
def test_an_api_that_cannot_tell_whether_a_run_lives_is_named(store, status, said):
    claim_attempt(store, replace(OWNERS["unknown"], flow_run_id=str(uuid.uuid4())), world_size=1)
    nowhere = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"})
    with nowhere if status is None else api_that_answers(status, b"{}"):
        api = without_login(PREFECT_API_URL.value())
        status, text = line(planned(store), "start")
    assert status == "wrong"
    assert text.startswith(f"{api} does not answer, or refuses: ")
    assert said in text
    assert "\n" not in text
    assert "secret" not in text


def test_a_sweep_is_refused_as_a_training_of_its_name_would_be(store):
    claim_attempt(store, Owner.current(str(uuid.uuid4())), world_size=0)
    status, text = line(planned(store, takeover=True), "start")
    assert (status, text.endswith("is a sweep, so a training needs another name")) == ("wrong", True)


@pytest.mark.parametrize(("resume", "begins"), [("auto", True), ("never", True), ("must", False)])
def test_a_fresh_start_is_one_unless_it_must_resume(store, resume, begins):
    found = planned(store, name="other", resume=resume)
    assert found.would_begin is begins
    assert found.resumes_from is None
    assert begins or line(found, "start")[1].endswith(
        "has no checkpoint to resume from, and resume='must' asks for one: correct the name or the storage (`prefect-torch ls "
        "STORAGE` lists the runs), or give resume='auto'"
    )


def test_a_run_without_a_name_has_nothing_that_it_must_resume(store):
    found = planned(store, name=None, resume="must")
    assert line(found, "start") == ("wrong", "a run without a name is new, and resume='must' asks for one with a checkpoint")
    assert planned(store, name=None, resume="must", resume_from=store.path_of(store.latest().id)).would_begin


def test_what_a_tool_copies_is_not_read(store):
    sync = SyncConfig(upload="false {source} {target}", download="false {source} {target}", target="me@host:/there")
    found = planned(store, name="other", sync=sync)
    texts = [it.text for it in found.lines if it.subject == "storage"]
    assert texts[1] == "me@host:/there was not read: a training first downloads the checkpoints that are only there"
    sync = sync.model_copy(update={"target": "sftp://me:secret@host/there"})
    assert "  sftp://host/there was not read" in str(planned(store, name="other", sync=sync))
    assert found.would_begin
    elsewhere = plan(TRAIN_FN, {}, None, RunConfig(name="run", storage="s3://bucket/runs", sync=sync))
    assert [it.subject for it in elsewhere.lines if it.status == "wrong"] == ["storage"]
    assert "sync copies a directory of each node" in line(elsewhere, "storage")[1]


def test_only_a_cluster_is_asked_for_more(store):
    status, text = line(planned(store, scaling=ScalingConfig(num_workers=(1, 2), regrow_after_s=60)), "gpus")
    assert (status, "regrow_after_s=60 asks a cluster for more machines, and there is none" in text) == ("wrong", True)


def test_a_new_run_begins_with_the_initial_checkpoint_where_that_is_whole(store):
    third = store.list()[-1]
    for resume_from in (store.checkpoint(third), store.path_of(third.id), f"run/{third.id}"):
        assert planned(store, name="other", resume_from=resume_from).resumes_from == store.path_of(third.id)
    store.storage.local_path(store.layout.data(third.id, "model")).write_text("longer than it was")
    assert line(planned(store, name=None, resume_from=f"run/{third.id}"), "start")[0] == "wrong"
    missing = line(planned(store, resume_from=f"nope/{third.id}"), "start")
    advice = "correct the name or the storage (`prefect-torch ls STORAGE` lists the runs)"
    assert missing == ("wrong", f"there is no run 'nope' in {store.storage.url}, so it has no checkpoint {third.id}: {advice}")


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    run = RunConfig(name="run", storage=str(tmp_path / "file"))
    found = plan("trainings:no_such_function", {}, ScalingConfig(), run)
    assert not found.would_begin
    assert [it.subject for it in found.lines if it.status == "wrong"] == ["function", "storage"]
    assert "wrong    function     train_fn 'trainings:no_such_function'" in str(found)


def test_a_file_that_ranks_would_import_as_a_package_is_wrong(store, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = planned(store)
    assert line(found, "function") == ("wrong", f"{tmp_path}/numpy.py is imported instead of the package 'numpy': rename it")
    assert line(found, "start")[0] == "ok"


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "_LOCKS", (tmp_path,))
    monkeypatch.setattr(
        allocation, "list_gpus", lambda _: [Gpu(f"uuid-{it}", "H200", "CUDA_VISIBLE_DEVICES", it) for it in "01"]
    )


def test_gpus_are_counted_and_those_in_use_named(store, two_gpus):
    both, three = (ScalingConfig(num_workers=number, use_gpu=True) for number in (2, 3))
    assert line(planned(store, scaling=both), "gpus") == ("ok", "2 ranks, each with a GPU, which are free: uuid-0, uuid-1")
    status, text = line(planned(store, scaling=three), "gpus")
    assert (status, "needs 3 GPUs, and this machine has 2" in text) == ("wrong", True)
    other = GpuAllocation(1, 0.0, "flow run quick-fox")
    other.take(lambda: None)
    assert line(planned(store, scaling=ScalingConfig(num_workers=(1, 4), use_gpu=True)), "gpus") == (
        *("ok", "1 rank, each with a GPU, which are free: uuid-1"),
    )
    status, text = line(planned(store, scaling=both), "gpus")
    assert status == "warning"
    assert text.endswith(f"GPU 0 by flow run quick-fox (process {os.getpid()}); the training waits")
    at_once = both.model_copy(update={"wait_for_gpus_s": 0.0})
    assert line(planned(store, scaling=at_once), "gpus")[0] == "wrong"
    other.release()


def test_a_grace_is_compared_with_that_of_the_pods(store):
    pods = ScalingConfig(num_workers=8, use_gpu=True, cluster=KubernetesCluster(termination_grace_s=60))
    found = planned(store, scaling=pods, failure=FailureConfig(grace_s=58))
    assert line(found, "machines") == ("ok", "8 ranks on machines of KubernetesCluster, which was not contacted")
    status, text = line(found, "grace")
    assert status == "warning"
    assert "a pod is killed 60 s after the request to end" in text
    assert "give at most grace_s=55" in text
    assert line(planned(store, scaling=pods, failure=FailureConfig(grace_s=55)), "grace")[0] == "ok"
