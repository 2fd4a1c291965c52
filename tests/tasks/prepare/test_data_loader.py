"""Loaders of one rank, as if it were one of two; real ranks are in tests/flows/test_prepared_training.py."""

import copy
import inspect
import sys

import pytest
import torch
from forked_programs import run_program
from prefect_torch.tasks import prepare_data_loader
from prefect_torch.tasks.prepare import data_loader, prepared_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

DATA = TensorDataset(torch.arange(10))


def collate(items):
    return [int(item[0]) for item in items]


def begin_worker(number):
    pass


@pytest.fixture
def places(monkeypatch):
    """Yield a function that makes this process rank `rank` of two."""

    def become(rank):
        monkeypatch.setattr(data_loader, "get_rank_and_size", lambda: (rank, 2))

    become(0)
    return become


def items(loader):
    return [int(item) for batch in loader for item in batch]


def test_two_ranks_share_the_data_in_a_new_order_each_epoch(places):
    seen = []
    for rank in range(2):
        places(rank)
        loader = prepare_data_loader(DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=collate))
        assert len(loader) == 3
        seen.append([items(loader) for _ in range(3)])
    for first, second in zip(*seen, strict=True):
        assert sorted(first + second) == list(range(10))
    assert len({tuple(epoch) for epoch in seen[0]}) == 3


def test_without_shuffle_the_order_stays(places):
    loader = prepare_data_loader(DataLoader(DATA, batch_size=2, collate_fn=collate))
    assert items(loader) == items(loader) == [0, 2, 4, 6, 8]


def test_an_epoch_that_was_set_is_the_next_and_counts_on(places):
    def prepared():
        return prepare_data_loader(DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=collate))

    loader = prepared()
    epochs = [items(loader) for _ in range(5)]
    resumed = prepared()
    resumed.set_epoch(3)
    assert [items(resumed), items(resumed)] == epochs[3:]
    by_hand = prepared()
    for epoch in range(5):  # as a loop for a plain DistributedSampler does
        by_hand.sampler.set_epoch(epoch)
        assert items(by_hand) == epochs[epoch]


@pytest.mark.parametrize("is_kept", [False, True], ids=["our sampler", "the user's sampler"])
@pytest.mark.parametrize("resumable", [False, True])
def test_an_epoch_that_is_set_on_the_sampler_is_the_next_however_often_it_was_iterated_before(places, resumable, is_kept):
    if is_kept and resumable:
        pytest.skip("a resumable loader has a sampler of its own")

    def prepared():
        if is_kept:
            sampler = DistributedSampler(DATA, 2, 0, shuffle=True)
            return prepare_data_loader(DataLoader(DATA, batch_size=2, sampler=sampler, collate_fn=collate))
        return prepare_data_loader(DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=collate), resumable=resumable)

    counted = prepared()
    epochs = [items(counted) for _ in range(6)]
    loader = prepared()
    next(iter(loader))  # as a summary of the model does
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        assert [items(loader), items(loader)] == epochs[epoch : epoch + 2]
    shared = copy.deepcopy(loader)
    shared.sampler.set_epoch(2)
    assert items(shared) == epochs[2]
    assert type(shared.state_dict()["epoch"] if resumable else 0) is int


@pytest.mark.parametrize("resumable", [False, True])
def test_ranks_stay_in_one_epoch_when_one_of_them_looks_at_a_batch_before_and_after_each_loop(places, resumable):
    ranks = []
    for rank in range(2):
        places(rank)
        ranks.append(prepare_data_loader(DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=collate), resumable=resumable))
    shares = []
    for _ in range(3):
        first = next(iter(ranks[0]))
        shares.append([items(loader) for loader in ranks])
        assert shares[-1][0][:2] == first
        assert sorted(shares[-1][0] + shares[-1][1]) == list(range(10))
    assert len({tuple(first) for first, _ in shares}) == 3


@pytest.mark.parametrize("batch_size", [1, 5], ids=["five batches", "one batch"])
def test_a_program_that_takes_one_batch_of_each_epoch_gets_those_of_all(places, batch_size):
    def prepared():
        return prepare_data_loader(DataLoader(DATA, batch_size=batch_size, shuffle=True, collate_fn=collate))

    undisturbed, left, zipped = prepared(), prepared(), prepared()
    firsts = [items(undisturbed)[:batch_size] for _ in range(4)]
    numbers = [0, 1, 2, 3] if batch_size == 5 else [0, 0, 1, 2]  # the first of several batches is a look
    assert [next(iter(left)) for _ in range(4)] == [firsts[number] for number in numbers]
    assert [next(zip([1], zipped, strict=False))[1] for _ in range(4)] == [firsts[number] for number in numbers]


class WithoutAnItem:
    def __len__(self):
        return 6

    def __getitem__(self, number):
        if number == 2:
            raise ValueError("damaged")
        return number


