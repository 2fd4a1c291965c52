"""States whose ranks differ in what they hold, and tensors that cannot be stored or loaded into."""

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from prefect_torch.ckpt import CheckpointStore, RankLocal, RankLocalStateError, ReportMismatchError, StateMismatchError
from ranks import Attempt
from safetensors.torch import load_file
from states import check_equal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor


class Loader:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def report(store, make, ranks=2):
    def train(session, rank):
        session.report({}, state=make(rank), upload="sync")

    return Attempt(store, ranks).run(train)


def load(store, state, rank=0, world_size=2, **options):
    store.checkpoint(store.latest()).load_state(state, rank=rank, world_size=world_size, **options)
    return state


@pytest.mark.parametrize("wrap", [lambda loader: loader, RankLocal])
@pytest.mark.parametrize(
    "states",
    [
        [{"offsets": {"shard-a": 5}}, {"offsets": {"shard-b": 7}}],
        [{"w": [{"p": 1}, {"p": 2}]}, {"w": [{"p": 4}]}],
        [{"step": 1, "bucket": "x"}, {"step": 1}],
    ],
)
def test_each_rank_gets_what_it_had_and_nothing_of_another(store, states, wrap):
    assert report(store, lambda rank: {"loader": wrap(Loader(states[rank]))}) == [None, None]
    for rank in range(2):
        loader = Loader({})
        load(store, {"loader": wrap(loader)}, rank)
        assert loader.state == states[rank]
    with pytest.raises(RankLocalStateError):
        load(store, {"loader": wrap(Loader({}))}, world_size=1)


@pytest.mark.parametrize(
    "values",
    [
        [{"w": torch.ones(3)}, None],
        [[], [{"x": 1}]],
        [{"w": 1}, torch.zeros(100_000)],
        [torch.nn.Linear(1, 1), 3],
    ],
)
def test_a_name_that_is_one_thing_here_and_another_there_is_refused_on_every_rank(store, values):
    errors = report(store, lambda rank: {"it": values[rank]})
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert "the state's 'it' is a" in str(errors[0])
    assert store.list() == []
    assert report(store, lambda rank: {"it": RankLocal(values[rank])}) == [None, None]


@pytest.mark.parametrize("optimizer", ["AdamW with a tensor", "LBFGS"])
def test_lists_of_tensors_in_an_optimizer_come_back(store, optimizer):
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(300, 300)
        if optimizer == "LBFGS":
            chosen = torch.optim.LBFGS(model.parameters(), max_iter=2)
        else:
            chosen = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))

        def closure():
            chosen.zero_grad()
            loss = model(torch.ones(2, 300)).square().mean()
            loss.backward()
            return loss

        return {"model": model, "optimizer": chosen}, closure

    state, closure = make(0)
    for _ in range(3):
        state["optimizer"].step(closure)
    assert report(store, lambda _: state, ranks=1) == [None]
    other, other_closure = make(1)
    load(store, other, world_size=1)
    state["optimizer"].step(closure)
    other["optimizer"].step(other_closure)
    assert torch.equal(state["model"].weight, other["model"].weight)


@pytest.mark.parametrize("target", [torch.empty(3, device="meta"), torch.ones(3, dtype=torch.complex64).conj()])
def test_a_target_without_memory_of_its_own_is_refused(store, target):
    report(store, lambda _: {"t": torch.ones(3, dtype=target.dtype)}, ranks=1)
    with pytest.raises(StateMismatchError, match="make it one with memory of its own"):
        load(store, {"t": target}, world_size=1)


def test_a_tensor_that_wraps_others_is_refused(store):
    (error,) = report(store, lambda _: {"t": TwoTensor(torch.ones(3), torch.ones(3))}, ranks=1)
    assert isinstance(error, ValueError)
    assert "the tensor 't' is a TwoTensor" in str(error)


def test_a_parameter_that_becomes_a_buffer_is_rank_0s(store):
    def train(session, rank):
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.full((100_000,), float(rank)))
        session.report({}, state={"m": module}, upload="sync")
        del module.w
        module.register_buffer("w", torch.full((100_000,), float(rank)))
        session.report({}, state={"m": module}, upload="sync")

    assert Attempt(store, 2).run(train) == [None, None]
    assert load(store, {"m": _buffer()})["m"].w.unique().tolist() == [0.0]


