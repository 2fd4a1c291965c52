"""`copy` and `delete`: nothing half is left by an interruption, and nothing is taken from under a training or a pin."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.runs.whole import copying
from prefect_torch.ckpt.runs.whole.copying import copy_planned, plan_copy
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.machine import clocks
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, seal
from prefect_torch.deployments.command_line import program
from pydantic import SecretStr
from ranks import Attempt, folder
from stored_runs import store_run
from wrapped_storage import WrappedStorage


def contents(storage, run="run"):
    store = CheckpointStore.open(storage, run)
    return {info.key: store.storage.get_bytes(info.key) for info in store.storage.list(f"{run}/")}


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "target")


def test_a_run_is_copied_whole_to_another_kind_of_storage_and_back(storage, command, tmp_path, target):
    store = store_run(storage, tmp_path / "scratch")
    store.pin(store.latest().id)
    code, out, err = command("copy", storage, "run", target)
    assert (code, err) == (0, "")
    assert out.startswith(f"3 checkpoints of run run in {target}: 14.7 KiB copied")
    copied, original = contents(target), contents(storage)
    original.pop("run/latest.json", None)
    assert copied == original
    assert command("verify", target, "run")[0] == 0
    code, out, _ = command("copy", storage, "run", target)
    assert (code, "0 B copied, 14.7 KiB was there" in out) == (0, True)


def test_what_is_in_quarantine_is_copied_as_it_is_and_can_be_restored_there(storage, command, tmp_path, target):
    store = store_run(storage, tmp_path / "scratch")
    whole, damaged, _ = store.list()
    store.attach_metrics(whole.id, {"accuracy": 0.5})
    store.checkpoint(whole).set_metadata({"epoch": 1})
    for manifest in (whole, damaged):
        quarantine(store, manifest.id, "model differs")
    store.storage.put_bytes(store.layout.data(damaged.id, "model"), b"short")
    assert command("copy", storage, "run", target)[0] == 0
    store.storage.delete([info.key for info in store.storage.list("run/")])
    assert command("restore", target, "run", whole.id)[0] == 0
    restored = CheckpointStore.open(target, "run").get(whole.id)
    assert restored.metrics["eval"] == {"accuracy": 0.5}
    assert CheckpointStore.open(target, "run").checkpoint(restored).get_metadata() == {"epoch": 1}
    assert command("verify", target, "run")[0] == 0
    assert "stays in quarantine, since it is damaged" in command("restore", target, "run", damaged.id)[2]


def test_a_copy_of_single_checkpoints_of_a_run_that_goes_on_is_pruned(local, command, tmp_path, target):
    store = store_run(local, tmp_path / "scratch", ending=None)
    for it in store.list():
        assert command("copy", local, "run", it.id, target)[0] == 0
    assert command("prune", target, "run", "--keep", "1", "--yes")[0] == 0
    assert [it.id for it in CheckpointStore.open(target, "run").list()] == [store.latest().id]


def test_a_checkpoint_that_was_damaged_since_an_earlier_copy_stays_whole_there(storage, command, tmp_path, target):
    store = store_run(storage, tmp_path / "scratch")
    command("copy", storage, "run", target)
    before = contents(target)
    damaged = store.latest()
    store.storage.put_bytes(store.layout.data(damaged.id, "model"), b"short")
    quarantine(store, damaged.id, "model differs")
    assert command("copy", storage, "run", target)[0] == 0
    assert contents(target) == before
    assert command("verify", target, "run")[0] == 0


def test_a_checkpoint_that_was_restored_since_an_earlier_copy_is_not_in_quarantine_there(
    storage, command, as_json, tmp_path, target
):
    store = store_run(storage, tmp_path / "scratch")
    restored = store.latest()
    quarantine(store, restored.id, "model differs")
    command("copy", storage, "run", target)
    assert [it["id"] for it in as_json("show", target, "run")["quarantined"]] == [restored.id]
    store.restore(restored.id)
    assert command("copy", storage, "run", target)[0] == 0
    assert as_json("show", target, "run")["quarantined"] == []
    assert command("verify", target, "run")[0] == 0


def test_one_checkpoint_is_copied_with_what_its_run_needs(local, command, as_json, tmp_path, target):
    store = store_run(local, tmp_path / "scratch")
    store.attach_metrics(store.list()[0].id, {"accuracy": 0.5})
    assert command("copy", local, "run", store.list()[0].id, target)[0] == 0
    (listed,) = as_json("ls", target, "run")
    assert (listed["id"], listed["metrics"]["eval"]) == (store.list()[0].id, {"accuracy": 0.5})
    assert [it["state"] for it in as_json("ls", target)] == ["completed"]


class Interrupted(WrappedStorage):
    """Raises instead of the nth put, and at each one after it."""

    def __init__(self, inner, puts):
        super().__init__(inner)
        self.left = puts

    def _put(self):
        self.left -= 1
        if self.left < 0:
            raise StorageError("killed")

    def put_file(self, key, path):
        self._put()
        return super().put_file(key, path)

    def put_bytes(self, key, data):
        self._put()
        super().put_bytes(key, data)


def test_a_copy_that_is_killed_at_any_put_leaves_only_whole_checkpoints_and_is_continued(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch", steps=2)
    plan = plan_copy(store, store.list(), whole=True)
    puts = 0
    while True:
        target = tmp_path / f"target-{puts}"
        target.mkdir()
        storage = Interrupted(LocalStorage(target), puts)
        try:
            copy_planned(plan, store.storage, storage, lambda _: None)
        except StorageError:
            there = CheckpointStore.open(target, "run")
            for manifest in there.list():
                there.verify(manifest)
            assert len(there.list()) < 2
            assert command("copy", local, "run", target)[0] == 0
            assert command("verify", target, "run")[0] == 0
            assert len(there.list()) == 2
            puts += 1
        else:
            break
    assert puts >= sum(len(it.files) + 1 for it in plan.checkpoints) + 3


class Collected(WrappedStorage):
    """Collects the garbage of the run before each operation that `when` chooses, and counts what was collected."""

    def __init__(self, inner, when):
        super().__init__(inner)
        self.when, self.num_runs, self.found = when, 0, []

    def _do(self, verb, *args, **kwargs):
        if self.when(verb, str(args[0])):
            self.num_runs += 1
            self.found += collect_garbage(CheckpointStore.open(self.inner, "run"))
        return super()._do(verb, *args, **kwargs)


@pytest.mark.parametrize("whole", [True, False])
def test_a_garbage_collection_in_the_target_takes_nothing_of_a_copy(local, command, tmp_path, target, whole):
    """The target has a later step of the attempt, by which data of the earlier ones look abandoned."""
    store = store_run(local, tmp_path / "scratch")
    for manifest in store.list():
        store.attach_metrics(manifest.id, {"accuracy": 0.5})
    assert command("copy", local, "run", "latest", target)[0] == 0
    storage = Collected(LocalStorage(tmp_path / "target"), lambda verb, key: verb.startswith("put"))
    copy_planned(plan_copy(store, store.list(), whole=whole), store.storage, storage, lambda _: None)
    assert storage.num_runs > 10
    assert storage.found == []
    there = CheckpointStore.open(target, "run")
    assert there.list() == store.list()
    for manifest in there.list():
        there.verify(manifest)
    assert not [info.key for info in there.storage.list("run/") if "incoming" in info.key]


def test_a_copy_looks_whether_what_a_killed_one_left_is_still_there(local, command, tmp_path, target):
    """A collection in the target that began before the copy may delete it."""
    store = store_run(local, tmp_path / "scratch")
    assert command("copy", local, "run", target)[0] == 0
    there = CheckpointStore.open(target, "run")
    first = there.list()[0]
    there.storage.delete([there.layout.manifest(first.id)])

    class Slow(WrappedStorage):
        def _do(self, verb, *args, **kwargs):
            if (verb, args[0]) == ("put_bytes", there.layout.manifest(first.id)):
                self.inner.delete([there.layout.data(first.id, "model")])
            return super()._do(verb, *args, **kwargs)

    with pytest.raises(StorageError, match=r"/model was deleted while its checkpoint was copied: the same command continues"):
        copy_planned(plan_copy(store, store.list(), whole=True), store.storage, Slow(there.storage), lambda _: None)
    assert first.id not in there.ids()
    assert command("copy", local, "run", target)[0] == 0
    assert command("verify", target, "run")[0] == 0


def test_a_copy_that_takes_days_renews_its_marks(local, command, tmp_path, target, monkeypatch):
    store = store_run(local, tmp_path / "scratch")
    assert command("copy", local, "run", "latest", target)[0] == 0
    there = CheckpointStore.open(target, "run")
    elapsed_s = 0.0

    class Slow(WrappedStorage):
        def put_file(self, key, path):
            nonlocal elapsed_s
            sent = super().put_file(key, path)
            elapsed_s += 30 * 3600
            for mark in (tmp_path / "target" / "run" / "manifests").glob("*.incoming"):
                os.utime(mark, (mark.stat().st_mtime - 30 * 3600,) * 2)
            assert collect_garbage(there) == []
            return sent

    monkeypatch.setattr(copying, "for_each", lambda items, act: [act(item) for item in items])
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + elapsed_s, time=time.time)
    monkeypatch.setattr(clocks, "time", clock)
    copy_planned(plan_copy(store, store.list(), whole=True), store.storage, Slow(there.storage), lambda _: None)
    assert elapsed_s == 4 * 30 * 3600
    assert there.list() == store.list()


def test_what_a_killed_copy_left_is_garbage_after_two_days(local, command, tmp_path, target):
    store_run(local, tmp_path / "scratch")
    assert command("copy", local, "run", target)[0] == 0
    there = CheckpointStore.open(target, "run")
    killed, done, _ = there.list()
    marks = [there.layout.incoming(it.id) for it in (killed, done)]
    for mark in marks:
        there.storage.put_bytes(mark, b"")
    there.storage.delete([there.layout.manifest(killed.id)])
    assert collect_garbage(there) == []
    for mark in marks:
        os.utime(tmp_path / "target" / mark, (time.time() - 49 * 3600,) * 2)
    assert collect_garbage(there) == [killed.id]
    assert not [info.key for info in there.storage.list(there.layout.manifests) if "incoming" in info.key]
    assert command("verify", target, "run")[0] == 0


def test_a_copy_continues_over_a_torn_file(local, command, tmp_path, target):
    store = store_run(local, tmp_path / "scratch")
    assert command("copy", local, "run", target)[0] == 0
    manifest = store.latest()
    path = tmp_path / "target" / store.layout.data(manifest.id, "model")
    path.write_bytes(bytes(5000))
    assert command("copy", local, "run", target)[0] == 0
    assert command("verify", target, "run")[0] == 0


def test_a_checkpoint_of_files_that_the_target_keeps_as_one_is_not_copied(local, command, tmp_path, target, monkeypatch):
    """As on CIFS or exFAT, where the second name finds the first file."""
    store = store_run(local, tmp_path / "scratch", steps=1)
    Attempt(store).session().report({}, folder(tmp_path / "c", Model="x", model="y"))
    write_outcome(store, Outcome(3, "completed"))
    monkeypatch.setattr(Path, "samefile", lambda *_: True)
    code, _, err = command("copy", local, "run", target)
    assert (code, f"the filesystem of {target} takes 'Model' and 'model' for the name of one file" in err) == (1, True), err
    assert CheckpointStore.open(target, "run").list() == []


def test_damage_of_the_source_is_not_copied(local, command, tmp_path, target):
    store = store_run(local, tmp_path / "scratch")
    store.storage.local_path(store.layout.data(store.latest().id, "model")).write_bytes(b"x" * 5000)
    code, _, err = command("copy", local, "run", target)
    assert (code, "differs from what was committed" in err) == (1, True)
    assert list(CheckpointStore.open(target, "run").ids()) == []


def test_a_checkpoint_whose_manifest_cannot_be_read_is_named_after_the_others_are_copied(local, capsys, tmp_path, target):
    store = store_run(local, tmp_path / "scratch")
    newer, damaged, whole = store.list()
    text = store.storage.get_bytes(store.layout.manifest(damaged.id))
    store.storage.put_bytes(store.layout.manifest(damaged.id), text.replace(b"loss", b"lost"))
    store.storage.put_bytes(store.layout.manifest(newer.id), seal({"format": FORMAT_VERSION + 1}))
    assert program.run(["copy", local, "run", target]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"1 checkpoint of run run in {target}: ")
    named = f"not copied, since this version cannot read their manifests: run {newer.id}, run {damaged.id}"
    assert named in err
    assert list(CheckpointStore.open(target, "run").ids()) == [whole.id]


def test_a_copy_opens_no_pipe_and_copies_no_file_of_another_size(local, command, tmp_path, target):
    store = store_run(local, tmp_path / "scratch")
    path = store.storage.local_path(store.layout.data(store.latest().id, "model"))
    os.truncate(path, 2**43)  # with holes: it takes no space here
    code, _, err = command("copy", local, "run", target)
    assert (code, "differs from what was committed" in err) == (1, True)
    path.unlink()
    os.mkfifo(path)
    code, _, err = command("copy", local, "run", target)
    assert (code, f"{path} is no file" in err) == (1, True)
    assert list(CheckpointStore.open(target, "run").ids()) == []


def test_a_copy_refuses_another_run_of_that_name_and_its_own_storage(local, command, tmp_path):
    store_run(local, tmp_path / "scratch")
    store_run(tmp_path / "other", tmp_path / "scratch2")
    code, _, err = command("copy", local, "run", tmp_path / "other")
    assert (code, err) == (
        1,
        f"prefect-torch: {tmp_path}/other/run is another run: give another storage, or delete it first\n",
    )
    (tmp_path / "link").symlink_to(local)
    for itself in (local, tmp_path / "link"):
        code, _, err = command("copy", local, "run", itself)
        assert (code, "is the storage of the run itself" in err) == (1, True)


def saved_block(name, server, bucket, endpoint):
    credentials = AwsCredentials(
        aws_access_key_id=server.access_key,
        aws_secret_access_key=SecretStr(server.secret_key),
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )
    S3Bucket(bucket_name=bucket, credentials=credentials).save(name, overwrite=True)
    return f"s3-bucket/{name}"


@pytest.mark.parametrize("chosen", [[], ["latest"]])
def test_a_copy_refuses_its_own_storage_by_another_name_of_the_server(command, tmp_path, moto, prefect_server, chosen):
    """Else it would delete the source's damaged file, as one that was copied badly."""
    bucket = moto.new_bucket()
    source = saved_block("copied-from", moto, bucket, moto.endpoint)
    port = moto.endpoint.rpartition(":")[2]
    itself = saved_block("copied-from-localhost", moto, bucket, f"http://localhost:{port}")
    store = store_run(source, tmp_path / "scratch")
    store.storage.put_bytes(store.layout.data(store.latest().id, "model"), b"damaged")
    before = contents(source)
    assert moto.endpoint != f"http://localhost:{port}"
    for target in (source, itself):
        code, _, err = command("copy", source, "run", *chosen, target)
        assert (code, "is the storage of the run itself" in err) == (1, True)
        assert contents(source) == before


