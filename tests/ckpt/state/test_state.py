"""What a report of live objects promises, with ranks as threads."""

import collections
import itertools
import json
import os
import sys
import threading
import time
import warnings
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from memory_storage import MemoryStorage
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    CommitFailedError,
    RankLocal,
    RankLocalStateError,
    ReportMismatchError,
    StateMismatchError,
    get_checkpoint,
    log_metrics,
    report,
)
from prefect_torch.ckpt.reporting.agreement import Agreement
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.commit import write_manifest
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.rank_part import CommitJob, RankPart, StagedReport
from prefect_torch.ckpt.reporting.rank_report import Report
from prefect_torch.ckpt.runs.attempts.attempt import claim_key
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.manifest import new_id
from prefect_torch.ckpt.state.index import DTYPE_BYTES
from prefect_torch.ckpt.state.objects.flatten import flatten
from prefect_torch.ckpt.state.objects.parameters import _reshard, unwrap
from prefect_torch.ckpt.state.objects.tensors import is_dtensor
from prefect_torch.ckpt.state.staging import buffer
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
from prefect_torch.ckpt.storage.local_files.storage import MOST_RECORD_BYTES, LocalStorage
from ranks import Attempt, folder, read_files
from states import check_equal, make_state, make_training, take_step
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def report_states(store, states, world_size=1, **options):
    """Report `states(epoch, rank)` for three epochs."""

    def train(session, rank):
        for epoch in range(3):
            session.report({"epoch": epoch}, state=states(epoch, rank), **options)

    assert Attempt(store, world_size).run(train) == [None] * world_size


def load(checkpoint, state, rank=0, world_size=1, **options):
    checkpoint.load_state(state, rank=rank, world_size=world_size, **options)
    return state


def newest(store):
    return store.checkpoint(store.latest())