def _buffer():
    module = torch.nn.Module()
    module.register_buffer("w", torch.ones(100_000))
    return module


def layers(number):
    """Return a model of so many layers and its optimizer, after a step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(number)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_module_with_other_parts_on_one_rank_is_refused_since_no_rank_could_load_it(store):
    for error in report(store, lambda rank: {"m": layers(1 + rank)["model"]}):
        assert isinstance(error, ReportMismatchError)
        assert "the state's 'm' has other parts on rank 1 than on rank 0 (m.1.bias, m.1.weight)" in str(error)


@pytest.mark.parametrize("kind", ["of another module", "of some parameters each"])
def test_an_optimizer_of_other_parameters_on_another_rank_is_refused_since_their_states_may_have_equal_names(store, kind):
    def make(rank):
        model = layers(2)["model"]
        if kind == "of another module":
            return {f"stage{rank}": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
        return {"model": model, "optimizer": torch.optim.SGD(model[rank].parameters(), momentum=0.9)}

    for error in report(store, make):
        assert isinstance(error, ReportMismatchError)
        assert "the state's 'optimizer' has other parts on rank 1 than on rank 0" in str(error)


def test_parameters_that_one_rank_alone_adds_to_its_optimizer_are_seen_though_no_tensor_is_new(store):
    def train(session, rank):
        model = torch.nn.Linear(2, 2)
        state = {"model": model, "optimizer": torch.optim.SGD([model.weight])}
        session.report({}, state=state)
        if rank == 1:
            state["optimizer"].add_param_group({"params": [model.bias]})
        session.report({}, state=state)

    for error in Attempt(store, 2).run(train):
        assert isinstance(error, ReportMismatchError)
        assert "the state's 'optimizer' has other parts on rank 1" in str(error)


@pytest.mark.parametrize("own", ["marked", "named"])
def test_a_module_of_each_rank_comes_back_with_its_optimizer_and_nothing_of_anothers(store, own):
    def form(state, rank):
        return {name: RankLocal(it) for name, it in state.items()} if own == "marked" else {f"stage{rank}": state}

    states = [layers(1), layers(2)]
    assert report(store, lambda rank: form(states[rank], rank)) == [None, None]
    for rank, state in enumerate(states):
        fresh = layers(1 + rank)
        load(store, form(fresh, rank), rank)
        check_equal(fresh, state)


class Counting(torch.nn.Linear):
    """A module with a state beside its tensors."""

    def __init__(self, counts):
        super().__init__(2, 2)
        self.counts = counts

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = dict(state)


def test_what_a_module_has_beside_its_tensors_comes_back(store):
    module = Counting({"seen": 7, "histogram": torch.arange(3.0), "by": {"a": [1, 2]}})
    assert report(store, lambda _: {"m": module}) == [None, None]
    other = Counting({"seen": 0, "histogram": torch.zeros(3), "by": {"a": [0, 0]}})
    load(store, {"m": other})
    assert (other.counts["seen"], other.counts["by"]) == (7, {"a": [1, 2]})
    assert torch.equal(other.counts["histogram"], torch.arange(3.0))
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize(
    ("fresh", "reported"),
    [
        (torch.empty(0, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)),
        ([torch.zeros(2)], [torch.ones(2), torch.ones(3)]),
        ({"a": torch.zeros(2), "b": 1}, {"c": torch.ones(40_000)}),
        (None, {"c": torch.ones(3)}),
        (b"", torch.ones(3)),
    ],
)
def test_an_extra_state_may_have_another_form_than_when_the_module_is_fresh(store, fresh, reported):
    class Pickled(torch.nn.Linear):
        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    def make(extra):
        module = Pickled(2, 2)
        module.extra = extra
        return torch.nn.Sequential(module)

    module, other = make(reported), make(fresh)
    assert report(store, lambda _: {"m": module}) == [None, None]
    load(store, {"m": other})
    check_equal(other[0].extra, reported)
    assert torch.equal(other[0].weight, module[0].weight)


@pytest.mark.parametrize("size", [3, 600])
@pytest.mark.parametrize("within", [lambda tensor: tensor, lambda tensor: {"sums": [tensor]}])
def test_an_extra_state_is_each_ranks_own_where_it_differs(store, tmp_path, size, within):
    class Summing(torch.nn.Linear):
        def get_extra_state(self):
            return self.sums

        def set_extra_state(self, state):
            self.sums = state

    def make(sums):
        module = Summing(2, 2)
        module.sums = within(torch.full((size, size), float(sums)))
        return torch.nn.Sequential(module)

    modules = [make(0), make(1)]
    modules[1].load_state_dict({**modules[0].state_dict(), "0._extra_state": modules[1][0].sums})
    assert report(store, lambda rank: {"m": modules[rank], "equal": modules[0]}) == [None, None]
    for rank in range(2):
        loaded = load(store, {"m": make(7), "equal": make(7)}, rank)
        check_equal(loaded["m"][0].sums, modules[rank][0].sums)
        check_equal(loaded["equal"][0].sums, modules[0][0].sums)
    load(store, {"equal": make(7)}, world_size=1)
    with pytest.raises(RankLocalStateError):
        load(store, {"m": make(7)}, world_size=1)
    written = load_file(store.checkpoint(store.latest()).to_safetensors(tmp_path / "file", key="m"))
    assert written.keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("fresh", [{}, {"counts": {"a": 0}, "seen": [0], "names": {"b"}}])
def test_a_module_that_clears_its_own_containers_gets_others(store, fresh):
    class Vocabulary(torch.nn.Module):
        def __init__(self, counts=(), seen=(), names=()):
            super().__init__()
            self.own = {"counts": dict(counts), "seen": [*seen], "names": {*names}}

        def get_extra_state(self):
            return self.own

        def set_extra_state(self, state):
            for name, container in self.own.items():
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(state[name])

    reported = {"counts": {"a": 1, "t": torch.ones(2)}, "seen": [1, 2], "names": {"a"}}
    assert report(store, lambda _: {"m": Vocabulary(**reported)}) == [None, None]
    check_equal(load(store, {"m": Vocabulary(**fresh)})["m"].own, reported)


class CountingSGD(torch.optim.SGD):
    """An optimizer with a state beside what all have."""

    counter = 0

    def state_dict(self):
        return {**super().state_dict(), "counter": self.counter}

    def load_state_dict(self, state_dict):
        self.counter = state_dict["counter"]
        super().load_state_dict(state_dict)


def test_what_an_optimizer_has_beside_what_all_have_comes_back(store):
    model = torch.nn.Linear(2, 2)
    optimizer = CountingSGD(model.parameters(), lr=0.1)
    optimizer.counter = 7
    assert report(store, lambda _: {"model": model, "optimizer": optimizer}) == [None, None]
    other = CountingSGD(model.parameters(), lr=0.2)
    load(store, {"model": model, "optimizer": other})
    assert (other.counter, other.param_groups[0]["lr"]) == (7, 0.1)


def big(fill, size=50_000):
    return torch.full((size,), float(fill))


@pytest.mark.parametrize("make", [lambda rank: {"t": big(rank)}, lambda rank: {"t": Loader({"inner": [big(rank)]})}])
def test_large_tensors_that_differ_are_each_ranks_own(store, make):
    assert report(store, make) == [None, None]
    for rank in range(2):
        state = load(store, make(5), rank)
        tensor = state["t"] if isinstance(state["t"], torch.Tensor) else state["t"].state["inner"][0]
        assert torch.equal(tensor, big(rank))
    with pytest.raises(RankLocalStateError):
        load(store, make(5), world_size=1)


def test_a_large_tensor_is_one_while_it_is_equal_and_two_from_when_it_differs(store):
    """As of error feedback, which begins with zeros everywhere."""

    def train(session, rank):
        session.report({}, state={"t": big(0)}, upload="sync")
        session.report({}, state={"t": big(rank)}, upload="sync")
        session.report({}, state={"t": big(9)}, upload="sync")

    assert Attempt(store, 2).run(train) == [None, None]
    equal, differing, again = store.list()
    assert equal.total_bytes < big(0).nbytes + 20_000 > again.total_bytes
    assert differing.total_bytes > 2 * big(0).nbytes
    for rank in range(2):
        loaded = {"t": big(5)}
        store.checkpoint(differing).load_state(loaded, rank=rank, world_size=2)
        assert torch.equal(loaded["t"], big(rank))
        store.checkpoint(again).load_state(loaded, rank=rank, world_size=2)
        assert torch.equal(loaded["t"], big(9))


def test_large_tensors_of_other_shapes_or_on_one_rank_only_are_each_ranks_own(store):
    held = [{"t": big(0, 50_000), "more": {"a": big(1), "b": 1}}, {"t": big(1, 60_000), "more": {"b": 1}}]
    assert report(store, lambda rank: held[rank]) == [None, None]
    assert torch.equal(load(store, {"t": big(5, 60_000)}, 1)["t"], held[1]["t"])
    with pytest.raises(StateMismatchError, match=r"'more.a' is not in the checkpoint for this rank"):
        load(store, {"more": {"a": big(5)}}, 1)


@pytest.mark.parametrize("of_rank_0", [torch.zeros(3), np.zeros(3), 7, None])
def test_a_tensor_is_a_ranks_own_though_it_is_large_on_that_rank_only(store, of_rank_0):
    held = [of_rank_0, big(1)]
    assert report(store, lambda rank: {"t": held[rank], "more": {"x": held[1 - rank]}}) == [None, None]
    for rank in range(2):
        check_equal(load(store, {"t": None, "more": None}, rank), {"t": held[rank], "more": {"x": held[1 - rank]}})
    check_equal(load(store, {"t": big(5)}, 1), {"t": big(1)})
    chosen = load(store, {"t": None}, world_size=1, rank_local=lambda name, values, rank, world_size: values)
    check_equal(chosen, {"t": held})


@pytest.mark.parametrize(("world_size", "as_objects", "num_warnings"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_a_large_state_dict_is_told_once_to_be_given_as_its_object(
    tmp_path, caplog, monkeypatch, world_size, as_objects, num_warnings
):
    monkeypatch.setattr("prefect_torch.ckpt.state.save._MUCH_TO_COMPARE", 2**20)
    store = CheckpointStore.open(tmp_path, "run")
    model = torch.nn.Linear(600, 600)

    def train(session, _rank):
        for _ in range(3):
            session.report({}, state={"model": model if as_objects else model.state_dict()})

    assert Attempt(store, world_size).run(train) == [None] * world_size
    warned = [record.getMessage() for record in caplog.records if "tensors of no module" in record.getMessage()]
    assert len(warned) == num_warnings
    assert all("model.weight" in text and 'state={"model": model' in text for text in warned)


class Averages:
    """Averages of tensors, which are matched by their order alone."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return {"decay": 0.9, "averages": self.tensors, 7: "x"}

    def load_state_dict(self, state):
        self.order = [*state]
        for mine, stored in zip(self.tensors.values(), state["averages"].values(), strict=True):
            mine.copy_(stored)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_items_of_a_dict_come_back_in_the_order_that_they_had_on_their_rank(store, num_ranks):
    def make(rank, value):
        large, small = torch.full((40_000,), 1.0 * value), torch.full((40_000,), (2.0 + rank) * value)
        tensors = {
            "z": torch.full((3,), 3.0 * value).repeat(20_000),
            "b": large,
            "a": small,
            "c": torch.full((60_000,), 4.0 * value),
        }
        return {"averages": Averages({key: tensors[key] for key in (sorted(tensors) if rank == 1 else tensors)})}

    assert report(store, lambda rank: make(rank, 1), num_ranks) == [None] * num_ranks
    for rank in range(num_ranks):
        state, other = make(rank, 0), make(rank, 1)
        state["averages"].tensors = {key: torch.zeros_like(value) for key, value in state["averages"].tensors.items()}
        load(store, state, rank, num_ranks)
        check_equal(state, other)
        assert state["averages"].order == ["decay", "averages", 7]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_order_of_a_dict_is_that_of_the_report_for_every_kind_of_item(store, num_ranks):
    def make(rank):
        own = {"first": rank, f"of{rank}": rank, "large": torch.zeros(300, 300), "last": 1}
        return {"z": torch.ones(3), "n": 1, "a": torch.zeros(300, 300), "m": {**own}, "list": [{"b": rank, "a": 1}], "o": 2}

    assert report(store, lambda rank: {"it": make(rank)}, num_ranks) == [None] * num_ranks
    for rank in range(num_ranks):
        state = load(store, {"it": {}}, rank, num_ranks)["it"]
        check_equal(state, make(rank))
        for part, other in ((state, make(rank)), (state["m"], make(rank)["m"]), (state["list"][0], make(rank)["list"][0])):
            assert [*part] == [*other]


