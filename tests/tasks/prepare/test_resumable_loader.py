"""Loaders that continue in the middle of an epoch, as one of several ranks; real ranks are in tests/flows."""

import random
import sys

import numpy as np
import pytest
import torch
from forked_programs import run_program
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointStore, RankLocalStateError, StateMismatchError
from prefect_torch.tasks import prepare_data_loader
from prefect_torch.tasks.prepare import data_loader, own_position_loader, prepared_loader
from ranks import Attempt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

# torchdata 0.11 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def loader_of(rank=0, num_ranks=1, length=24, batch_size=2, kind=DataLoader, **arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_loader, "get_rank_and_size", lambda: (rank, num_ranks))
        arguments = {"shuffle": True, "batch_size": batch_size, **arguments}
        return prepare_data_loader(kind(range(length), **arguments), resumable=True)


def take(loader, num_batches):
    """Return the samples of the first batches, and leave the loop there."""
    iterator = iter(loader)
    return [sample for _ in range(num_batches) for sample in next(iterator).tolist()]


def rest_of(loader):
    return [sample for batch in loader for sample in batch.tolist()]


class Stream(IterableDataset):
    """This rank's part of a stream, which knows how far it is."""

    def __init__(self, first=0, step=1, length=8):
        self.first, self.step, self.length, self.at = first, step, length, 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield self.first + self.step * (self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Shuffled(Stream):
    """A stream in another order for each epoch that it is set to, as one of Hugging Face after `shuffle(seed)`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (order[number] for number in super().__iter__())


class Unpositioned(IterableDataset):
    """A stream that does not know how far it is, but how long."""

    def __init__(self, length=8):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


def stateful(dataset, **arguments):
    """Return torchdata's loader, imported only here: what is tested else must not find it loaded."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - as said

    return StatefulDataLoader(dataset, **arguments)


def own_of(dataset):
    """Return a loader that keeps its own position."""
    return prepare_data_loader(stateful(dataset, batch_size=2), add_distributed_sampler=False, resumable=True)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4))
