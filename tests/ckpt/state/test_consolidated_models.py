"""One safetensors file of a state that many ranks stored, read back by the safetensors library."""

import io
import json
import multiprocessing
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from faulty_storage import FaultyStorage
from forked_programs import run_program
from prefect_torch.ckpt import Checkpoint, CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore, RankLocal
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.state.index import INDEX_FILE, Chunk
from prefect_torch.ckpt.state.loading import export
from prefect_torch.ckpt.state.loading.export import Runs
from prefect_torch.ckpt.state.loading.safetensors import DTYPES
from ranks import Attempt, folder
from safetensors import safe_open
from safetensors.torch import load_file
from states import check_equal, make_training
from xxhash import xxh3_128_hexdigest


def reported(store, state, ranks=1):
    """Report what `state(rank)` returns and return the checkpoint."""
    errors = Attempt(store, ranks).run(lambda session, rank: session.report({}, state=state(rank), upload="sync"))
    assert errors == [None] * ranks
    return store.checkpoint(store.latest())


def test_the_file_holds_what_the_module_holds(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model, optimizer, _ = make_training(seed=1)
    checkpoint = reported(store, lambda rank: {"model": model, "optimizer": optimizer, "epoch": 3}, ranks=2)
    path = checkpoint.to_safetensors("~/new/model.safetensors")
    assert path == str(tmp_path / "new/model.safetensors")
    check_equal(load_file(path), dict(model.state_dict()))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [it.name for it in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_every_dtype_of_safetensors_is_written_and_another_is_refused(store, tmp_path):
    raw = torch.arange(64, dtype=torch.uint8).remainder(2)
    tensors = {dtype: raw.view(getattr(torch, dtype)).clone() for dtype in DTYPES if hasattr(torch, dtype)}
    checkpoint = reported(store, lambda rank: {"model": tensors, "other": {"z": torch.ones(2, dtype=torch.complex128)}})
    check_equal(load_file(checkpoint.to_safetensors(tmp_path / "all")), tensors)
    with pytest.raises(ValueError, match=r"safetensors cannot hold everything below 'other' .*: z is complex128"):
        checkpoint.to_safetensors(tmp_path / "none", key="other")
    assert not (tmp_path / "none").exists()


def test_what_has_two_names_is_written_under_each_and_what_has_no_element_too(store, tmp_path):
    model = torch.nn.ModuleDict({"in": torch.nn.Embedding(5, 3), "out": torch.nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["in"].weight
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("scalar", torch.tensor(2.5))
    checkpoint = reported(store, lambda rank: {"model": model})
    loaded = load_file(checkpoint.to_safetensors(tmp_path / "model.safetensors"))
    check_equal(loaded, dict(model.state_dict()))
    again = torch.nn.ModuleDict({"in": torch.nn.Embedding(5, 3), "out": torch.nn.Linear(3, 5, bias=False)})
    again["out"].weight = again["in"].weight
    again.register_buffer("empty", torch.empty(0, 3))
    again.register_buffer("scalar", torch.tensor(0.0))
    again.load_state_dict(loaded)


def test_another_part_of_the_state_is_chosen_by_its_name(store, tmp_path, caplog):
    large, small = torch.arange(50_000.0), torch.arange(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    state = {"model": {"student": model}, "averages": {"large": large, "small": small, "decay": 0.9}, "mask": small, "epoch": 1}
    checkpoint = reported(store, lambda rank: state)
    check_equal(load_file(checkpoint.to_safetensors(tmp_path / "a", key="averages")), {"large": large, "small": small})
    assert "averages.decay in" in caplog.text
    check_equal(load_file(checkpoint.to_safetensors(tmp_path / "b", key="model.student")), dict(model.state_dict()))
    with pytest.raises(ValueError, match="has no tensor below 'mode': choose another key, of 'averages', 'model'"):
        checkpoint.to_safetensors(tmp_path / "c", key="mode")
    with pytest.raises(ValueError, match="has no tensor below 'model', nor below any other key"):
        reported(store, lambda rank: {"epoch": 2, "mask": small}).to_safetensors(tmp_path / "d")


def test_a_key_that_begins_like_another_is_not_part_of_that(store, tmp_path):
    state = {"model": {"w": torch.ones(2), "in": {"v": torch.ones(3)}}, "model.ema": {"w": torch.zeros(2)}}
    checkpoint = reported(store, lambda _: state)
    checkpoint.to_safetensors(tmp_path / "file")
    assert sorted(load_file(tmp_path / "file")) == ["in.v", "w"]
    assert (load_file(tmp_path / "file")["w"] == 1).all()
    checkpoint.to_safetensors(tmp_path / "file", key="model.in")
    assert [*load_file(tmp_path / "file")] == ["v"]


def test_a_tensor_with_the_name_of_the_metadata_is_refused(store, tmp_path):
    checkpoint = reported(store, lambda _: {"model": {"__metadata__": torch.ones(2)}})
    with pytest.raises(ValueError, match="safetensors has another use for the name of the tensor '__metadata__'"):
        checkpoint.to_safetensors(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_what_each_rank_has_on_its_own_has_no_whole(store, tmp_path):
    checkpoint = reported(store, lambda rank: {"model": RankLocal(torch.nn.Linear(2, 2))}, ranks=2)
    with pytest.raises(ValueError, match=r"each rank has its own tensors below 'model' .*: weight@rank0"):
        checkpoint.to_safetensors(tmp_path / "model")


def test_a_folder_of_files_holds_no_state_to_consolidate(store, tmp_path):
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"))
    for checkpoint in (store.checkpoint(store.latest()), folder(tmp_path / "d", model="x")):
        with pytest.raises(CheckpointNotFoundError, match="holds no state: it was reported as a directory"):
            checkpoint.to_safetensors(tmp_path / "model")


def test_a_changed_byte_leaves_the_file_that_was_there(store, tmp_path):
    checkpoint = reported(store, lambda rank: {"model": torch.nn.Linear(100, 100)})
    path = Path(checkpoint.to_safetensors(tmp_path / "model"))
    before = path.read_bytes()
    damaged = Path(checkpoint.path, "__0_0.distcp")
    data = bytearray(damaged.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"__0_0.distcp differs from what was stored"):
        checkpoint.to_safetensors(path)
    assert path.read_bytes() == before
    assert sorted(it.name for it in tmp_path.iterdir()) == ["model", "store"]


def with_value(directory, name, value):
    """Store another value in the place of one, as only a foreign program does."""
    data = io.BytesIO()
    torch.save(value, data)
    index = json.loads((directory / INDEX_FILE).read_text())
    entry = index["values"][name]
    file = directory / entry["file"]
    entry |= {"start": file.stat().st_size, "bytes": len(data.getvalue()), "digest": xxh3_128_hexdigest(data.getvalue())}
    file.write_bytes(file.read_bytes() + data.getvalue())
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return Checkpoint.from_directory(directory)


OTHERS = {
    "longer": torch.ones(9),
    "of another dtype": torch.ones(1, dtype=torch.int32),
    "without memory": torch.ones(1, device="meta"),
    "sparse": torch.ones(1).to_sparse(),
    "no tensor": 1,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_small_tensor_that_is_not_what_the_index_describes_is_refused_before_anything_changes(store, tmp_path, other):
    state = {"model": {"a": torch.zeros(1), "b": torch.ones(1), "large": torch.ones(50_000)}}
    stored = reported(store, lambda rank: state)
    shutil.copytree(stored.path, tmp_path / "copy")
    checkpoint = with_value(tmp_path / "copy", "model.a", other)
    target = {"model": {name: torch.full_like(tensor, 5) for name, tensor in state["model"].items()}}
    for use in (lambda: checkpoint.to_safetensors(tmp_path / "file"), lambda: checkpoint.load_state(target)):
        with pytest.raises(CheckpointCorruptError, match=r"'model.a' in .*/copy/__0_1.distcp is not .*, float32 \[1\]"):
            use()
    assert not (tmp_path / "file").exists()
    assert all((tensor == 5).all() for tensor in target["model"].values())


def _write_for_ever(checkpoint, path, begun):
    def wait(*_):
        begun.set()
        threading.Event().wait()

    export.write_at = wait  # of this process
    checkpoint.to_safetensors(path)


def test_what_a_killed_process_has_written_goes_with_the_next_call(store, tmp_path):
    checkpoint = reported(store, lambda rank: {"model": torch.nn.Linear(100, 100)})
    begun = multiprocessing.get_context("fork").Event()
    writing = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(checkpoint, tmp_path / "model", begun))
    writing.start()
    assert begun.wait(60)
    writing.kill()
    writing.join(60)
    checkpoint.to_safetensors(tmp_path / "model")
    assert sorted(it.name for it in tmp_path.iterdir()) == ["model", "store"]


def test_a_bucket_is_read_once_by_ranges(moto, tmp_path, monkeypatch):
    for name, value in moto.options().items():
        monkeypatch.setenv(name.upper(), value)
    store = CheckpointStore.open(f"s3://{moto.new_bucket()}/folder", "run")
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(6)))
    checkpoint = reported(store, lambda rank: {"model": model, "optimizer": {"state": torch.ones(3_000_000)}})
    counting = FaultyStorage(store.storage)
    counted = CheckpointStore(counting, Layout("run"), store.spec).checkpoint(checkpoint.manifest)
    check_equal(load_file(counted.to_safetensors(tmp_path / "model")), dict(model.state_dict()))
    counts = counting.counts()
    assert counts["get_file"] == 0
    assert counts["get_range"] <= 1 + 6 * 700 * 700 * 4 // 2**22 + 6  # spans of at most 4 MiB, of the model alone


@pytest.mark.parametrize(
    ("offsets", "sizes", "shape"),
    [
        ((), (), ()),
        ((2,), (3,), (7,)),
        ((2, 0), (3, 5), (7, 5)),
        ((0, 2), (7, 2), (7, 5)),
        ((3, 1), (2, 3), (7, 5)),
        ((1, 2, 1), (2, 3, 2), (4, 6, 3)),
        ((1, 2, 0), (2, 3, 4), (4, 6, 4)),
        ((0, 2, 1), (4, 2, 2), (4, 6, 3)),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 7, 1000])
def test_a_chunk_is_laid_out_where_it_lies_in_the_whole(tmp_path, offsets, sizes, shape, block_bytes):
    whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    part = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))].clone()
    runs = Runs.of(Chunk(offsets, sizes, "file", (0, 0), 0, ()), shape, 2)
    raw = memoryview(part.numpy().tobytes())
    with (tmp_path / "file").open("wb") as file:
        file.truncate(10 + whole.numel() * 2)
        for at in range(0, len(raw), block_bytes):
            runs.writes(file.fileno(), 10, at)(raw[at : at + block_bytes])
    written = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()[10:]), dtype=torch.int16).reshape(shape)
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = True
    assert torch.equal(written, torch.where(inside, whole, 0))


MEASURE = """
import resource, sys
from pathlib import Path
from prefect_torch.ckpt import Checkpoint
import prefect_torch.ckpt.state.loading.export, prefect_torch.ckpt.state.loading.load
Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
Checkpoint(sys.argv[1]).to_safetensors(sys.argv[2])
print(peak() - before)
"""


def test_a_tensor_of_256_mib_costs_less_than_64_mib_of_memory(store, tmp_path):
    tensor = torch.zeros(2**14, 2**12)
    checkpoint = reported(store, lambda rank: {"model": {"large": tensor}}, ranks=2)
    measure = [sys.executable, "-c", MEASURE, checkpoint.path, str(tmp_path / "model")]
    told = run_program(measure, check=True, capture_output=True, text=True).stdout
    assert Checkpoint(checkpoint.path).id == checkpoint.id
    assert (tmp_path / "model").stat().st_size > tensor.nbytes
    assert int(told) * 1024 < 64 * 2**20