@pytest.mark.parametrize("upload", ["sync", "async"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_comes_back_bit_by_bit_into_fresh_objects(store, world_size, upload):
    report_states(store, lambda epoch, rank: make_state(epoch, rank, steps=epoch), world_size, upload=upload)
    for manifest in store.list():
        store.verify(manifest)
        for rank in range(world_size):
            loaded = load(store.checkpoint(manifest), make_state(9, rank, steps=0), rank, world_size)
            check_equal(loaded, make_state(manifest.step, rank, steps=manifest.step))


def test_a_state_loads_over_one_that_has_gone_on(store):
    report_states(store, lambda epoch, rank: make_state(epoch, rank, steps=2))
    check_equal(load(newest(store), make_state(9, 0, steps=4)), make_state(2, 0, steps=2))


def test_training_goes_on_as_if_it_had_never_stopped(store):
    batches = [torch.randn(8, 30, generator=torch.Generator().manual_seed(number)) for number in range(6)]

    def go_on(model, optimizer, scheduler, steps):
        for batch in batches[steps]:
            take_step(model, optimizer, batch)
            scheduler.step()

    whole = make_training(1, 0)
    go_on(*whole, slice(0, 6))
    first = make_training(1, 0)
    go_on(*first, slice(0, 3))
    names = ("model", "optimizer", "scheduler")
    Attempt(store).run(lambda session, _: session.report({}, state=dict(zip(names, first, strict=True))))
    second = make_training(2, 0)
    load(newest(store), dict(zip(names, second, strict=True)))
    go_on(*second, slice(3, 6))
    check_equal(dict(zip(names, second, strict=True)), dict(zip(names, whole, strict=True)))


def common_part(epoch):
    state = make_state(epoch, steps=epoch)
    return {key: state[key] for key in ("model", "optimizer", "scheduler", "small", "large")}


@pytest.mark.parametrize("sizes", [(1, 2, 1), (3, 2, 3), (2, 1, 2)])
def test_what_ranks_have_alike_survives_any_number_of_ranks(store, sizes):
    for number, world_size in enumerate(sizes):

        def train(session, rank, number=number, world_size=world_size):
            state = common_part(3)
            if number:
                state = common_part(7)
                load(session.restored, state, rank, world_size)
            session.report({}, state=state)

        assert Attempt(store, world_size).run(train) == [None] * world_size
    assert [manifest.world_size for manifest in store.list()] == list(sizes)
    for manifest in store.list():
        check_equal(load(store.checkpoint(manifest), common_part(7)), common_part(3))


def test_what_ranks_had_on_their_own_needs_a_word_at_another_number_of_ranks(store):
    report_states(store, make_state, 2)
    before = make_state(9, 0)
    with pytest.raises(
        RankLocalStateError, match=r"extra\.position\.sample, rng differed between the 2 ranks .* now there are 3"
    ):
        load(newest(store), before, 0, 3)
    check_equal(before, make_state(9, 0))
    asked = []

    def share_out(name, values, rank, world_size):
        asked.append((name, rank, world_size))
        return values[rank % len(values)]

    loaded = load(newest(store), make_state(9, 2), 2, 3, rank_local=share_out)
    check_equal(loaded, make_state(2, 0))
    assert sorted(asked) == [("extra.position.sample", 2, 3), ("rng", 2, 3)]


def test_a_part_of_a_state_may_be_loaded(store):
    report_states(store, make_state, 2)
    model = make_training(9)[0]
    load(newest(store), {"model": model})
    check_equal(model, make_training(2)[0])
    epoch = load(newest(store), {"extra": {"epoch": None}})["extra"]
    assert epoch["epoch"] == 2


def test_each_rank_copies_and_stores_its_share_of_what_all_have(store):
    tensor = torch.randn(1000, 1000)
    report_states(store, lambda *_: {"w": tensor, "v": tensor[:500]}, 3)
    sizes = [entry.bytes for entry in store.latest().files if entry.path.endswith("_0.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.01 * tensor.nbytes * 1.5 / 3


def test_buffers_of_a_module_are_those_of_rank_0_as_ddp_sends_them(store):
    def states(epoch, rank):
        model, _, _ = make_training(epoch)
        model[1].running_mean.fill_(rank)
        return {"model": model}

    report_states(store, states, 3)
    model = make_training(9)[0]
    load(newest(store), {"model": model})
    assert torch.equal(model[1].running_mean, torch.zeros(200))


class Buffers:
    """The buffers of a module, as the documentation shows them for ranks that have their own."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return dict(self.model.named_buffers())

    def load_state_dict(self, state):
        self.model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("size", [3, 20_000])
def test_buffers_that_each_rank_has_of_its_own_come_back_by_an_object_that_is_marked(store, size):
    def make(value):
        model = torch.nn.BatchNorm2d(size, affine=False)
        model.running_mean.fill_(value)
        return {"model": model, "buffers": RankLocal(Buffers(model))}

    report_states(store, lambda _, rank: make(rank + 1), 2)
    for rank in range(2):
        assert load(newest(store), make(7), rank, 2)["model"].running_mean.tolist() == [rank + 1] * size


def test_what_ddp_and_compile_wrap_has_the_name_of_what_they_wrap(store):
    plain_model = make_training(1)[0]
    wrapped = torch.compile(plain_model, backend="eager")
    names = [{leaf.name for leaf in flatten({"m": module}, 0).leaves} for module in (wrapped, plain_model)]
    assert names[0] == names[1]
    Attempt(store).run(lambda session, _: session.report({}, state={"m": wrapped}))
    other = make_training(2)[0]
    load(newest(store), {"m": other})
    check_equal(other, plain_model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # in torch, as it compiles an optimizer
def test_the_compiler_leaves_reports_and_restores_out_of_a_function_that_it_compiles(store):
    """Otherwise it compiles this package, and then the function's next step has no gradients."""
    model, optimizer, _ = make_training(1)
    state = {"model": model, "optimizer": optimizer}

    @torch.compile(backend="eager")
    def train_epoch(batch):
        if checkpoint := get_checkpoint():
            checkpoint.load_state(state)
        take_step(model, optimizer, batch)
        log_metrics({"loss": batch.sum()})
        report({"loss": batch.sum()}, state=state, upload="sync")

    for _ in range(2):
        start_session(Attempt(store).session())
        for _ in range(2):
            train_epoch(torch.ones(8, 30))
    start_session(None)
    assert newest(store).step == 3


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def make_pair(wrap, seed):
    """Return a module of two that `wrap` may wrap, trained for a step, with its optimizer and an average of one of them."""
    torch.manual_seed(seed)
    pair = torch.nn.ModuleDict({"g": wrap(torch.nn.Linear(3, 3)), "d": wrap(torch.nn.Linear(3, 2))})
    optimizer = torch.optim.AdamW(pair.parameters())
    pair["d"](pair["g"](torch.ones(2, 3))).square().sum().backward()
    optimizer.step()
    return {"pair": pair, "optimizer": optimizer, "ema": AveragedModel(pair["g"])}


def tensors_of(state):
    moments = [list(of.values()) for of in state["optimizer"].state.values()]
    return [*state["pair"].state_dict().values(), *state["ema"].state_dict().values(), *moments]


@pytest.mark.parametrize("by_former", [False, True])
def test_what_ddp_wraps_within_a_module_has_the_name_of_what_it_wraps(store, group, monkeypatch, by_former):
    wraps = {"ddp": DistributedDataParallel, "plain": lambda module: module}
    names = [{leaf.name for leaf in flatten(make_pair(wrap, 1), 0).leaves} for wrap in wraps.values()]
    assert names[0] == names[1]
    for stored_by, loaded_by in [("ddp", "ddp")] if by_former else itertools.permutations(wraps):
        reported, state = make_pair(wraps[stored_by], 1), make_pair(wraps[loaded_by], 2)
        with monkeypatch.context() as patch:
            if by_former:
                patch.setattr("prefect_torch.ckpt.state.objects.parameters._prefixes_of_ddp", lambda module: [])
            assert Attempt(store).run(lambda session, _, it=reported: session.report({}, state=it, upload="sync")) == [None]
        load(newest(store), state)
        check_equal(tensors_of(state), tensors_of(reported))


def test_a_tensor_that_changes_after_the_report_is_stored_as_it_was(store, monkeypatch):
    released, put_buffers = threading.Event(), LocalStorage.put_buffers

    def wait(self, key, parts):
        assert released.wait(30)
        return put_buffers(self, key, parts)

    monkeypatch.setattr(LocalStorage, "put_buffers", wait)

    def train(session, rank):
        state = make_state(1, rank)
        session.report({}, state=state)
        with torch.no_grad():
            for tensor in (*state["model"].parameters(), state["small"], state["large"], state["rng"].value):
                tensor.zero_()
        state["extra"]["position"]["sample"] = -1
        released.set()

    assert Attempt(store, 2).run(train) == [None, None]
    for rank in range(2):
        check_equal(load(newest(store), make_state(9, rank), rank, 2), make_state(1, rank))


def test_memory_is_allocated_once_while_the_structure_stays(store, monkeypatch):
    made, make = [], StagingBuffer.__init__

    def count(self, *args, **kwargs):
        make(self, *args, **kwargs)
        made.append(self._memory.tensor.data_ptr())

    monkeypatch.setattr(StagingBuffer, "__init__", count)

    def train(session, rank):
        for epoch in range(5):
            session.report({}, state=make_state(epoch, rank))
        session.report({}, state={"large": torch.ones(1000, 100)})
        session.report({}, state=make_state(7, rank))

    assert Attempt(store, 2).run(train) == [None, None]
    assert len(made) == 6  # per rank: the first, a smaller one in the same memory, and the first again
    assert len(set(made)) == 2
    check_equal(load(newest(store), make_state(9, 1), 1, 2), make_state(7, 1))


def parameters(**tensors):
    return torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})


def test_a_new_structure_on_one_rank_is_planned_anew_on_all(store):
    def states(epoch, rank):
        more = {"late": parameters(w=torch.full((300, 300), float(epoch)))} if epoch >= rank else {}
        return {"model": parameters(w=torch.full((600, 600), float(epoch))), **more}

    report_states(store, states, 3)
    for manifest in store.list():
        epoch = float(manifest.step)
        fresh = {"model": parameters(w=torch.zeros(600, 600)), "late": parameters(w=torch.zeros(300, 300))}
        load(store.checkpoint(manifest), fresh)
        assert torch.equal(fresh["model"].w, torch.full((600, 600), epoch))
        assert torch.equal(fresh["late"].w, torch.full((300, 300), epoch))


@pytest.mark.parametrize("bringer", [0, 1])
def test_one_rank_may_bring_the_state(store, bringer):
    def train(session, rank):
        for epoch in range(2):
            session.report({}, state=make_state(epoch, 0) if rank == bringer else None)

    assert Attempt(store, 2).run(train) == [None, None]
    check_equal(load(newest(store), make_state(9), bringer, 2), make_state(1))


def test_a_folder_may_be_reported_beside_a_state(store, tmp_path):
    def train(session, rank):
        for epoch in range(2):
            session.report({}, folder(tmp_path / str(rank), **{f"note-{rank}": str(epoch)}), state=make_state(epoch, rank))

    assert Attempt(store, 2).run(train) == [None, None]
    assert read_files(newest(store))["note-1"] == b"1"
    check_equal(load(newest(store), make_state(9, 1), 1, 2), make_state(1, 1))


def test_a_folder_with_a_file_that_is_named_as_ours_is_refused(store, tmp_path):
    checkpoint = folder(tmp_path / "c", **{".metadata": "x"})
    with pytest.raises(ValueError, match=r"holds '\.metadata', as which the state is stored"):
        Attempt(store).session().report({}, checkpoint, state={"a": 1})


def test_a_downloaded_state_loads_from_its_folder(store, tmp_path):
    report_states(store, make_state)
    local = Checkpoint.from_directory(newest(store).to_directory(tmp_path / "copy"))
    check_equal(load(local, make_state(9)), make_state(2))


def test_a_checkpoint_without_a_state_says_so(store, tmp_path):
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"))
    with pytest.raises(CheckpointNotFoundError, match="holds no state"):
        newest(store).load_state({"a": 1})


class Unreadable:
    pass


def bad_states():
    return {
        "an object": ({"extra": {"it": Unreadable()}}, "'extra.it' in the state is a Unreadable"),
        "a function": ({"f": lambda: None}, "'f' in the state is a function"),
        "a sparse tensor": ({"t": torch.eye(300).to_sparse()}, "the tensor 't' is torch.sparse_coo"),
        "a tensor without data": ({"t": torch.empty(3, device="meta")}, "the tensor 't' is without data"),
        "two of one name": ({"a": {"b": 1}, "a.b": 2}, "two things in the state are named 'a.b'"),
        "a key that is no name": ({"a": {("x", 1): torch.ones(1)}}, "the key .* under 'a' must be a string or an int"),
        "a rank's name": ({"a@rank3": 1}, "ends like one of a rank's own"),
        "no dict": ([1], "state must be a dict"),
    }


@pytest.mark.parametrize("what", bad_states())
def test_a_state_that_cannot_be_stored_is_refused_by_name_on_all_ranks_and_the_next_is_stored(store, what):
    bad, message = bad_states()[what]

    def train(session, rank):
        session.report({}, state=make_state(0, rank))
        with pytest.raises(ValueError if rank else CommitFailedError, match=message):
            session.report({}, state=bad if rank else make_state(1, 0))
        session.report({}, state=make_state(2, rank))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about sparse tensors
        assert Attempt(store, 2).run(train) == [None, None]
    assert len(store.list()) == 2
    check_equal(load(newest(store), make_state(9, 1), 1, 2), make_state(2, 1))


def test_ranks_whose_tensors_cannot_be_one_all_raise_and_the_next_report_pairs(store):
    def train(session, rank):
        with pytest.raises(
            ReportMismatchError, match=r"rank 1 has 'm.w' as float32 \[400, 100\] but rank 0 as float32 \[300, 100\]"
        ):
            session.report({}, state={"m": parameters(w=torch.ones(300 + 100 * rank, 100))})
        session.report({}, state={"w": torch.ones(300, 100)})
        session.report({}, state={"w": RankLocal(torch.ones(300 + rank, 100))})

    assert Attempt(store, 2).run(train) == [None, None]
    state = load(newest(store), {"w": RankLocal(torch.zeros(301, 100))}, 1, 2)
    assert torch.equal(state["w"].value, torch.ones(301, 100))


def test_a_refused_report_does_not_harm_the_state_of_the_next(store):
    def train(session, rank):
        session.report({}, state=make_state(0, rank))
        with pytest.raises(ReportMismatchError, match="reported step 7"):
            session.report({}, state=make_state(1, rank), step=7 if rank else 8)
        session.report({}, state=make_state(2, rank))

    assert Attempt(store, 2).run(train) == [None, None]
    check_equal(load(newest(store), make_state(9, 1), 1, 2), make_state(2, 1))


def test_a_share_that_cannot_be_staged_fails_the_commit_on_all_ranks(store, monkeypatch):
    stage = StagingBuffer.stage

    def fail(self, tensors):
        raise MemoryError("no pages left")

    def train(session, rank):
        session.report({}, state=make_state(0, rank))
        session.wait_for_commits()
        with pytest.raises(CommitFailedError, match="no pages left"):
            session.report({}, state=make_state(1, rank), upload="sync")
        monkeypatch.setattr(StagingBuffer, "stage", stage)
        session.report({}, state=make_state(1, rank))

    counted = []

    def fail_later(self, tensors):
        counted.append(1)
        (stage if len(counted) <= 2 else fail)(self, tensors)

    monkeypatch.setattr(StagingBuffer, "stage", fail_later)
    assert Attempt(store, 2).run(train) == [None, None]
    check_equal(load(newest(store), make_state(9, 1), 1, 2), make_state(1, 1))


def other_targets():
    return {
        "a name too many": ({"more": 1}, "'more' is not in the checkpoint"),
        "a key too many": ({"extra": {"more": 1}}, "'extra.more' is not in the checkpoint"),
        "another shape": (
            {"large": torch.zeros(10)},
            r"'large' is float64 \[1000, 100\] in the checkpoint, not float32 \[10\]",
        ),
        "another dtype": ({"small": torch.zeros(5)}, r"'small' is int64 \[5\] in the checkpoint, not float32 \[5\]"),
        "a value as a tensor": ({"extra": {"epoch": torch.zeros(())}}, "'extra.epoch' is a plain value in the checkpoint"),
        "a larger module": (
            {"model": torch.nn.Sequential(*make_training(0)[0], torch.nn.Linear(10, 1))},
            "'model.3.weight' is not",
        ),
        "a smaller module": ({"model": make_training(0)[0][:2]}, "'model.2.weight' is in the checkpoint and not in the module"),
        "another optimizer's parameters": (
            {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])},
            "other parameters",
        ),
    }


