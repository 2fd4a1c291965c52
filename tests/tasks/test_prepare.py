"""Models and loaders of one rank, as if it were one of two; real ranks are in tests/flows/test_prepared_training.py."""

import copy
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from prefect_torch.tasks import get_device, prepare, prepare_data_loader, prepare_model
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

DATA = TensorDataset(torch.arange(10))


class Pair(NamedTuple):
    first: Any
    second: Any


def collate(items):
    return [int(item[0]) for item in items]


def begin_worker(number):
    pass


@pytest.fixture
def places(monkeypatch):
    """Yield a function that makes this process rank `rank` of two."""

    def become(rank):
        monkeypatch.setattr(prepare, "_place", lambda: (rank, 2))

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


def test_every_argument_of_the_loader_is_kept(places):
    arguments = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": collate,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 7,
        "worker_init_fn": begin_worker,
        "generator": torch.Generator().manual_seed(5),
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    loader = DataLoader(DATA, multiprocessing_context="spawn", **arguments)
    loader_of_rank = prepare._with_sampler(loader, DistributedSampler(DATA, 2, 0))
    prepared = prepare.PreparedDataLoader(loader_of_rank, None)
    for candidate in (loader_of_rank, prepared):
        assert {name: getattr(candidate, name) for name in arguments} == arguments
        assert candidate.multiprocessing_context.get_start_method() == "spawn"
        assert candidate.batch_sampler.drop_last
        assert candidate.batch_sampler.sampler is candidate.sampler
        assert isinstance(candidate, DataLoader)
    assert isinstance(loader.sampler, SequentialSampler)  # the caller's is as it was


WITH_WORKERS = """
import torch
from prefect_torch.tasks import prepare, prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset
prepare._place = lambda: (0, 2)
data = TensorDataset(torch.arange(10))
loader = prepare_data_loader(DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True))
for epoch in range(2):
    print([int(item) for batch, in loader for item in batch])
"""


def test_workers_load_the_share():
    """In a process of its own, as a rank is one: a worker is a fork, and this process may hold a whole server's threads."""
    ran = subprocess.run([sys.executable, "-c", WITH_WORKERS], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["[0, 2, 4, 6, 8]"] * 2, ran.stderr


def test_the_seed_of_the_generator_is_that_of_the_order(places, monkeypatch):
    broadcasts = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda seeds, src: broadcasts.append((seeds[0], src)))
    generator = torch.Generator().manual_seed(5)
    loader = prepare_data_loader(DataLoader(DATA, shuffle=True, generator=generator, collate_fn=collate))
    assert broadcasts == [(5, 0)]
    expected = DistributedSampler(DATA, 2, 0, shuffle=True, seed=5)
    assert items(loader) == list(expected)


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


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Endless()), "an IterableDataset \\(Endless\\)"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)), "a batch sampler"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "a WeightedRandomSampler would be lost"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), "a SubsetRandomSampler would be lost"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "with replacement or num_samples"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4)), "with replacement or num_samples"),
    ],
)
def test_what_cannot_be_shared_is_refused_unless_it_shares_itself(places, loader, message):
    with pytest.raises(ValueError, match=f"{message}.*add_distributed_sampler=False"):
        prepare_data_loader(loader)
    assert prepare_data_loader(loader, add_distributed_sampler=False).sampler is loader.sampler


def test_a_single_rank_keeps_its_sampler_and_its_model():
    loader = DataLoader(DATA, shuffle=True, collate_fn=collate)
    prepared = prepare_data_loader(loader)
    assert prepared.sampler is loader.sampler
    prepared.set_epoch(3)
    assert sorted(items(prepared)) == list(range(10))
    model = torch.nn.Linear(2, 1)
    assert prepare_model(model) is model
    assert prepare_model(model, parallel_strategy="fsdp") is model


def test_batches_move_to_the_device_however_nested(monkeypatch):
    """The device "meta" stands in for a GPU."""
    monkeypatch.setattr(prepare, "get_device", lambda: torch.device("meta"))
    one = torch.ones(1)
    packed = torch.nn.utils.rnn.pack_sequence([one])
    batch = {"tensors": [one, (one, 3)], "pair": Pair(one, "text"), "packed": packed, "none": None, "more": OrderedDict(a=one)}
    (moved,) = prepare_data_loader(DataLoader([batch], batch_size=None, collate_fn=lambda item: item))
    assert moved["tensors"][0].is_meta
    assert moved["tensors"][1][0].is_meta
    assert moved["pair"].first.is_meta
    assert moved["packed"].data.is_meta
    assert moved["more"]["a"].is_meta
    assert not batch["more"]["a"].is_meta
    assert (moved["tensors"][1][1], moved["pair"].second, moved["none"]) == (3, "text", None)
    (stayed,) = prepare_data_loader(DataLoader([one], batch_size=None), move_to_device=False)
    assert not stayed.is_meta


def test_a_model_moves_to_the_device_given():
    assert prepare_model(torch.nn.Linear(2, 1), move_to_device=torch.device("meta")).weight.is_meta
    assert get_device() == torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="parallel_strategy='zero': give 'ddp', 'fsdp' or None"):
        prepare_model(torch.nn.Linear(2, 1), parallel_strategy="zero")


def test_preparing_imports_no_prefect():
    program = "import sys; from prefect_torch.tasks import prepare_model; assert 'prefect' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