def test_an_iteration_goes_on_after_an_item_that_cannot_be_read_as_that_of_a_plain_loader():
    batches = iter(prepare_data_loader(DataLoader(WithoutAnItem(), batch_size=1)))
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="damaged"):
        next(batches)
    assert [batch.item() for batch in batches] == [3, 4, 5]


class Unsized(Sampler):
    """A batch sampler that does not know how many batches it has, as one that fills each by the sizes of its items."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        raise ValueError("undefined")


def test_a_loader_whose_length_is_undefined_may_be_looked_at():
    loader = prepare_data_loader(DataLoader(range(4), batch_sampler=Unsized()))
    assert next(iter(loader)).tolist() == [0, 1]
    assert items(loader) == [0, 1, 2, 3]


ARGUMENTS = {
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": collate,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 7,
    "worker_init_fn": begin_worker,
    "multiprocessing_context": "spawn",
    "generator": torch.Generator().manual_seed(5),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "meta",
    "in_order": True,
}
REPLACED = {"shuffle", "sampler", "batch_sampler"}


@pytest.mark.parametrize("resumable", [False, True])
def test_every_argument_of_the_loader_is_kept(places, monkeypatch, resumable):
    """All there are: torch's own signature says which, so one that it adds is missed here."""
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda seeds, src: None)
    arguments = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", "dataset"} - REPLACED
    assert arguments <= ARGUMENTS.keys()
    given = {name: ARGUMENTS[name] for name in arguments}
    loader = DataLoader(DATA, shuffle=True, **given)
    prepared = prepare_data_loader(loader, resumable=resumable)
    for candidate in (prepared, prepared._loader):
        kept = {name: getattr(candidate, name) for name in arguments}
        kept["multiprocessing_context"] = kept["multiprocessing_context"].get_start_method()
        assert kept == given
        assert isinstance(candidate, DataLoader)
        assert isinstance(candidate.sampler, DistributedSampler)
        assert candidate.sampler.shuffle
        assert candidate.batch_sampler.sampler is candidate.sampler
        assert (candidate.batch_sampler.batch_size, candidate.batch_sampler.drop_last) == (3, True)
    assert isinstance(loader.sampler, RandomSampler)  # the caller's is as it was


WITH_WORKERS = """
import torch
from prefect_torch.tasks import prepare_data_loader
from prefect_torch.tasks.prepare import data_loader
from torch.utils.data import DataLoader, TensorDataset
data_loader.get_rank_and_size = lambda: (0, 2)
data = TensorDataset(torch.arange(10))
loader = prepare_data_loader(DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True))
for epoch in range(2):
    print([int(item) for batch, in loader for item in batch])
"""


def test_workers_load_the_share():
    """In a process of its own, as a rank is one: a worker is a fork, and this process may hold a whole server's threads."""
    ran = run_program([sys.executable, "-c", WITH_WORKERS], capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["[0, 2, 4, 6, 8]"] * 2, ran.stderr


WITH_ACCELERATE = """
from accelerate import Accelerator
from prefect_torch.tasks import prepare_data_loader
from torch.utils.data import DataLoader
accelerator = Accelerator(cpu=True)
for resumable in (False, True):
    loader = prepare_data_loader(DataLoader(range(4)), resumable=resumable)
    assert accelerator.prepare(loader) is loader
assert len(accelerator._dataloaders) == 2
"""


def test_accelerate_leaves_a_prepared_loader_as_it_is():
    """In a process of its own, as an Accelerator sets the state of one. Accelerate would share out the share of each rank."""
    ran = run_program([sys.executable, "-c", WITH_ACCELERATE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_seed_of_the_generator_is_that_of_the_order(places, monkeypatch):
    broadcasts = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda seeds, src: broadcasts.append((seeds[0], src)))
    generator = torch.Generator().manual_seed(5)
    loader = prepare_data_loader(DataLoader(DATA, shuffle=True, generator=generator, collate_fn=collate))
    assert broadcasts == [(5, 0)]
    expected = DistributedSampler(DATA, 2, 0, shuffle=True, seed=5)
    assert items(loader) == list(expected)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("resumable", [True, False])
def test_the_order_is_that_of_the_cpu_whatever_the_default_device_is(places, monkeypatch, resumable, shuffle):
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda seeds, src: None)
    data = range(9)  # not divisible
    sampler = prepare_data_loader(DataLoader(data, shuffle=shuffle), resumable=resumable).sampler
    expected = list(sampler)
    with torch.device("meta"):
        assert list(sampler) == expected
    assert sorted({*expected, *DistributedSampler(data, 2, 1, shuffle=shuffle)}) == list(data)


def test_the_seed_of_the_workers_is_drawn_where_torch_draws_it(monkeypatch):
    """On its default device, whose generator it must be."""
    made, usual = [], torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": made.append(torch.device(device).type) or usual())
    for device in ("cpu", "meta"):
        with torch.device(device), prepared_loader.own_generator(DataLoader(DATA), 0):
            pass
    assert made == ["cpu", "meta"]


def test_a_random_sampler_that_was_made_by_hand_gives_its_seed(places, monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda seeds, src: None)
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(5))
    loader = prepare_data_loader(DataLoader(DATA, sampler=sampler, collate_fn=collate))
    assert items(loader) == list(DistributedSampler(DATA, 2, 0, shuffle=True, seed=5))