def test_a_run_is_copied_to_a_bucket_of_the_same_name_on_another_server(command, tmp_path, moto, rclone, prefect_server):
    bucket = moto.new_bucket()
    rclone.client().create_bucket(Bucket=bucket)
    source = saved_block("copied-from", moto, bucket, moto.endpoint)
    other = saved_block("copied-to", rclone, bucket, rclone.endpoint)
    store_run(source, tmp_path / "scratch")
    assert command("copy", source, "run", other)[0] == 0
    assert command("verify", other, "run")[0] == 0
    assert len(CheckpointStore.open(other, "run").list()) == 3


@pytest.mark.parametrize("chosen", [[], ["latest"]])
def test_a_copy_that_was_trained_is_not_copied_over(local, command, tmp_path, target, chosen):
    """Also if the source has as many attempts by then: they are others, whose claims would fence the training in the copy."""
    store = store_run(local, tmp_path / "scratch")
    assert command("copy", local, "run", *chosen, target)[0] == 0
    there = CheckpointStore.open(target, "run")
    trained = claim_attempt(there, Owner.current(), world_size=1, lineage=1)
    for _ in range(2):
        again = claim_attempt(store, Owner.current(), world_size=1, lineage=1)
        write_outcome(store, Outcome(again.number, "failed", kind="user"))
    before = contents(target)
    code, _, err = command("copy", local, "run", *chosen, target)
    assert (code, f"{target}/run is a copy that has been trained further, in attempt {trained.number}" in err) == (1, True)
    with pytest.raises(FileExistsError, match="has been trained further"):
        copy_planned(plan_copy(store, [], whole=True), store.storage, there.storage, lambda _: None)
    assert contents(target) == before
    check_fence(there, claim_key(there, trained))