@pytest.mark.parametrize("what", other_targets())
def test_a_state_that_does_not_fit_is_told_by_name_before_anything_changes(store, what):
    report_states(store, make_state)
    more, message = other_targets()[what]
    target = {**common_part(5), **more}
    with pytest.raises(StateMismatchError, match=message):
        load(newest(store), target)
    check_equal({**target, **more}, {**common_part(5), **more})


def damage(path, how, other):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    elif how == "swap":
        data = bytearray(other.read_bytes())
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "swap", "remove"])
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "__0_1.distcp", ".state.json"])
def test_damage_is_found_by_a_load(store, file, how):
    report_states(store, lambda epoch, rank: {"w": torch.full((1000, 500), float(epoch)), "text": f"{epoch}" * 1000}, 2)
    one, other = [store.storage.local_path(store.layout.data(manifest.id, file)) for manifest in store.list()[:2]]
    if how == "remove":
        one.unlink()
    else:
        damage(one, how, other)
    with pytest.raises(CheckpointCorruptError):
        load(store.checkpoint(store.list()[0]), {"w": torch.zeros(1000, 500), "text": ""})


def test_a_checkpoint_that_is_pruned_during_a_load_is_not_damaged():
    store = CheckpointStore.open(MemoryStorage(), "run")
    report_states(store, lambda epoch, rank: {"w": torch.full((1000, 500), float(epoch))}, 1)
    checkpoint = store.checkpoint(store.list()[0])
    files = [store.layout.data(checkpoint.id, entry.path) for entry in checkpoint.manifest.files]
    store.storage.delete([store.layout.manifest(checkpoint.id), *files])
    with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint {checkpoint.id}: it was pruned"):
        load(checkpoint, {"w": torch.zeros(1000, 500)})


