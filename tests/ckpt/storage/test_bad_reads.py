"""A bit that flips on the way is no damage: what differs is read once more, by a new connection."""

import contextlib
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from crash_points import open_run
from flipping_storage import FlippingStorage
from prefect_torch.ckpt import CheckpointCorruptError, StorageError
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.protocol import StorageSpec
from prefect_torch.ckpt.storage.retry import RetryingStorage
from ranks import Attempt, folder, read_files
from tcp_relay import TcpRelay
from wrapped_storage import WrappedStorage

LARGE = 100_000  # bytes, more than everything small together
FILES = {"a": b"first", "b": b"second" * 1000, "c/d": b"third"}


def state_of(score):
    return {"w": torch.full((700, 500), float(score)), "t": torch.full((3, 9000), float(score)).t(), "score": score}


@pytest.fixture
def store(tmp_path):
    """A run whose newest checkpoint is a folder's, after one of a state's."""
    store = open_run(LocalStorage(tmp_path / "store"))
    session = Attempt(store).session()
    session.report({}, state=state_of(1), upload="sync")
    session.report({}, folder(tmp_path / "c", a=FILES["a"], b=FILES["b"]))
    return store


def resume(store, manifests):
    assert choose_checkpoint(store, lineage=1, verify="digest") == manifests[-1]


def download(store, manifests):
    assert read_files(store.checkpoint(manifests[-1])) == {"a": FILES["a"], "b": FILES["b"]}


def copy(store, manifests, tmp_path):
    store.checkpoint(manifests[-1]).to_directory(tmp_path / "copy")
    assert (tmp_path / "copy/b").read_bytes() == FILES["b"]


def load(store, manifests):
    state = state_of(0)
    store.checkpoint(manifests[0]).load_state(state)
    assert torch.equal(state["w"], state_of(1)["w"])
    assert torch.equal(state["t"], state_of(1)["t"])
    assert state["score"] == 1


@pytest.mark.parametrize(
    ("use", "least"),
    [
        (resume, 3),
        (download, 2),
        (load, 3),
        (lambda store, manifests: store.committed(manifests[0].id), 1),
        (lambda store, manifests: store.list(), 2),
        (lambda store, manifests: store.verify(manifests[0]), 3),
    ],
    ids=["resume", "download", "load", "committed", "list", "verify"],
)
def test_a_bit_that_flips_in_any_one_read_is_not_noticed(store, use, least):
    manifests = store.list()
    fired = 0
    for number in range(1, 100):
        flipping = FlippingStorage(store.storage, number)
        use(open_run(flipping), manifests)
        fired += flipping.fired
        assert list(store.storage.list(store.layout.quarantined)) == []
        if not flipping.fired:
            break
    assert fired >= least


def test_what_was_attached_is_not_overlooked_for_a_bad_read(store):
    (manifest, _) = store.list()
    store.attach_metrics(manifest.id, {"accuracy": 1.0})
    flipping = FlippingStorage(store.storage, None)
    assert open_run(flipping).get(manifest.id).metrics == {"eval": {"accuracy": 1.0}}
    assert flipping.fired == 2


def test_a_connection_that_flips_a_bit_in_every_read_harms_nothing(store, tmp_path):
    manifests = store.list()
    flipping = FlippingStorage(store.storage, None)
    resume(open_run(flipping), manifests)
    load(open_run(flipping), manifests)
    copy(open_run(flipping), manifests, tmp_path)
    assert flipping.reopened_times == flipping.fired > 6
    assert open_run(store.storage).list() == manifests


def test_reads_that_all_differ_are_no_damage(store):
    """Nor is the third one's, if it differs from the second's."""
    number = itertools.count()

    class Unsteady(WrappedStorage):
        def local_path(self, key):
            return None

        def digest(self, key):
            return replace(self.inner.digest(key), digest=f"{next(number):032x}")

    (_, newest) = store.list()
    with pytest.raises(
        StorageError, match=r"each of 5 reads differs, so a connection or a memory here flips bits: .*/a differs"
    ):
        open_run(Unsteady(store.storage)).verify(newest)
    with pytest.raises(StorageError, match=f"checkpoint {newest.id} of run 'run' cannot be read though the storage answers"):
        choose_checkpoint(open_run(Unsteady(store.storage)), lineage=1, verify="digest")
    assert [manifest.id for manifest in store.list()][-1] == newest.id