@pytest.mark.parametrize("verb", ["copy", "delete"])
def test_a_run_that_is_trained_is_refused(local, command, tmp_path, verb, target, monkeypatch):
    store = store_run(local, tmp_path / "scratch", ending=None)
    arguments = [target] if verb == "copy" else ["--yes"]
    before = contents(local)
    for more in ([], ["--ended"]):
        code, _, err = command(verb, local, "run", *arguments, *more)
        assert (code, "is being trained by process" in err) == (1, True)
    monkeypatch.setattr("prefect_torch.ckpt.runs.attempts.owner.Owner.is_process_gone", lambda self: None)
    code, _, err = command(verb, local, "run", *arguments)
    assert (code, f"if it has, {verb} with --ended" in err) == (1, True)
    assert contents(local) == before
    assert command(verb, local, "run", *arguments, "--ended")[0] == 0
    assert (not contents(local)) == (verb == "delete")
    assert store.run == "run"


def test_one_checkpoint_of_a_run_that_is_trained_is_copied(local, command, tmp_path, target):
    store_run(local, tmp_path / "scratch", ending=None)
    assert command("copy", local, "run", "latest", target)[0] == 0


def test_a_run_is_deleted_with_everything(storage, command, tmp_path):
    store_run(storage, tmp_path / "scratch")
    store_run(storage, tmp_path / "scratch", name="run2")
    other = contents(storage, "run2")
    code, _, err = command("delete", storage, "run")
    assert (code, err) == (
        2,
        "prefect-torch: there is no terminal to ask at: give --yes to delete; see prefect-torch delete --help\n",
    )
    assert command("delete", storage, "run", "--yes")[1] == "deleted run run\n"
    assert contents(storage) == {}
    assert contents(storage, "run2") == other


