"""What a leader reads from a bucket to prove a checkpoint whole, its node's ranks find, so that it is read once."""

import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from crash_points import open_run
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import Checkpoint, CheckpointCorruptError
from prefect_torch.ckpt.files.node_copy import NodeCopy
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.state.index import DCP_METADATA_FILE, Chunk, TensorEntry
from prefect_torch.ckpt.state.loading.read import Block
from prefect_torch.ckpt.state.loading.shared_reads import files_in_common
from prefect_torch.ckpt.state.loading.tensor_blocks import tensor_blocks
from prefect_torch.ckpt.storage.fsspec_files.backend import FsspecStorage
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from ranks import Attempt, cached, folder, read_files

DATA = ("get_file", "get_range", "digest")


@pytest.fixture
def bucket(tmp_path, node):
    """A storage that no rank reads in place, and counts what is asked of it."""
    return FaultyStorage(FsspecStorage(f"memory://{tmp_path}", {}))


def report(storage, tmp_path, kind):
    session = Attempt(open_run(storage)).session()
    if kind == "state":
        session.report({}, state={"w": torch.arange(10_000.0), "epoch": 3}, upload="sync")
    else:
        session.report({}, folder(tmp_path / "c", a="1", b="2"))
    return open_run(storage).list()[-1]


def use(store, manifest, kind):
    checkpoint = store.checkpoint(manifest)
    if kind == "state":
        use_state(checkpoint)
    else:
        assert read_files(checkpoint) == {"a": b"1", "b": b"2"}


def use_state(checkpoint):
    state = {"w": torch.zeros(10_000), "epoch": 0}
    checkpoint.load_state(state)
    assert torch.equal(state["w"], torch.arange(10_000.0))
    assert state["epoch"] == 3


@pytest.mark.parametrize("kind", ["folder", "state"])
def test_a_start_reads_the_manifest_and_every_byte_once(bucket, node, tmp_path, kind):
    manifest = report(bucket, tmp_path, kind)
    store = open_run(bucket)
    bucket.operations.clear()
    copy = NodeCopy()
    chosen = choose_checkpoint(store, lineage=1, verify="digest", prove=copy.verify)
    for _ in range(2):  # ranks
        use(store, chosen, kind)
    reads = [key for verb, key in bucket.operations if verb in (*DATA, "get_bytes")]
    assert reads.count(store.layout.manifest(manifest.id)) == 1
    assert sorted(key for key in reads if "/checkpoints/" in key) == sorted(
        store.layout.data(manifest.id, entry.path) for entry in manifest.files
    )
    copy.release()
    assert cached(node) == []
    use(store, chosen, kind)  # who comes later reads for itself


def test_the_ranks_of_a_node_download_a_replicated_state_once(bucket, node, tmp_path):
    """They come one after the other, as slow ones do: it is kept until the first report."""
    manifest = report(bucket, tmp_path, "state")
    attempt = Attempt(open_run(bucket), world_size=8, nodes=(8,))
    bucket.operations.clear()
    turns = [Event() for _ in range(9)]
    turns[0].set()

    def train(session, rank):
        turns[rank].wait(20)
        use_state(session.restored)
        if rank == 7:
            assert cached(node)
        turns[rank + 1].set()
        session.report({})

    assert attempt.run(train) == [None] * 8
    reads = sorted(key for verb, key in bucket.operations if verb in (*DATA, "get_bytes") and "/checkpoints/" in key)
    paths = [it.path for it in manifest.files if it.path != DCP_METADATA_FILE]
    assert reads == sorted(open_run(bucket).layout.data(manifest.id, path) for path in paths)
    assert cached(node) == []