def test_attempts_with_any_ranks_and_batch_sizes_use_each_sample_once(attempts):
    used, state = [], None
    for num_ranks, batch_size, num_batches in attempts:
        loaders = [loader_of(rank, num_ranks, length=240, batch_size=batch_size) for rank in range(num_ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            used += take(loader, num_batches)
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    last = loader_of(length=240)
    last.load_state_dict(state)
    assert sorted(used + rest_of(last)) == list(range(240))
    assert sorted(rest_of(last)) == list(range(240))


def test_what_was_not_handed_to_the_loop_was_not_used():
    loader = loader_of()
    iterator = iter(loader)
    assert loader.state_dict()["used"] == 0
    next(iterator)
    assert loader.state_dict()["used"] == 2
    assert len(loader) == 12


def test_a_resumed_epoch_is_the_rest_of_the_undisturbed_one_and_the_next_follow():
    undisturbed = loader_of(1, 2)
    epochs = [rest_of(undisturbed) for _ in range(3)]
    loader = loader_of(1, 2)
    rest_of(loader)
    begun = take(loader, 2)
    resumed = loader_of(1, 2)
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, len(resumed)) == (1, 6)
    assert begun + rest_of(resumed) == epochs[1]
    assert resumed.epoch == 2
    assert rest_of(resumed) == epochs[2]


def test_after_the_loop_comes_the_next_epoch_and_after_its_last_batch_an_empty_rest():
    loader = loader_of()
    states = [loader.state_dict() for _ in loader]
    resumed = loader_of()
    resumed.load_state_dict(states[-1])
    assert (resumed.epoch, rest_of(resumed), resumed.epoch) == (0, [], 1)
    between = loader_of()
    between.load_state_dict(loader.state_dict())
    assert between.epoch == 1
    assert rest_of(between) == rest_of(resumed)


@pytest.mark.parametrize("taken", ["at the last batch", "after the loop"])
@pytest.mark.parametrize(
    "pair",
    [lambda: [loader_of(), loader_of(length=23, batch_size=2)], lambda: [own_of(Unpositioned(24)), own_of(Unpositioned(23))]],
    ids=["shared", "own position"],
)
def test_loaders_that_are_zipped_end_their_epochs_together_and_resume_so(taken, pair):
    """Only the first of equally long ones is told by zip() that it has ended."""
    zipped = pair()
    for number, _ in enumerate(zip(*zipped, strict=False)):
        states = [loader.state_dict() for loader in zipped]
        if number == 4:
            break
    zipped = pair()
    for loader, state in zip(zipped, states, strict=True):
        loader.load_state_dict(state)
    for _ in zip(*zipped, strict=False):
        states = [loader.state_dict() for loader in zipped]
    if taken == "after the loop":
        states = [loader.state_dict() for loader in zipped]
        assert [loader.epoch for loader in zipped] == [1, 1]
    resumed = pair()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    if taken == "at the last batch":
        assert list(zip(*resumed, strict=False)) == []
    for epoch in (1, 2):
        assert [loader.epoch for loader in resumed] == [epoch, epoch]
        assert len(list(zip(*resumed, strict=False))) == 12


@pytest.mark.parametrize("kind", [loader_of, lambda: own_of(Unpositioned(24))], ids=["shared", "own position"])
def test_a_zip_that_a_variable_holds_leaves_the_end_of_the_epoch_to_the_training(kind):
    """As `bar = tqdm(zip(...))` does: until it is destroyed, it tells the second loader nothing."""
    loader, other = kind(), kind()
    zipped = zip(loader, other, strict=False)
    assert len(list(zipped)) == 12
    assert (loader.epoch, other.epoch) == (1, 0)
    other.set_epoch(1)
    states = [loader.state_dict(), other.state_dict()]
    del zipped
    resumed = [kind(), kind()]
    for each, before, state in zip(resumed, (loader, other), states, strict=True):
        assert (before.state_dict(), before.epoch) == (state, 1)
        each.load_state_dict(state)
    assert [len(list(zip(*resumed, strict=False))), *(each.epoch for each in resumed)] == [12, 2, 2]


KINDS = pytest.mark.parametrize(
    "kind",
    [loader_of, lambda: own_of(Unpositioned(24)), lambda: own_of(Stream(length=24)), lambda: own_of(Shuffled(length=24))],
    ids=["shared", "unpositioned", "stream", "shuffled stream"],
)


@KINDS
@pytest.mark.parametrize("reports_again", [False, True])
def test_a_loop_that_leaves_every_epoch_early_says_that_the_next_one_comes(kind, reports_again):
    def epochs_of(loader):
        for epoch in range(loader.epoch, 3):
            yield take(loader, 2)
            loader.set_epoch(epoch + 1)
            states.append(loader.state_dict())

    states = []
    undisturbed = list(epochs_of(kind()))
    resumed = kind()
    resumed.load_state_dict(states[0])
    if reports_again:
        state, resumed = resumed.state_dict(), kind()
        resumed.load_state_dict(state)
    assert list(epochs_of(resumed)) == undisturbed[1:]


@KINDS
def test_a_loop_that_leaves_an_epoch_early_goes_on_with_the_next_one(kind):
    loader = kind()
    for epoch in range(3):
        take(loader, 2)
        assert loader.epoch == epoch


@KINDS
def test_a_look_at_one_batch_begins_no_epoch(kind):
    loader, states, epochs = kind(), [], []
    next(iter(loader))
    for epoch in range(loader.epoch, 3):
        epochs.append(rest_of(loader))
        states.append(loader.state_dict())
        assert loader.epoch == epoch + 1
    assert len(epochs) == 3
    resumed = kind()
    resumed.load_state_dict(states[0])
    next(iter(resumed))
    assert [(epoch, rest_of(resumed)) for epoch in range(resumed.epoch, 3)] == [(1, epochs[1]), (2, epochs[2])]


@KINDS
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_look_at_one_batch_of_a_restored_epoch_takes_nothing_from_its_rest(kind, sets_epoch):
    undisturbed, loader, resumed = kind(), kind(), kind()
    epochs = [rest_of(undisturbed) for _ in range(3)]
    rest_of(loader)
    used = take(loader, 3)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    rests = []
    for epoch in range(resumed.epoch, 3):
        if sets_epoch:
            resumed.set_epoch(epoch)
        rests.append(rest_of(resumed))
        assert resumed.epoch == epoch + 1
    assert [used + rests[0], *rests[1:]] == epochs[1:]


@KINDS
def test_a_program_that_begins_an_iteration_for_each_batch_goes_through_the_epochs(kind):
    loader = kind()
    for _ in range(6):
        next(iter(loader))
    assert loader.epoch == 4, "the first counts as a look"
    loader = kind()
    take(loader, 2)
    for _ in range(3):
        next(iter(loader))
    assert loader.epoch == 2, "and so does the first after a loop"


@KINDS
def test_a_loop_that_is_left_after_its_first_batch_has_used_that_batch(kind):
    loader, resumed = kind(), kind()
    used = take(loader, 1)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(used + rest_of(resumed)) == list(range(24))


@KINDS
def test_a_position_that_is_restored_within_a_loop_is_where_the_next_loop_begins(kind):
    loader = kind()
    states = [loader.state_dict() for _ in loader]
    for number, _ in enumerate(loader, 1):
        if number == len(states):
            loader.load_state_dict(states[3])
    assert (loader.epoch, len(rest_of(loader))) == (0, 24 - 8)


def test_a_position_that_was_restored_and_not_used_is_the_state():
    loader = loader_of()
    take(loader, 3)
    state = loader.state_dict()
    resumed = loader_of()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    iter(resumed)
    assert resumed.state_dict() == state
    assert len(rest_of(resumed)) == 24 - 6


def test_a_restored_epoch_that_was_broken_off_is_followed_by_a_whole_one():
    loader = loader_of()
    take(loader, 3)
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert len(take(resumed, 2)) == 4
    assert sorted(rest_of(resumed)) == list(range(24))
    for _ in range(2):
        resumed.load_state_dict(loader_of().state_dict())
        assert (resumed.epoch, rest_of(resumed)) == (0, rest_of(loader_of()))


@pytest.mark.parametrize("kind", [loader_of, lambda: own_of(Unpositioned(24))], ids=["shared", "own position"])
def test_a_set_epoch_begins_at_its_beginning_unless_it_is_the_restored_one(kind):
    loader = kind()
    take(loader, 3)
    state = loader.state_dict()
    loader.set_epoch(0)
    assert len(rest_of(loader)) == 24
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="leave set_epoch out"):
        loader.set_epoch(1)
    loader.set_epoch(0)
    assert len(rest_of(loader)) == 24 - 6
    loader.set_epoch(5)
    assert loader.epoch == 5
    assert sorted(rest_of(loader)) == list(range(24))