OWN = {
    "lists of other lengths": [[torch.ones(2)] * 2, [torch.ones(2)] * 3],
    "lists of dicts": [[{"a": 0}, {"a": 1}, {"a": 2}], [{"a": 3}]],
    "an empty list": [[], [torch.ones(1)]],
    "a list, and an empty one": [[torch.ones(1)], []],
    "an empty dict": [{}, {"a": torch.ones(1)}],
    "nothing": [None, {"a": torch.ones(1)}],
    "a large tensor, and nothing": [[torch.ones(300, 300)], None],
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", OWN)
def test_containers_that_differ_between_ranks_are_loaded_into_the_form_that_each_reported(store, what, inside):
    def make(rank):
        return {"own": RankLocal([OWN[what][rank]] if inside else OWN[what][rank])}

    assert report(store, make) == [None, None]
    for rank in range(2):
        state = copy.deepcopy(make(rank))
        check_equal(load(store, state, rank), make(rank))
        loader = Loader({})
        load(store, {"own": loader}, rank)
        check_equal(loader.state, make(rank)["own"])


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (5, 2), (0, 0)])
def test_a_load_of_a_rank_that_is_none_is_refused(store, rank, world_size):
    assert report(store, lambda _: {"it": 1}) == [None, None]
    with pytest.raises(ValueError, match=f"rank {rank} is none of {world_size} ranks"):
        load(store, {"it": 0}, rank, world_size)