def test_a_run_that_holds_one_of_another_storage_is_not_deleted(storage, command, tmp_path):
    """The directory of a run may be somebody's storage; a run.json of users is no run."""
    store = store_run(storage, tmp_path / "scratch")
    reported = folder(tmp_path / "users", **{"run.json": "mine"})
    attempt = Attempt(store)
    attempt.session().report({}, reported)
    write_outcome(store, Outcome(attempt.number, "completed"))
    store.attach_metrics(store.latest().id, {"accuracy": 0.5}, name="run")
    nested = store_run(f"{store.storage.url}/run", tmp_path / "scratch-2", name="other", ending=None)
    before = contents(storage)
    code, _, err = command("delete", storage, "run", "--yes")
    assert (code, f"{store.storage.url}/run/other is another run, in a storage below run 'run'" in err) == (1, True)
    assert contents(storage) == before
    nested.storage.delete(nested.keys("other/"))
    assert command("delete", storage, "run", "--yes")[0] == 0
    assert contents(storage) == {}


def test_a_checkpoint_is_deleted_also_the_latest(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    latest = store.latest().id
    assert command("delete", local, "run", "latest", "--yes")[1] == f"deleted {latest}\n"
    assert latest not in set(store.ids())
    assert not list(store.storage.list(store.layout.data(latest)))
    assert store.latest().step == 1


@pytest.mark.parametrize("chosen", [[], ["latest"]])
def test_what_is_trained_since_the_question_is_not_deleted(local, command, tmp_path, monkeypatch, chosen):
    store = store_run(local, tmp_path / "scratch")

    def answer(*_, **__):
        claim_attempt(store, Owner.current(), world_size=1)
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", answer)
    code, _, err = command("delete", local, "run", *chosen)
    assert (code, "run 'run' is being trained by process" in err) == (1, True)
    assert len(store.list()) == 3


def test_a_checkpoint_whose_manifest_is_damaged_is_deleted_by_its_whole_id(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    first, foreign, _ = store.ids()
    store.attach_metrics(first, {"accuracy": 0.5})
    manifest = store.layout.manifest(first)
    store.storage.put_bytes(manifest, store.storage.get_bytes(manifest).replace(b"world_size", b"world_sizf"))
    store.storage.put_bytes(store.layout.manifest(foreign), b'{"mine": 1}')
    assert "does not match its own digest" in command("delete", local, "run", first[:18], "--yes")[2]
    assert command("delete", local, "run", first, "--yes") == (0, f"deleted {first}\n", "")
    assert not [key for key in contents(local) if first in key]
    assert command("delete", local, "run", foreign, "--yes")[0] == 1
    assert store.exists(foreign)


def test_an_interrupted_deletion_of_a_checkpoint_is_finished_by_the_same_command(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    damaged, kept, newest = store.ids()
    quarantine(store, damaged, "a file differs")
    store.storage.delete([store.layout.manifest(newest)])
    before = contents(local)
    assert "in quarantine" in command("delete", local, "run", damaged, "--yes")[2]
    store.storage.put_bytes(store.layout.incoming(newest), b"{}")
    assert command("delete", local, "run", newest, "--yes")[0] == 1
    store.storage.delete([store.layout.incoming(newest)])
    assert contents(local) == before
    assert command("delete", local, "run", newest, "--yes") == (0, f"deleted {newest}\n", "")
    assert store.keys(store.layout.data(newest)) == []
    assert command("delete", local, "run", newest, "--yes")[0] == 1
    assert list(store.ids()) == [kept]


def test_the_best_checkpoint_is_deleted_by_a_metric_and_no_run_for_want_of_its_id(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    best = store.latest().id  # the losses fall
    assert command("delete", local, "run", "--metric", "loss", "--order", "min", "--yes")[0] == 2
    assert command("delete", local, "run", "best", "--metric", "loss", "--order", "min", "--yes")[1] == f"deleted {best}\n"
    assert len(store.list()) == 2


@pytest.mark.parametrize("chosen", [[], ["latest"]])
def test_what_is_pinned_stays(local, command, tmp_path, chosen):
    store = store_run(local, tmp_path / "scratch")
    store.pin(store.latest().id)
    before = contents(local)
    code, _, err = command("delete", local, "run", *chosen, "--yes")
    assert (code, err.endswith("is pinned and not deleted: prefect-torch unpin first\n")) == (1, True)
    assert contents(local) == before
    assert command("delete", local, "run", store.list()[0].id, "--yes")[0] == 0


def test_a_run_that_is_read_is_not_deleted(local, command, tmp_path):
    store = store_run(local, tmp_path / "scratch")
    with store.checkpoint(store.latest()).as_directory():
        code, _, err = command("delete", local, "run", "--yes")
    assert (code, "a process of this machine reads a checkpoint" in err) == (1, True)
    assert len(list(store.ids())) == 3