def test_a_state_that_is_nested_too_deeply_to_be_loaded_is_refused(store):
    def nested(leaf, levels=420):
        for _ in range(levels):
            leaf = {"a": leaf}
        return {"x": leaf}

    report_states(store, lambda epoch, rank: nested(torch.ones(3)))
    with pytest.raises(StateMismatchError, match="nested too deeply to be loaded"):
        load(store.checkpoint(store.latest()), nested(torch.zeros(3)))


def test_an_index_of_another_size_is_not_read(store):
    report_states(store, lambda epoch, rank: {"text": f"{epoch}"})
    newest = store.latest()
    index = store.storage.local_path(store.layout.data(newest.id, ".state.json"))
    os.truncate(index, MOST_RECORD_BYTES + 1)
    with pytest.raises(CheckpointCorruptError, match=r"\.state\.json has 1073741825 bytes instead of \d+"):
        load(store.checkpoint(newest), {"text": ""})
    with pytest.raises(CheckpointCorruptError, match=r"\.state\.json has 1073741825 bytes, and a record 1073741824 at most"):
        Checkpoint.from_directory(index.parent).load_state({"text": ""})


def test_torch_reads_what_we_store(store, tmp_path):
    report_states(store, lambda epoch, rank: make_state(epoch, rank, steps=2), 2)
    data = store.storage.local_path(store.layout.data(store.latest().id))
    model, optimizer, _ = make_training(9, 2)
    mine = make_training(2, 2)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "extra": {"epoch": -1},
        "small": torch.zeros(5, dtype=torch.int64),
        "large": torch.zeros(1000, 100, dtype=torch.float64),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_load(state, checkpoint_id=data)
        dcp_to_torch_save(data, tmp_path / "model.pt")
    check_equal(state["model"], dict(get_model_state_dict(mine[0])))
    check_equal(state["optimizer"], get_optimizer_state_dict(*mine[:2]))
    assert state["extra"]["epoch"] == 2
    check_equal(state["large"], make_state(2)["large"])
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    check_equal(saved["model"], dict(mine[0].state_dict()))
    assert saved["extra"]["position"] == {"sample@rank0": 200, "sample@rank1": 201}
    assert torch.equal(saved["rng@rank1"], torch.arange(5000) + 3)