class TestReplicas:
    """Modules and optimizers under one name, which count as equal on all ranks."""

    @staticmethod
    def trained(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(5, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def test_a_model_that_each_rank_trains_by_itself_is_warned_of_once(self, store, caplog):
        states = [self.trained(seed) for seed in (1, 2)]

        def train(session, rank):
            for _ in range(3):
                session.report({}, state=states[rank], upload="sync")

        assert Attempt(store, 2).run(train) == [None, None]
        assert caplog.text.count("rank 1 has other values in the state's 'model' than rank 0") == 1
        assert "prepare_model(model)" in caplog.text

    @pytest.mark.parametrize("part", ["model", "optimizer"])
    def test_one_part_that_differs_is_named(self, store, caplog, part):
        states = [self.trained(1) for _ in range(3)]
        states[2][part] = self.trained(2)[part]
        states[1]["optimizer"] = states[0]["optimizer"]
        report(store, lambda rank: {part: states[rank][part]}, ranks=3)
        assert f"rank 2 has other values in the state's '{part}' than rank 0" in caplog.text

    def test_replicas_that_part_later_are_warned_of_then(self, store, caplog):
        states = [self.trained(1) for _ in range(2)]

        def train(session, rank):
            session.report({}, state=states[rank], upload="sync")
            assert not caplog.records
            torch.nn.init.constant_(states[rank]["model"][2].weight, rank)
            session.report({}, state=states[rank], upload="sync")

        assert Attempt(store, 2).run(train) == [None, None]
        assert "other values in the state's 'model'" in caplog.text

    def test_replicas_whose_buffers_alone_differ_are_not_warned_of(self, store, caplog):
        states = [self.trained(1) for _ in range(2)]
        states[1]["model"][1].running_mean.fill_(7)
        assert report(store, lambda rank: states[rank]) == [None, None]
        assert not caplog.records

    @pytest.mark.parametrize("own", [RankLocal, lambda part: part.state_dict()], ids=["marked", "compared"])
    def test_parts_that_each_rank_stores_for_itself_are_not_warned_of(self, store, caplog, own):
        states = [self.trained(seed) for seed in (1, 2)]
        assert report(store, lambda rank: {"model": own(states[rank]["model"])}) == [None, None]
        assert not caplog.records
        for rank in range(2):
            loaded = self.trained(3)["model"]
            load(store, {"model": RankLocal(loaded)}, rank)
            check_equal(loaded.state_dict(), states[rank]["model"].state_dict())

    def test_new_layers_are_looked_at_too(self, store, caplog):
        def train(session, rank):
            state = self.trained(1)
            session.report({}, state=state, upload="sync")
            torch.manual_seed(rank)
            state["model"].append(torch.nn.Linear(2, 2))
            session.report({}, state=state, upload="sync")

        assert Attempt(store, 2).run(train) == [None, None]
        assert caplog.text.count("rank 1 has other values in the state's 'model' than rank 0") == 1

    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
    def test_any_dtype_is_compared(self, store, caplog, dtype):
        def make(rank):
            model = torch.nn.Module()
            model.w = torch.nn.Parameter(torch.full((3, 5), float(rank)).to(dtype).T, requires_grad=False)
            model.scalar = torch.nn.Parameter(torch.tensor(1.0).to(dtype), requires_grad=False)
            model.nothing = torch.nn.Parameter(torch.empty(0, 3, dtype=dtype), requires_grad=False)
            return {"model": model}

        assert report(store, make) == [None, None]
        assert "rank 1 has other values in the state's 'model' than rank 0" in caplog.text

    @pytest.mark.parametrize("placement", [Shard(0), Replicate()])
    def test_shards_of_one_part_that_differ_are_warned_of_and_those_of_other_parts_are_not(self, store, caplog, placement):
        """As those of two stages of a pipeline, each of two ranks."""
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])  # this process is its first rank, its second
            meshes = [first, second] if placement.is_shard() else [first]
            equal, other = [sharded(mesh, placement, 1) for mesh in meshes], [sharded(mesh, placement, 2) for mesh in meshes]
            assert report(store, lambda rank: (equal * 2)[rank], len(equal) * 2) == [None] * len(equal) * 2
            assert not caplog.records
            assert report(store, lambda rank: (equal + other)[rank], len(equal) * 2) == [None] * len(equal) * 2
        finally:
            dist.destroy_process_group()
        assert f"rank {len(equal)} has other values in the state's 'model' than rank 0" in caplog.text