def test_a_subclass_keeps_its_class_and_what_it_has(places):
    class Counting(DataLoader):
        def total(self):
            return len(self.dataset)

    prepared = prepare_data_loader(Counting(DATA, batch_size=2, collate_fn=collate))
    assert prepared.total() == 10
    assert items(prepared) == [0, 2, 4, 6, 8]
    with pytest.raises(AttributeError, match="nosuch"):
        _ = prepared.nosuch
    assert copy.copy(prepared).total() == 10


def test_a_loader_without_batches_gives_single_items(places):
    prepared = prepare_data_loader(DataLoader(DATA, batch_size=None))
    assert [int(item) for (item,) in prepared] == [0, 2, 4, 6, 8]


def test_a_distributed_sampler_stays_and_preparing_twice_adds_nothing(places):
    sampler = DistributedSampler(DATA, 2, 1, shuffle=True, seed=9)
    prepared = prepare_data_loader(DataLoader(DATA, sampler=sampler, collate_fn=collate))
    assert prepared.sampler is sampler
    assert items(prepared) != items(prepared)
    assert prepare_data_loader(prepared) is prepared


def test_a_distributed_sampler_below_a_batch_sampler_stays_and_its_epochs_are_counted(places):
    sampler = DistributedSampler(DATA, 2, 1, shuffle=True, seed=9)
    batches = BatchSampler(sampler, 2, drop_last=False)
    prepared = prepare_data_loader(DataLoader(DATA, batch_sampler=batches, collate_fn=collate))
    assert prepared.batch_sampler is batches
    alike = DistributedSampler(DATA, 2, 1, shuffle=True, seed=9)
    for epoch in (0, 1):
        alike.set_epoch(epoch)
        assert items(prepared) == list(alike)


class Told:
    """Has one item, the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch])


class ToldSampler(Told, Sampler):
    pass


class ToldData(Told, IterableDataset):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(10), sampler=ToldSampler()),
        DataLoader(range(10), batch_sampler=BatchSampler(ToldSampler(), 2, drop_last=False)),
        DataLoader(ToldData()),
    ],
)
def test_an_epoch_that_is_set_reaches_whatever_of_the_loader_asks_for_it(loader):
    prepared = prepare_data_loader(loader, add_distributed_sampler=False)
    prepared.set_epoch(4)
    assert items(prepared) == items(prepared) == [4]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class OwnBatches(DataLoader):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        vars(self)["batch_sampler"] = range(4)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Endless()), "an IterableDataset \\(Endless\\)"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)), "a batch sampler"),
        (OwnBatches(DATA, batch_size=2), "a batch sampler \\(range\\)"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "a WeightedRandomSampler would be lost"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), "a SubsetRandomSampler would be lost"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "with replacement, num_samples"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4)), "with replacement, num_samples"),
        (DataLoader(DATA, sampler=RandomSampler(range(4))), "a RandomSampler with .* data of its own"),
        (DataLoader(DATA, sampler=SequentialSampler(range(4))), "a SequentialSampler with .* data of its own"),
    ],
)
def test_what_cannot_be_shared_is_refused_unless_it_shares_itself(places, loader, message):
    with pytest.raises(ValueError, match=f"{message}.*add_distributed_sampler=False"):
        prepare_data_loader(loader)
    assert prepare_data_loader(loader, add_distributed_sampler=False).sampler is loader.sampler


def test_what_is_no_data_loader_is_refused():
    with pytest.raises(TypeError, match=r"a TensorDataset cannot be prepared: give a torch\.utils\.data\.DataLoader"):
        prepare_data_loader(DATA)


def test_a_single_rank_keeps_its_sampler():
    loader = DataLoader(DATA, shuffle=True, collate_fn=collate)
    prepared = prepare_data_loader(loader)
    assert prepared.sampler is loader.sampler
    prepared.set_epoch(3)
    assert sorted(items(prepared)) == list(range(10))


def test_batches_move_to_the_device_of_the_rank_unless_told_otherwise(monkeypatch):
    """The device "meta" stands in for a GPU."""
    monkeypatch.setattr(data_loader, "get_device", lambda: torch.device("meta"))
    loader = DataLoader([torch.ones(1)], batch_size=None)
    (moved,) = prepare_data_loader(loader)
    assert moved.is_meta
    (stayed,) = prepare_data_loader(loader, move_to_device=False)
    assert not stayed.is_meta
