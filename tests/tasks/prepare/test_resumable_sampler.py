"""Which samples are whose, over any interruptions and numbers of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import StateMismatchError
from prefect_torch.tasks.prepare.resumable_sampler import Position, ResumableSampler, epoch_order, rank_share
from torch.utils.data import DistributedSampler

NUM_RANKS = st.integers(1, 5)
# What each attempt of an epoch has: ranks, samples in a batch, batches until it is interrupted.
ATTEMPTS = st.lists(st.tuples(NUM_RANKS, st.integers(1, 4), st.integers(0, 4)), max_size=5)


def sampler_of(length, rank, num_ranks, *, shuffle=True, seed=3, drop_last=False):
    return ResumableSampler(range(length), rank, num_ranks, shuffle=shuffle, seed=seed, drop_last=drop_last)


def restored(length, num_ranks, state, **arguments):
    samplers = [sampler_of(length, rank, num_ranks, **arguments) for rank in range(num_ranks)]
    for sampler in samplers:
        sampler.restore(state)
    return samplers


def fresh(epoch=0):
    return {"epoch": epoch, "used": 0, "length": 0, "seed": 3, "order": 0}


@given(st.integers(0, 60), ATTEMPTS, NUM_RANKS, st.integers(0, 3))
def test_an_epoch_has_every_sample_exactly_once_whatever_interrupts_it(length, attempts, last_ranks, epoch):
    """But for those which fill the very last turn, and they come from that turn."""
    used, state = [], fresh(epoch)
    for num_ranks, batch_size, num_batches in attempts:
        samplers = restored(length, num_ranks, state)
        shares = [list(sampler)[: batch_size * num_batches] for sampler in samplers]
        turns = len(shares[0])
        position = samplers[0].after(Position(state["epoch"], state["used"]), turns)
        used += [share[turn] for turn in range(turns) for share in shares][: position.used - state["used"]]
        (state,) = {tuple(sampler.state_at(position).items()) for sampler in samplers}  # the same on all ranks
        state = dict(state)
    rest = [list(sampler) for sampler in restored(length, last_ranks, state)]
    left = length - len(used)
    assert {len(share) for share in rest} == {-(-left // last_ranks)}
    turns = [share[turn] for turn in range(len(rest[0])) for share in rest]
    assert sorted(used + turns[:left]) == list(range(length))
    assert set(turns[left:]) <= set(turns[left - left % last_ranks : left])


@given(st.integers(0, 60), NUM_RANKS, st.integers(0, 20), st.booleans())
def test_as_many_ranks_go_on_as_if_nothing_had_been(length, num_ranks, turns, drop_last):
    for rank in range(num_ranks):
        whole = sampler_of(length, rank, num_ranks, drop_last=drop_last)
        state = whole.state_at(whole.after(Position(0, 0), min(turns, len(whole))))
        resumed = restored(length, num_ranks, state, drop_last=drop_last)[rank]
        assert list(whole)[turns:] == list(resumed)
        assert len(resumed) == len(whole) == len(list(whole))


@given(st.integers(0, 60), NUM_RANKS)
def test_with_drop_last_no_sample_comes_twice(length, num_ranks):
    rest = epoch_order(length, 5)
    shares = [rank_share(rest, rank, num_ranks, drop_last=True).tolist() for rank in range(num_ranks)]
    samples = [sample for share in shares for sample in share]
    assert len(samples) == len(set(samples)) == length - length % num_ranks


@given(st.integers(1, 60), NUM_RANKS, st.booleans(), st.integers(0, 3))
def test_an_epoch_is_torchs_own_up_to_the_last_turn(length, num_ranks, shuffle, epoch):
    for rank in range(num_ranks):
        ours = sampler_of(length, rank, num_ranks, shuffle=shuffle)
        theirs = DistributedSampler(range(length), num_ranks, rank, shuffle=shuffle, seed=3)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        whole_turns = length // num_ranks
        assert list(ours)[:whole_turns] == list(theirs)[:whole_turns]
        assert len(ours) == len(theirs)


def test_fewer_samples_than_ranks_go_round():
    rest = torch.tensor([7, 8])
    assert [rank_share(rest, rank, 5).tolist() for rank in range(5)] == [[7], [8], [7], [8], [7]]


def test_ranks_that_used_unequally_much_each_continue_their_own_share():
    shares = [list(sampler_of(13, rank, 3)) for rank in range(3)]
    for rank, turns in enumerate((1, 3, 2)):
        sampler = sampler_of(13, rank, 3)
        sampler.restore(sampler.state_at(sampler.after(Position(), turns)))
        assert list(sampler) == shares[rank][turns:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 11}, "the dataset had 10 samples then and has 11 now"),
        ({"length": 10, "shuffle": False}, "the samples come in another order now"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_are_refused_and_between_epochs_taken(arguments, message):
    sampler = sampler_of(10, 0, 2)
    other = sampler_of(rank=1, num_ranks=2, seed=8, **arguments)
    with pytest.raises(StateMismatchError, match=f"from the middle of epoch 4, and {message}"):
        other.restore(sampler.state_at(Position(4, 6)))
    assert (other.epoch, other.start, other.seed) == (0, 0, 8)
    other.restore(sampler.state_at(Position(4, 0)))
    assert (other.epoch, other.start, other.seed) == (4, 0, 3)


def test_the_seed_is_restored():
    state = sampler_of(10, 0, 1, seed=3).state_at(Position(1, 4))
    other = sampler_of(10, 0, 1, seed=4)
    list(other)
    other.restore(state)
    assert list(other) == epoch_order(10, 3 + 1)[4:].tolist()


def test_setting_another_epoch_over_a_restored_one_is_refused():
    sampler = sampler_of(10, 0, 1)
    sampler.restore(sampler.state_at(Position(2, 4)))
    sampler.set_epoch(2)
    assert sampler.start == 4
    with pytest.raises(ValueError, match=r"set_epoch\(3\), but the restored checkpoint is from the middle of epoch 2"):
        sampler.set_epoch(3)