def sharded(mesh, placement, value):
    """Return a model of one row for each rank of a mesh with one rank's row in this process, or with all rows."""
    rows = torch.full((1 if placement.is_shard() else 2, 3), float(value))
    if placement.is_shard():
        rows += 10 * mesh.get_coordinate()[0]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(DTensor.from_local(rows, mesh, [placement], run_check=False))
    return {"model": model}


def trained(rank, num_groups=1):
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 3)
    parameters = [model.weight, model.bias]
    groups = (
        [{"params": parameters}] if num_groups == 1 else [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    )
    optimizer = torch.optim.Adam(groups, lr=0.1 + rank)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_another_number_of_ranks_gets_the_optimizers_that_rank_local_chooses(store):
    stages = [trained(0), trained(1)]
    assert report(store, lambda rank: {f"stage{rank}": stages[rank]}) == [None, None]
    fresh = {f"stage{rank}": trained(rank + 2) for rank in range(2)}
    load(store, fresh, 0, 1, rank_local=lambda name, values, rank, world_size: values[0])
    for rank, stage in enumerate(stages):
        check_equal(dict(fresh[f"stage{rank}"]["model"].state_dict()), dict(stage["model"].state_dict()))
        check_equal(fresh[f"stage{rank}"]["optimizer"].state_dict(), stage["optimizer"].state_dict())


def test_optimizers_of_ranks_may_have_other_numbers_of_groups(store):
    states = [trained(0), trained(1, num_groups=2)]
    marked = [{name: RankLocal(value) for name, value in state.items()} for state in states]
    assert report(store, lambda rank: marked[rank]) == [None, None]
    for rank, state in enumerate(states):
        fresh = trained(rank + 2, num_groups=rank + 1)
        load(store, {name: RankLocal(value) for name, value in fresh.items()}, rank)
        check_equal(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())


class Lists(torch.optim.SGD):
    """An optimizer that keeps tensors in a list and a tuple."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                of = self.state[parameter]
                of["sums"] = [torch.full((2,), 1.5, dtype=torch.float64), torch.tensor(3)]
                of["pair"] = (torch.tensor([7]), {"low": torch.ones(2, dtype=torch.float64)})


def test_an_optimizers_lists_and_tuples_keep_their_dtypes(store):
    def make():
        model = torch.nn.Linear(2, 3).to(torch.bfloat16)
        optimizer = Lists(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state, fresh = make(), make()
    assert report(store, lambda _: state, ranks=1) == [None]
    load(store, fresh, 0, 1)
    check_equal(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("as_numpy", [False, True])
@pytest.mark.parametrize(
    "forms",
    [
        [lambda it: [it], lambda it: {0: it}],
        [lambda it: {0: it}, lambda it: {"0": it}],
        [lambda it: {"a": {"b.c": it}}, lambda it: {"a.b": {"c": it}}],
    ],
)
def test_what_is_equal_on_two_ranks_in_containers_of_other_forms_comes_back_in_the_form_of_each(store, forms, size, as_numpy):
    def state(rank, value):
        tensor = torch.full((size,), value)
        return {"it": forms[rank]({"array": tensor.numpy() if as_numpy else tensor, "count": int(value)})}

    assert report(store, lambda rank: state(rank, 7.0)) == [None, None]
    for rank in range(2):
        check_equal(load(store, {"it": None}, rank), state(rank, 7.0))
        check_equal(load(store, state(rank, 0.0), rank), state(rank, 7.0))


@pytest.mark.parametrize("size", [3, 100_000])
def test_an_array_on_one_rank_and_a_tensor_on_another_stay_what_they_are(store, size):
    tensor = torch.arange(size)
    assert report(store, lambda rank: {"it": tensor if rank else tensor.numpy()}) == [None, None]
    assert isinstance(load(store, {"it": None}, 0)["it"], np.ndarray)
    assert isinstance(load(store, {"it": None}, 1)["it"], torch.Tensor)


def test_a_module_at_another_path_on_another_rank_is_refused(store):
    errors = report(store, lambda rank: {"it": {0: torch.nn.Linear(3, 3)} if rank else [torch.nn.Linear(3, 3)]})
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert "is at the path ['it', 0, 'weight'] of rank 1's state but at ['it', [0], 'weight'] of rank 0's" in str(errors[0])


def stepping(rank, fill):
    """Return a model and an optimizer that steps one of its parameters on each rank, as the distributed Muon."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    parameter = [*model.parameters()][rank]
    optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, fill)
    return {"model": model, "optimizer": optimizer}