class EpochOfItems:
    """Each item is the epoch that the dataset is set to, as an augmentation may depend on it."""

    epoch = None

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.epoch

    def set_epoch(self, epoch):
        assert type(epoch) is int
        self.epoch = epoch


class Growing(EpochOfItems):
    """Has more items in each epoch, as a curriculum."""

    def __len__(self):
        return 4 if self.epoch is None else 8 * (self.epoch + 1)

    def __getitem__(self, number):
        return number


def test_a_dataset_whose_length_depends_on_the_epoch_is_resumed_within_one():
    loader, resumed = (prepare_data_loader(DataLoader(Growing(), batch_size=2), resumable=True) for _ in range(2))
    assert rest_of(loader) == list(range(8))
    assert take(loader, 3) == list(range(6))
    resumed.load_state_dict(loader.state_dict())
    assert [rest_of(resumed), rest_of(resumed)] == [list(range(6, 16)), list(range(24))]


@pytest.mark.parametrize("keeps_position", [False, True], ids=["torch's", "torchdata's"])
def test_a_dataset_of_items_is_set_to_each_epoch(keeps_position):
    def prepared():
        kind = stateful if keeps_position else DataLoader
        return prepare_data_loader(kind(EpochOfItems(), batch_size=2), resumable=True)

    loader, resumed = prepared(), prepared()
    assert [rest_of(loader) for _ in range(2)] == [[0] * 4, [1] * 4]
    assert take(loader, 1) == [2] * 2
    resumed.load_state_dict(loader.state_dict())
    assert [rest_of(resumed), rest_of(resumed)] == [[2] * 2, [3] * 4]