def test_values_keep_their_types(store):
    value = {
        "counter": collections.Counter({30: 1}),
        "ordered": collections.OrderedDict(a=1),
        "numbers": {1: "one", 2: [1, (2, 3.5)]},
        "by number": {7: torch.ones(2), 8: {"x": torch.zeros(3)}},
        "mixed": [1, torch.ones(2), {"a": torch.zeros(2), "b": None}],
        "set": {1, 2},
        "bytes": b"\0\1",
        "empty": {},
        "dtype": torch.float32,
        "scalar": torch.tensor(3),
        "none of it": torch.zeros(0, 3),
        "half": torch.randn(300, 200).bfloat16(),
        "complex": torch.randn(300, 200, dtype=torch.complex64),
        "bool": torch.rand(300, 300) < 0.5,
        "strided": torch.randn(400, 200).t(),
        "strided too": torch.randn(20, 30, 40)[:, ::2, ::3].double(),
        "large and none": torch.zeros(0, 100_000),
    }
    Attempt(store).run(lambda session, _: session.report({}, state={"it": value}))
    loaded = load(newest(store), {"it": {}})["it"]
    check_equal(loaded, value)
    again = {"it": plain_zeros(value)}
    check_equal(load(newest(store), again)["it"], value)


def plain_zeros(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: plain_zeros(item) for key, item in value.items()}
    return [plain_zeros(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)]
)
def test_other_optimizers_come_back(store, make):
    model, optimizer, _ = make_training(1, 3, make)
    Attempt(store).run(lambda session, _: session.report({}, state={"m": model, "o": optimizer}))
    fresh, other, _ = make_training(2, 0, make)
    load(newest(store), {"m": fresh, "o": other})
    check_equal(other, optimizer)