def test_the_state_of_a_parameter_that_one_rank_alone_steps_is_no_other_ranks_after_a_resume(store):
    assert report(store, lambda rank: stepping(rank, 1.0)) == [None, None]
    resumed = [load(store, stepping(rank, 0.0), rank) for rank in range(2)]
    for rank, state in enumerate(resumed):
        ((parameter, of_parameter),) = state["optimizer"].state.items()
        assert parameter is [*state["model"].parameters()][rank]
        assert of_parameter["momentum_buffer"].unique().tolist() == [1]
        of_parameter["momentum_buffer"].fill_(2.0)
    assert report(store, lambda rank: resumed[rank]) == [None, None]
    whole = load(store, stepping(0, 0.0), world_size=1)["optimizer"]
    assert [it["momentum_buffer"].unique().tolist() for it in whole.state.values()] == [[2], [2]]


@pytest.mark.parametrize("options", [{}, {"rank_local": lambda _name, values, *_: values[0]}])
def test_an_optimizer_that_steps_other_parameters_on_each_rank_is_refused_on_another_number_of_ranks(store, options):
    assert report(store, lambda rank: stepping(rank, 1.0)) == [None, None]
    with pytest.raises(RankLocalStateError, match=r"only some of the 2 ranks .* had optimizer\.state\.\w+\.momentum_buffer"):
        load(store, stepping(0, 0.0), world_size=3, **options)