@pytest.mark.parametrize("length", [20, 6])
def test_a_dataset_of_another_length_has_its_present_samples_from_the_next_epoch_on(length):
    items = list(range(12))
    loader = prepare_data_loader(DataLoader(items, batch_size=2, shuffle=True), resumable=True)
    rest_of(loader)
    items[:] = range(length)
    batches = iter(loader)
    assert len(loader) == length // 2
    used = next(batches).tolist()
    resumed = prepare_data_loader(DataLoader(items, batch_size=2, shuffle=True), resumable=True)
    resumed.load_state_dict(loader.state_dict())
    rest = [sample for batch in batches for sample in batch.tolist()]
    assert sorted(used + rest) == list(range(length))
    assert (resumed.epoch, rest_of(resumed)) == (1, rest)
    assert rest_of(resumed) == rest_of(loader)


def test_the_newest_iteration_is_what_counts():
    loader = loader_of()
    first, second = iter(loader), iter(loader)
    next(second)
    next(first)
    next(first)
    assert (loader.epoch, loader.state_dict()["used"]) == (1, 2)


def test_with_drop_last_an_epoch_has_whole_batches_and_no_sample_twice():
    shares = [loader_of(rank, 2, length=23, batch_size=3, drop_last=True) for rank in range(2)]
    samples = [sample for loader in shares for sample in rest_of(loader)]
    assert len(samples) == len(set(samples)) == 18