def test_a_rank_that_comes_late_finds_what_is_there_however_little_space_is_left(bucket, node, tmp_path, monkeypatch):
    manifest = report(bucket, tmp_path, "state")
    size = sum(entry.bytes for entry in manifest.files)

    def disk_usage(_, left=2.2 * size):
        return SimpleNamespace(free=left - sum(path.stat().st_size for path in cached(node)))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    ranks = [open_run(bucket).checkpoint(manifest) for _ in range(2)]
    bucket.operations.clear()
    for checkpoint in ranks:
        checkpoint.node_copy = NodeCopy(2)
        use_state(checkpoint)
    reads = [key for verb, key in bucket.operations if verb in (*DATA, "get_bytes") and "/checkpoints/" in key]
    assert len(reads) == len(set(reads)) == len(manifest.files) - 1, "all but torch's own index"
    for checkpoint in ranks:
        checkpoint.node_copy.release()
    assert cached(node) == []


def test_a_rank_whose_copy_was_changed_reads_where_it_was_committed(bucket, node, tmp_path, caplog):
    manifest = report(bucket, tmp_path, "state")
    first, second = (open_run(bucket).checkpoint(manifest) for _ in range(2))
    first.node_copy, second.node_copy = NodeCopy(2), NodeCopy(2)
    use_state(first)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prefect_torch.ckpt.files.cache._holds", lambda path, _: path.exists())
        for path in cached(node):
            path.write_bytes(bytes(path.stat().st_size))
        use_state(second)
    assert "reading it from where it was committed" in caplog.text
    for each in (first, second):
        each.node_copy.release()
    assert cached(node) == []


@pytest.mark.parametrize("why", ["one rank", "no room", "in place"])
def test_a_rank_that_shares_nothing_reads_only_what_it_needs(bucket, node, tmp_path, monkeypatch, why):
    storage = LocalStorage(tmp_path / "store") if why == "in place" else bucket
    manifest = report(storage, tmp_path, "state")
    if why == "no room":
        monkeypatch.setattr("prefect_torch.ckpt.files.node_copy._ROOM", 2**60)
    checkpoint = open_run(storage).checkpoint(manifest)
    checkpoint.node_copy = None if why == "one rank" else NodeCopy(8)
    bucket.operations.clear()
    use_state(checkpoint)
    assert bucket.counts()["get_file"] == 0
    assert cached(node) == []


def test_files_of_a_sharded_state_are_not_shared():
    files = [FileEntry("replicated", 1000, "", 0), FileEntry("sharded", 1000, "", 0), FileEntry("both", 1000, "", 0)]
    blocks = [
        Block("replicated", 0, 1000, "", is_replicated=True),
        Block("sharded", 0, 1000, ""),
        Block("both", 0, 900, ""),
        Block("both", 900, 100, "", is_replicated=True),
    ]
    assert files_in_common(blocks, files, 1) == set()
    assert files_in_common(blocks, files, 2) == {"replicated"}
    assert files_in_common(blocks, files, 16) == {"replicated", "both"}  # 1.6 times the file, if each rank reads its part


def test_a_tensor_is_a_replica_where_it_is_read_whole():
    chunks = tuple(Chunk((row, 0), (2, 4), f"__{row // 2}_0.distcp", (0, 0), 0, ("",)) for row in (0, 2))
    entry = TensorEntry(("w",), "float32", (4, 4), chunks)
    assert [it.is_replicated for it in tensor_blocks(entry, 1 << 20, torch.zeros(4, 4), (0, 0))] == [True, True]
    assert [it.is_replicated for it in tensor_blocks(entry, 1 << 20, torch.zeros(3, 4), (0, 0))] == [False, False]


def test_a_damaged_checkpoint_is_set_aside_and_nothing_of_it_is_kept(bucket, node, tmp_path):
    first = report(bucket, tmp_path, "folder")
    second = report(bucket, tmp_path, "folder")
    bucket.put_bytes(open_run(bucket).layout.data(second.id, "b"), b"?")
    copy = NodeCopy()
    assert choose_checkpoint(open_run(bucket), lineage=1, verify="digest", prove=copy.verify) == first
    assert [path.name for path in sorted(cached(node))] == ["a", "b"]
    copy.release()
    assert cached(node) == []