@contextlib.contextmanager
def one_of(world_size, rank):
    """Make this process one rank of a group of which the others do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_row(rank, fill):
    """Return a layer whose weight has one row, of which rank 1 has no part, and its optimizer."""
    layer = torch.nn.Linear(8, 1, bias=False)
    part, mesh = torch.full((1 - rank, 8), fill), DeviceMesh("cpu", [0, 1])
    layer.weight = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(1, 8), stride=(8, 1)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1, momentum=0.9)
    optimizer.state[layer.weight]["momentum_buffer"] = layer.weight.detach().clone()
    return {"layer": layer, "optimizer": optimizer}


def test_a_rank_without_a_part_of_an_optimizers_sharded_tensor_has_it_nevertheless(store):
    states = []
    for rank in range(2):
        with one_of(2, rank):
            states.append(one_row(rank, 1.0))
    assert report(store, lambda rank: states[rank]) == [None, None]
    with one_of(2, rank=1):
        state = one_row(1, 0.0)
        state["optimizer"].state.clear()
        load(store, state, rank=1)
        assert "momentum_buffer" in state["optimizer"].state[state["layer"].weight]


def test_a_sharded_tensor_of_other_ranks_is_no_new_item_of_a_dict(store):
    states = []
    for rank in range(2):
        with one_of(2, rank):
            tensor = DTensor.from_local(torch.ones(4), DeviceMesh("cpu", [rank]), [Shard(0)], run_check=False)
            states.append({"ema": {f"layer{rank}": tensor}})
    assert report(store, lambda rank: states[rank]) == [None, None]
    for rank, state in enumerate(states):
        assert load(store, state, rank)["ema"].keys() == {f"layer{rank}"}
        assert load(store, {"ema": {}}, rank)["ema"].keys() == {f"layer{rank}"}
    assert load(store, {"ema": {"layer0": torch.zeros(4)}}, world_size=3)["ema"].keys() == {"layer0"}
    assert load(store, {"ema": {}}, world_size=1)["ema"].keys() == {"layer0", "layer1"}


class Evaluated(torch.nn.Linear):
    """A module with counts beside its parameters, which its `state_dict()` has as torchmetrics' has its persistent ones."""

    def __init__(self, counts=(0.0, 0.0), batches=()):
        super().__init__(2, 2)
        self.counts = {name: torch.tensor(count) for name, count in zip(("hits", "misses"), counts, strict=True)}
        self.batches = [*batches]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": count.clone() for name, count in self.counts.items()})
        destination[f"{prefix}batches"] = [*self.batches]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.counts = {name: state_dict.pop(f"{prefix}{name}") for name in self.counts}
        self.batches = state_dict.pop(f"{prefix}batches")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_what_a_module_counts_beside_its_parameters_and_buffers_is_each_ranks_own(store):
    models = [
        torch.nn.Sequential(Evaluated((3.0, 1.0), [torch.ones(2), torch.ones(1)])),
        torch.nn.Sequential(Evaluated((5.0, 2.0), [torch.zeros(2), torch.ones(2), torch.ones(7)])),
    ]
    with torch.no_grad():
        for mine, first in zip(models[1].parameters(), models[0].parameters(), strict=True):
            mine.copy_(first)
    assert report(store, lambda rank: {"model": models[rank]}) == [None, None]
    for rank, model in enumerate(models):
        fresh = torch.nn.Sequential(Evaluated(batches=[torch.ones(4)]))
        load(store, {"model": fresh}, rank)
        check_equal(fresh[0].counts, model[0].counts)
        check_equal(fresh[0].batches, model[0].batches)
        assert torch.equal(fresh[0].weight, models[0][0].weight)


@pytest.mark.parametrize("form", [lambda rank, stage: {f"stage{rank}": stage}, lambda _, stage: {"stage": RankLocal(stage)}])
def test_a_sharded_stage_under_a_name_of_each_rank_is_refused_with_the_name_to_give(store, form):
    stages = []
    for rank in range(2):
        with one_of(2, rank):
            stages.append(DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False))
    for error in report(store, lambda rank: form(rank, {"w": stages[rank]})):
        assert isinstance(error, ReportMismatchError)
        assert "hold 2 of its 4 elements" in str(error)
        assert "under one name (f'stage{number}' of a pipeline's stage, not of the rank) and not in RankLocal" in str(error)
    assert report(store, lambda rank: {"stage0": {"w": stages[rank]}}) == [None, None]