def test_a_state_in_another_precision_than_its_parameter_keeps_it(store):
    parameter = torch.nn.Parameter(torch.ones(300, 300, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.randn(300, 300),
        "exp_avg_sq": torch.rand(300, 300),
    }
    Attempt(store).run(lambda session, _: session.report({}, state={"o": optimizer}))
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(300, 300, dtype=torch.bfloat16))])
    load(newest(store), {"o": other})
    check_equal(other, optimizer)


def test_a_rank_whose_report_began_first_counts_by_its_own_clock(store):
    """Rank 0 came a minute later, and its clock says nothing of when rank 1 began."""
    claim = claim_key(store, claim_attempt(store, Owner.current(), world_size=2))
    job = CommitJob(StagedReport(Report(time.monotonic(), 0, {}), Agreement(0, checkpoint_id=new_id(1, 0))), claim)
    manifest = write_manifest(store, job, [RankPart(stall_s=0.0), RankPart(stall_s=50.0, stored_s=60.0)])
    assert (manifest.timings["stall_s"], manifest.timings["durable_s"] >= 60.0) == (50.0, True)


def test_what_a_report_cost_is_told(store):
    attempt = Attempt(store, 2)
    attempt.run(lambda session, rank: session.report({"loss": 1.0}, state=make_state(0, rank)))
    (manifest,) = store.list()
    assert 0 < manifest.timings["stall_s"] <= manifest.timings["durable_s"]
    commit = next(event for event in attempt.events() if hasattr(event, "stall_s"))
    assert (commit.stall_s, commit.bytes) == (manifest.timings["stall_s"], manifest.total_bytes)
    assert manifest.metrics == {"loss": 1.0}