def test_a_copy_that_was_changed_is_read_from_where_it_was_committed(bucket, node, tmp_path, caplog):
    report(bucket, tmp_path, "state")
    copy = NodeCopy()
    chosen = choose_checkpoint(open_run(bucket), lineage=1, verify="digest", prove=copy.verify)
    for path in cached(node):
        path.write_bytes(bytes(path.stat().st_size))
    use(open_run(bucket), chosen, "state")
    assert "reading it from where it was committed" in caplog.text
    copy.release()


@pytest.mark.parametrize("why", ["no room", "nobody's folder", "size only"])
def test_where_nothing_can_be_kept_it_is_verified_all_the_same(bucket, node, tmp_path, monkeypatch, why):
    manifest = report(bucket, tmp_path, "folder")
    if why == "no room":
        monkeypatch.setattr("prefect_torch.ckpt.files.node_copy._ROOM", 2**60)
    elif why == "nobody's folder":
        monkeypatch.setattr("prefect_torch.ckpt.files.cache._cache_root", lambda: Path("/proc/nothing"))
    copy = NodeCopy()
    bucket.operations.clear()
    copy.verify(open_run(bucket), manifest, "size" if why == "size only" else "digest")
    assert bucket.counts()["digest"] == (0 if why == "size only" else 2)
    assert cached(node) == []


def test_a_folder_is_read_in_place_and_copied_nowhere(node, tmp_path):
    storage = LocalStorage(tmp_path / "store")
    manifest = report(storage, tmp_path, "folder")
    copy = NodeCopy()
    copy.verify(open_run(storage), manifest, "digest")
    assert cached(node) == []


def test_a_temporary_directory_that_is_cleaned_meanwhile_damages_no_checkpoint(bucket, node, tmp_path, monkeypatch):
    newest = report(bucket, tmp_path, "folder")
    store = open_run(bucket)
    get_file, cleaned = FsspecStorage.get_file, []

    def clean_first(self, key, *rest):
        if not cleaned:
            cleaned.append(key)
            shutil.rmtree(node)
            node.mkdir()
        return get_file(self, key, *rest)

    monkeypatch.setattr(FsspecStorage, "get_file", clean_first)
    assert choose_checkpoint(store, lineage=1, verify="digest", prove=NodeCopy().verify).id == newest.id
    assert cleaned
    assert list(store.keys(store.layout.quarantined)) == []


def test_an_async_report_of_what_was_downloaded_leaves_it_to_the_other_readers(bucket, tmp_path):
    report(bucket, tmp_path, "folder")
    store = open_run(bucket)
    latest = store.checkpoint(store.latest())
    content = read_files(latest)
    with latest.as_directory() as other, latest.as_directory() as directory:
        session = Attempt(store).session()
        session.report({}, Checkpoint.from_directory(directory), upload="async", step=99)
        session.finish()
        assert {str(path.relative_to(other)): path.read_bytes() for path in Path(other).rglob("*") if path.is_file()} == content
    assert read_files(store.checkpoint(store.latest())) == content


@pytest.mark.parametrize("place", [None, "mine"])
def test_a_copy_that_fails_leaves_no_part_of_a_file_and_no_directory_that_it_made(bucket, node, tmp_path, place):
    manifest = report(bucket, tmp_path, "folder")
    store = open_run(bucket)
    bucket.put_bytes(store.layout.data(manifest.id, "b"), b"3")
    before = {path for path in node.iterdir() if not path.name.startswith("prefect-torch-0")}
    with pytest.raises(CheckpointCorruptError):
        store.checkpoint(manifest).to_directory(None if place is None else tmp_path / place)
    assert {path for path in node.iterdir() if not path.name.startswith("prefect-torch-0")} == before
    assert place is None or not (tmp_path / place).exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a").write_text("the user's")
    with pytest.raises(CheckpointCorruptError):
        store.checkpoint(manifest).to_directory(tmp_path / "mine")
    assert [(path.name, path.read_text()) for path in (tmp_path / "mine").iterdir()] == [("a", "the user's")]