def test_a_loader_without_batches_counts_single_items():
    loader = loader_of(length=5, batch_size=None, shuffle=False)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(2)] == [0, 1]
    resumed = loader_of(length=5, batch_size=None, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [2, 3, 4]


WITH_WORKERS = """
from prefect_torch.tasks import prepare_data_loader
from torch.utils.data import DataLoader
def loader():
    workers = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    return prepare_data_loader(DataLoader(range(30), batch_size=2, shuffle=True, **workers), resumable=True)
first = loader()
used = []
for batch in first:
    used += batch.tolist()
    if len(used) == 10:
        break
second = loader()
second.load_state_dict(first.state_dict())
rest = [[sample for batch in second for sample in batch.tolist()] for epoch in range(2)]
assert sorted(used + rest[0]) == sorted(rest[1]) == list(range(30)), (used, rest)
"""


def test_what_workers_have_loaded_ahead_was_not_used():
    """In a process of its own, as a rank is one: a worker is a fork, and this process may hold a whole server's threads."""
    ran = run_program([sys.executable, "-c", WITH_WORKERS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.parametrize("resumable", [False, True])
def test_an_iteration_that_begins_draws_nothing_from_the_process_nor_from_the_loaders_generator(resumable, generator):
    plain = DataLoader(range(4), generator=generator)
    loader = prepare_data_loader(plain, resumable=resumable)
    used = generator or torch.default_generator
    before = used.get_state()
    iter(loader)
    assert torch.equal(used.get_state(), before)
    assert plain.generator is loader._loader.generator is generator


WORKER_SEEDS = """
import torch
from prefect_torch.tasks import prepare_data_loader
from prefect_torch.tasks.prepare import prepared_loader
from torch.utils.data import DataLoader, get_worker_info
class Seeds:
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return get_worker_info().seed
def loader(rank=0):
    prepared_loader.get_rank_and_size = lambda: (rank, 2)
    loader = prepare_data_loader(DataLoader(Seeds(), batch_size=1, shuffle=True, num_workers=1), resumable=True)
    loader._number = 0  # as the first of its process
    return loader
def seeds(loader):
    return [int(seed) for seed in loader]
undisturbed, between, within = loader(), loader(), loader()
first, second = seeds(undisturbed), seeds(undisturbed)
torch.rand(5)
between.load_state_dict({"epoch": 1, "used": 0, "length": 4, "seed": 0, "order": 0})
assert seeds(between) == second != first, "not those of the undisturbed epoch"
iterator = iter(undisturbed)
next(iterator)
within.load_state_dict(undisturbed.state_dict())
torch.rand(5)
rest = seeds(within)
assert len(rest) == 3 and not set(rest) & {*first, *second, *seeds(loader(rank=1))}, "the same once more"
"""


def test_workers_are_seeded_by_the_epoch_the_position_and_the_rank():
    """In a process of its own, as above."""
    ran = run_program([sys.executable, "-c", WORKER_SEEDS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def stream_of(rank, num_ranks):
    return own_of(Stream(rank, num_ranks))


def test_a_stream_continues_at_as_many_ranks_and_is_refused_at_others(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    used, rests = {}, {}

    def begin(session, rank):
        loader = stream_of(rank, 2)
        used[rank] = take(loader, 2)
        session.report({}, state={"loader": loader})

    def go_on(session, rank):
        loader = stream_of(rank, 2)
        attempt.restored.load_state({"loader": loader}, rank=rank, world_size=2)
        rests[rank] = [rest_of(loader), rest_of(loader), loader.epoch]

    attempt = Attempt(store, 2)
    assert attempt.run(begin) == [None, None]
    attempt = Attempt(store, 2)
    assert attempt.run(go_on) == [None, None]
    for rank in range(2):
        whole = list(range(rank, 16, 2))
        assert rests[rank] == [whole[4:], whole, 2]
        assert used[rank] == whole[:4]
    with pytest.raises(RankLocalStateError, match="loader"):
        attempt.restored.load_state({"loader": stream_of(0, 1)}, rank=0, world_size=1)


@pytest.mark.parametrize("num_looks", [1, 2])
def test_a_report_warns_once_of_ranks_in_different_epochs(tmp_path, caplog, num_looks):
    def train(session, rank):
        loader = loader_of(rank, 2)
        for _ in range(num_looks if rank == 0 else 0):
            next(iter(loader))
        for _ in range(2):
            rest_of(loader)
            session.report({}, state={"data": {"loader": loader}})

    assert Attempt(CheckpointStore.open(tmp_path / "store", "run"), 2).run(train) == [None, None]
    warning = "the state's 'data.loader' is in epoch 2 on rank 0, and in epoch 1 on rank 1"
    assert caplog.text.count(warning) == num_looks - 1


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_positions_of_streams_are_refused_at_another_number_of_ranks_however_they_are_shared_out(
    tmp_path, monkeypatch, num_ranks
):
    def on_ranks(number):
        monkeypatch.setattr(own_position_loader, "get_rank_and_size", lambda: (0, number))

    def begin(session, rank):
        loaders = {"within": own_of(Unpositioned()), "between": own_of(Unpositioned()), "stream": stream_of(rank, 2)}
        take(loaders["within"], 2)
        rest_of(loaders["between"])
        rest_of(loaders["stream"])
        session.report({}, state=loaders)

    def load(name, loader):
        shared = {"rank": 0, "world_size": num_ranks, "rank_local": lambda name, values, rank, _: values[rank % len(values)]}
        attempt.restored.load_state({name: loader}, **shared)
        return loader

    store = CheckpointStore.open(tmp_path / "store", "run")
    on_ranks(2)
    assert Attempt(store, 2).run(begin) == [None, None]
    attempt = Attempt(store, num_ranks)
    on_ranks(num_ranks)
    for name, loader in ("within", own_of(Unpositioned())), ("stream", stream_of(0, num_ranks)):
        with pytest.raises(RankLocalStateError, match=f"for each of 2 ranks, and now there are {num_ranks}"):
            load(name, loader)
    between = load("between", own_of(Unpositioned()))
    assert (between.epoch, rest_of(between), between.epoch) == (1, list(range(8)), 2)


@pytest.mark.parametrize("num_used", [0, 2, 4])
def test_a_stream_whose_order_depends_on_the_epoch_is_resumed_in_the_order_of_that_epoch(num_used):
    undisturbed, loader, resumed = own_of(Shuffled()), own_of(Shuffled()), own_of(Shuffled())
    epochs = [rest_of(undisturbed) for _ in range(4)]
    assert len(set(map(tuple, epochs))) == 4
    rest_of(loader)
    rest_of(loader)
    used = take(loader, num_used) if num_used else []
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 2
    assert [used + rest_of(resumed), rest_of(resumed)] == epochs[2:]
    resumed.set_epoch(1)
    assert rest_of(resumed) == epochs[1]


class Drawing(IterableDataset):
    """Cannot go to a position, and draws with every item."""

    def __iter__(self):
        return (float(torch.rand(())) + random.random() + np.random.random() for _ in range(8))  # noqa: NPY002 - the process's


@pytest.mark.parametrize("reported_before", [False, True])
def test_a_stream_that_is_read_again_up_to_its_position_leaves_the_generators_as_they_were_restored(reported_before):
    loader, resumed = own_of(Drawing()), own_of(Drawing())
    taken = iter(loader)
    next(taken)
    state = loader.state_dict()
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the process's
    rest = [batch.tolist() for batch in taken]
    np.random.random()  # noqa: NPY002 - the process's
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])  # noqa: NPY002 - the process's
    resumed.load_state_dict(state)
    if reported_before:
        resumed.state_dict()
    assert [batch.tolist() for batch in resumed] == rest


WITHOUT_POSITION = """
import sys
from prefect_torch.tasks import prepare_data_loader
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
class Unpositioned(IterableDataset):
    def __iter__(self):
        return iter(range(16))
def restored():
    loader = StatefulDataLoader(Unpositioned(), batch_size=2, num_workers=int(sys.argv[1]))
    loader = prepare_data_loader(loader, add_distributed_sampler=False, resumable=True)
    if state is not None:
        loader.load_state_dict(state)
    return loader
used, state = [], None
for _ in range(3):
    if sys.argv[2] == "report before the first batch":  # as at an eviction right after the start
        state = restored().state_dict()
    loader = restored()
    batches = iter(loader)
    used += [*next(batches).tolist(), *next(batches).tolist()]
    state = loader.state_dict()
assert used == list(range(12)), used
"""


@pytest.mark.parametrize("killed", ["later", "report before the first batch"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_without_a_position_continues_where_it_was_after_each_restart(num_workers, killed):
    """In a process of its own, as above."""
    ran = run_program([sys.executable, "-c", WITHOUT_POSITION, str(num_workers), killed], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


OTHER_WORKERS = """
from prefect_torch.ckpt import StateMismatchError
from prefect_torch.tasks import prepare_data_loader
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
class Items(IterableDataset):
    def __iter__(self):
        return iter(range(8))
def loader(num_workers):
    loader = StatefulDataLoader(Items(), batch_size=2, num_workers=num_workers)
    return prepare_data_loader(loader, add_distributed_sampler=False, resumable=True)
for before, now in (0, 1), (1, 0), (1, 2):
    first = loader(before)
    next(iter(first))
    within = first.state_dict()
    list(first)
    second = loader(now)
    try:
        second.load_state_dict(within)
        raise AssertionError("loaded")
    except StateMismatchError as exc:
        assert f"num_workers={before}, and the loader has num_workers={now}" in str(exc), exc
    second.load_state_dict(first.state_dict())
    assert (second.epoch, len(list(second)), second.epoch) == (1, 4 * max(now, 1), 2)
"""


def test_a_stream_goes_on_with_other_workers_only_between_epochs():
    """In a process of its own, as above."""
    ran = run_program([sys.executable, "-c", OTHER_WORKERS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


class Passes(Sampler):
    """Goes on through the items from pass to pass, and knows how far it is."""

    done = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.done += 4
        return iter(range(self.done - 4, self.done))

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def test_a_sampler_that_has_a_state_goes_on_with_as_many_workers_only():
    def prepared(num_workers):
        loader = stateful(range(24), batch_size=2, sampler=Passes(), num_workers=num_workers)
        return prepare_data_loader(loader, add_distributed_sampler=False, resumable=True)

    first, other = prepared(0), prepared(1)
    assert rest_of(first) == [0, 1, 2, 3]
    with pytest.raises(StateMismatchError, match="num_workers=0, and the loader has num_workers=1"):
        other.load_state_dict(first.state_dict())


def test_a_loader_with_a_sampler_of_its_own_continues_in_the_order_of_that_epoch():
    def prepared():
        sampler = DistributedSampler(range(24), 2, 1, shuffle=True)
        loader = stateful(range(24), batch_size=2, sampler=sampler)
        return prepare_data_loader(loader, add_distributed_sampler=False, resumable=True)

    undisturbed, loader, resumed = prepared(), prepared(), prepared()
    epochs = [rest_of(undisturbed) for _ in range(3)]
    rest_of(loader)
    used = take(loader, 2)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert [used + rest_of(resumed), rest_of(resumed)] == epochs[1:]


def test_a_loader_that_is_asked_for_its_position_is_not_looked_ahead_of(monkeypatch):
    asked = []

    def on_device(batches, device, *, may_look_ahead):
        asked.append(may_look_ahead)
        return batches

    monkeypatch.setattr(prepared_loader, "on_device", on_device)
    iter(stream_of(0, 1))
    iter(loader_of())  # the next batch, loaded in this process, would draw random numbers that belong behind the state
    iter(prepare_data_loader(DataLoader(range(4))))
    assert asked == [False, False, True]


@pytest.mark.parametrize("keeps_position", [False, True], ids=["torch's", "torchdata's"])
def test_a_loader_whose_used_batches_are_counted_is_looked_ahead_of_if_it_has_workers(keeps_position):
    kind = stateful if keeps_position else DataLoader
    assert loader_of(kind=kind, num_workers=1)._may_look_ahead()
    assert not loader_of(kind=kind)._may_look_ahead()


def test_torchdatas_loader_of_items_is_shared_and_resumed_like_torchs():
    loader = loader_of(0, 2, kind=stateful)
    used = take(loader, 2) + take(loader_of(1, 2, kind=stateful), 2)
    resumed = loader_of(kind=stateful)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(used + rest_of(resumed)) == list(range(24))


@pytest.mark.parametrize(
    ("loader", "add", "message"),
    [
        (DataLoader(Stream()), True, "an IterableDataset \\(Stream\\) has no items"),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0)), True, "a DistributedSampler would be lost"),
        (DataLoader(range(4), sampler=RandomSampler(range(4), replacement=True)), True, "with replacement"),
        (DataLoader(range(4)), False, "add_distributed_sampler=False"),
    ],
)
def test_what_has_no_position_is_refused(loader, add, message):
    with pytest.raises(ValueError, match=f"resumable=True, but .*{message}.*StatefulDataLoader"):
        prepare_data_loader(loader, add_distributed_sampler=add, resumable=True)


@pytest.mark.parametrize("keeps_position", [False, True], ids=["torch's", "torchdata's"])
def test_batches_in_any_order_have_no_position(keeps_position):
    kind = stateful if keeps_position else DataLoader
    with pytest.raises(ValueError, match="resumable=True, but in_order=False yields batches in any order"):
        prepare_data_loader(kind(range(4), num_workers=2, in_order=False), add_distributed_sampler=False, resumable=True)
    prepare_data_loader(kind(range(4), in_order=False), resumable=True)


def test_a_stream_that_ranks_would_read_twice_is_refused(monkeypatch):
    monkeypatch.setattr(data_loader, "get_rank_and_size", lambda: (0, 2))
    with pytest.raises(ValueError, match="an IterableDataset"):
        prepare_data_loader(stateful(Stream()), resumable=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": WeightedRandomSampler([1.0] * 4, 4)},
        {"batch_sampler": BatchSampler(RandomSampler(range(4)), 2, drop_last=False)},
    ],
)
def test_a_position_in_an_order_that_is_drawn_anew_is_refused(arguments):
    with pytest.raises(ValueError, match=r"resumable=True, but a \w*RandomSampler draws again after a restart.*shuffle=True"):
        prepare_data_loader(stateful(range(4), **arguments), resumable=True)


def test_a_loader_is_made_resumable_when_it_is_prepared_or_never():
    prepared = prepare_data_loader(DataLoader(range(4)))
    assert not hasattr(prepared, "state_dict")
    with pytest.raises(ValueError, match="prepared without resumable=True"):
        prepare_data_loader(prepared, resumable=True)
    resumable = loader_of()
    assert prepare_data_loader(resumable) is prepare_data_loader(resumable, resumable=True) is resumable