def test_an_index_says_what_ranks_have_on_their_own(store):
    report_states(store, make_state, 2)
    index = json.loads(store.storage.get_bytes(store.layout.data(store.latest().id, ".state.json")))
    assert {name for name in (*index["tensors"], *index["values"]) if "@" in name} == {
        *("extra.position.sample@rank0", "extra.position.sample@rank1", "rng@rank0", "rng@rank1")
    }


def test_torch_of_another_make_is_stored_by_its_own_save(store, monkeypatch, tmp_path):
    """Should torch.save one day write its data elsewhere, files are made by it, in the background."""
    monkeypatch.setattr(buffer, "_is_readable", lambda dtype: False)
    report_states(store, lambda epoch, rank: {"w": torch.full((500, 300), float(epoch)), "v": torch.arange(70_000)}, 2)
    state = load(newest(store), {"w": torch.zeros(500, 300), "v": torch.zeros(70_000, dtype=torch.int64)})
    check_equal(state, {"w": torch.full((500, 300), 2.0), "v": torch.arange(70_000)})
    data = store.storage.local_path(store.layout.data(store.latest().id))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_to_torch_save(data, tmp_path / "x.pt")
    check_equal(torch.load(tmp_path / "x.pt"), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPE_BYTES])
def test_every_dtype_comes_back(store, dtype):
    value = torch.arange(40_000 * dtype.itemsize).remainder(2).to(torch.uint8).view(dtype)
    Attempt(store).run(lambda session, _: session.report({}, state={"large": value, "small": value[:3]}))
    loaded = load(newest(store), {"large": torch.empty_like(value), "small": torch.empty_like(value[:3])})
    check_equal(loaded, {"large": value, "small": value[:3]})
    assert dtype.itemsize == DTYPE_BYTES[str(dtype).removeprefix("torch.")]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_an_upload_in_the_background_yields_to_the_training_and_one_in_front_does_not(store, monkeypatch):
    nice, put_buffers = [], LocalStorage.put_buffers

    def look(self, key, parts):
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return put_buffers(self, key, parts)

    monkeypatch.setattr(LocalStorage, "put_buffers", look)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for upload, expected in (("sync", mine), ("async", mine + 5)):
        Attempt(store).run(
            lambda session, _, upload=upload: session.report({}, state={"a": torch.ones(300, 300)}, upload=upload)
        )
        assert set(nice) == {expected}
        nice.clear()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_rank_0_does_its_part_before_it_waits_for_late_ranks_and_not_when_all_are_there():
    key_value = MemoryKeyValue()
    rank_0, rank_1 = (Peers(key_value, rank, 2) for rank in range(2))
    done = []
    assert rank_1.exchange("early", b"1") is None
    assert rank_0.exchange("early", b"0", lambda: done.append("early")) == [b"0", b"1"]
    assert rank_0.exchange("late", b"0", lambda: done.append("late") or rank_1.exchange("late", b"1")) == [b"0", b"1"]
    assert done == ["late"]


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo.eval_frame"])
def test_a_report_while_a_thread_imports_what_it_looks_for_does_not_mind(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    layer = torch.nn.Linear(2, 2)
    assert not is_dtensor(layer.weight)
    assert unwrap(layer) is layer
    _reshard(layer)