def test_what_is_damaged_indeed_is_read_twice_and_no_more(store):
    (_, newest) = store.list()
    store.storage.put_bytes(store.layout.data(newest.id, "a"), b"other")
    watched = FlippingStorage(store.storage, 0)
    with pytest.raises(CheckpointCorruptError, match="a differs from what rank 0 committed"):
        open_run(watched).verify(newest)
    assert watched.reopened_times == 1


def test_a_local_file_is_read_again_past_the_page_cache(store, monkeypatch):
    dropped = []
    monkeypatch.setattr("os.posix_fadvise", lambda *args: dropped.append(args))
    (manifest, _) = store.list()
    store.verify(manifest)
    assert dropped == []
    for number, storage in enumerate((store.storage, open_storage(store.storage.url)), 1):
        storage.reopened().digest(store.layout.data(manifest.id, manifest.files[0].path))
        assert len(dropped) == number


class FlippingRelay(TcpRelay):
    """Flips one bit of the first large answer once it is told to."""

    def __init__(self, server_port: int):
        super().__init__(server_port)
        self.flips_at: int | None = None  # after how many connections it did
        self.is_armed = False
        self._direction = threading.local()  # each direction of a connection has a thread

    def change(self, data, *, is_answer):
        passed = getattr(self._direction, "passed", 0) + (len(data) if self.is_armed else 0)
        self._direction.passed = passed
        if is_answer and self.is_armed and passed > LARGE:
            self.is_armed = False
            self.flips_at = self.connections
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


@pytest.mark.parametrize("use", [resume, download], ids=["resume", "download"])
def test_a_bucket_is_read_again_by_another_connection(rclone, tmp_path, use):
    proxy = FlippingRelay(int(rclone.endpoint.rpartition(":")[2]))
    proxy.accept()
    with contextlib.ExitStack() as ended:
        ended.callback(proxy.refuse)
        options = {**rclone.options(), "aws_endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        storage = open_storage(StorageSpec(f"s3://{rclone.new_bucket()}", options))
        assert isinstance(storage, RetryingStorage)
        store = open_run(storage)
        Attempt(store).session().report({}, folder(tmp_path / "c", a=FILES["a"], b=(big := bytes(10**6))))
        manifests = store.list()
        store.verify(manifests[0])  # the first read of rclone's ranges is dropped and repeated, and a flip in it does no harm
        proxy.is_armed = True
        if use is resume:
            resume(store, manifests)
        else:
            assert read_files(store.checkpoint(manifests[0])) == {"a": FILES["a"], "b": big}
        assert proxy.flips_at is not None
        assert proxy.connections > proxy.flips_at
        assert list(storage.list(store.layout.quarantined)) == []


@pytest.mark.parametrize("is_away", [False, True])
def test_a_checkpoint_that_cannot_be_read_is_named_unless_the_whole_storage_is_away(store, is_away):
    """A bad sector, or an object that the server has lost, lasts; every start would end with the same error."""
    newest = store.list()[-1].id

    class Unreadable(WrappedStorage):
        def _do(self, verb, *args, **kwargs):
            if f"checkpoints/{newest}" in str(args[0]) and verb != "list":
                self.is_away = is_away
                raise StorageError("no answer")
            if getattr(self, "is_away", False):
                raise StorageError("no answer")
            return super()._do(verb, *args, **kwargs)

    words = (
        "^no answer$" if is_away else rf"^checkpoint {newest} .* may be whole: no answer; .*resume_from='run/ID'.* ls .* run`$"
    )
    with pytest.raises(StorageError, match=words):
        choose_checkpoint(open_run(Unreadable(store.storage)), lineage=1, verify="digest")
    assert [manifest.id for manifest in store.list()][-1] == newest
