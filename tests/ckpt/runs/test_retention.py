import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt.runs.manifest import new_id
from prefect_torch.ckpt.runs.retention import RetentionPolicy, plan, score, sort_by_score


@dataclass(frozen=True)
class Known:
    id: str
    step: int
    metrics: dict[str, Any]


def known(*scores, attempt=1):
    return [Known(f"{attempt:06d}-{step:08d}-00000000", step, metrics) for step, metrics in enumerate(scores)]


def steps(kept):
    return sorted(int(checkpoint_id.split("-")[1]) for checkpoint_id in kept)


scores = st.one_of(
    st.just({}),
    st.floats(allow_nan=True).map(lambda value: {"m": value}),
    st.sampled_from([{"m": None}, {"m": "text"}, {"m": True}, {"m": {"n": 1}}]),
)
policies = st.builds(
    RetentionPolicy,
    num_to_keep=st.none() | st.integers(1, 5),
    checkpoint_score_attribute=st.none() | st.just("m"),
    checkpoint_score_order=st.sampled_from(["max", "min"]),
    keep_last=st.integers(1, 4),
    keep_every_n_steps=st.none() | st.integers(1, 4),
)


@given(st.lists(scores, max_size=12), policies, st.data())
def test_the_newest_the_pinned_and_those_in_use_never_go(metrics, policy, data):
    checkpoints = known(*metrics)
    ids = [checkpoint.id for checkpoint in checkpoints]
    pinned = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    in_use = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    decided = plan(checkpoints, policy, pinned=pinned, in_use=in_use)
    assert {*pinned, *in_use, *ids[-1:]} <= decided.keep.keys()
    assert sorted([*decided.keep, *(checkpoint.id for checkpoint in decided.drop)]) == ids


class SlowlySearched(tuple):
    """A tuple of many ids: a search for each checkpoint would take minutes."""

    __slots__ = ()

    def __contains__(self, _):
        raise AssertionError("searched from its beginning")


def test_what_is_pinned_or_in_use_is_not_searched_for_each_checkpoint():
    checkpoints = known(*[{}] * 9)
    pinned, in_use = (SlowlySearched(it.id for it in checkpoints[first::3]) for first in (0, 1))
    assert steps(plan(checkpoints, RetentionPolicy(1), pinned=pinned, in_use=in_use).keep) == [0, 1, 3, 4, 6, 7, 8]


@given(st.lists(scores, max_size=12), policies, st.data())
def test_what_was_kept_is_kept_again(metrics, policy, data):
    checkpoints = known(*metrics)
    ids = [checkpoint.id for checkpoint in checkpoints]
    pinned = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    once = plan(checkpoints, policy, pinned=pinned)
    again = plan([checkpoint for checkpoint in checkpoints if checkpoint.id in once.keep], policy, pinned=pinned)
    assert again.drop == ()
    assert again.keep == once.keep


@given(st.permutations(known({"m": 1.0}, {"m": 3.0}, {}, {"m": 2.0})))
def test_the_order_of_the_manifests_does_not_matter(shuffled):
    decided = plan(shuffled, RetentionPolicy(2, "m"))
    assert steps(decided.keep) == [1, 3]


def test_the_latest_is_kept_besides_the_best():
    decided = plan(known({"m": 3.0}, {"m": 2.0}, {"m": 1.0}), RetentionPolicy(1, "m"))
    assert decided.keep == {"000001-00000002-00000000": ("latest",), "000001-00000000-00000000": ("best",)}
    assert [checkpoint.step for checkpoint in decided.drop] == [1]


@pytest.mark.parametrize("order", ["max", "min"])
def test_missing_is_worse_than_nan_and_nan_worse_than_any_number(order):
    worst_first = known({}, {"m": math.nan}, {"m": -math.inf if order == "max" else math.inf}, {"m": 0.0})
    ranked = sort_by_score(worst_first, "m", order)
    assert [checkpoint.step for checkpoint in ranked] == [3, 2, 1, 0]


@pytest.mark.parametrize("value", ["0.9", None, {"n": 9}])
def test_what_is_no_number_counts_as_missing(value):
    assert sort_by_score(known({"m": 0.0}, {"m": value}), "m", "min")[0].step == 0


def test_ties_go_to_the_newer():
    assert [checkpoint.step for checkpoint in sort_by_score(known({"m": 1}, {"m": 1.0}, {"m": 1}), "m", "min")] == [2, 1, 0]


def test_a_nested_metric_ranks_by_its_path():
    assert sort_by_score(known({"eval": {"acc": 0.9}}, {"eval": {"acc": 0.1}}), "eval/acc", "max")[0].step == 0


def test_without_an_attribute_the_newest_are_kept():
    assert steps(plan(known({}, {}, {}, {}), RetentionPolicy(2)).keep) == [2, 3]


def test_without_a_number_everything_is_kept():
    assert plan(known({}, {}, {}), RetentionPolicy(None, "m")).drop == ()


def test_latest_and_best_and_last_and_every_are_a_union():
    checkpoints = known(*({"m": float(step == 1)} for step in range(10)))
    policy = RetentionPolicy(1, "m", keep_last=2, keep_every_n_steps=4)
    decided = plan(checkpoints, policy)
    assert steps(decided.keep) == [0, 1, 4, 8, 9]
    assert decided.keep["000001-00000008-00000000"] == ("last", "every")


@pytest.mark.parametrize("fields", [{"num_to_keep": 0}, {"keep_last": 0}, {"keep_every_n_steps": -1}])
def test_a_number_that_keeps_nothing_is_refused(fields):
    with pytest.raises(ValueError, match="give at least 1"):
        RetentionPolicy(**fields)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'max' or 'min'"):
        RetentionPolicy(checkpoint_score_order="best")


@given(st.lists(scores, max_size=12), st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_no_dropped_checkpoint_is_better_than_a_best_one(metrics, num_to_keep, order):
    checkpoints = known(*metrics)
    decided = plan(checkpoints, RetentionPolicy(num_to_keep, "m", order))
    worth = {checkpoint.id: (score(checkpoint.metrics, "m", order), checkpoint.id) for checkpoint in checkpoints}
    best = [worth[checkpoint_id] for checkpoint_id, why in decided.keep.items() if "best" in why]
    assert len(best) == min(num_to_keep, len(checkpoints))
    assert all(worth[checkpoint.id] < min(best) for checkpoint in decided.drop)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=8, unique=True), policies)
def test_the_newest_is_that_of_the_last_attempt_even_at_a_smaller_step(attempts_and_steps, policy):
    checkpoints = {place: Known(new_id(*place), place[1], {}) for place in attempts_and_steps}
    decided = plan(list(checkpoints.values()), policy)
    assert "latest" in decided.keep[checkpoints[max(checkpoints)].id]


@given(st.lists(scores, max_size=12), policies)
def test_what_goes_goes_oldest_first(metrics, policy):
    dropped = [checkpoint.id for checkpoint in plan(known(*metrics), policy).drop]
    assert dropped == sorted(dropped)


def test_without_checkpoints_there_is_nothing_to_decide():
    decided = plan([], RetentionPolicy(1, "m"))
    assert (decided.keep, decided.drop) == ({}, ())


@pytest.mark.parametrize(("order", "best_step"), [("max", 1), ("min", 0)])
@pytest.mark.parametrize("low", [2**53, 10**400], ids=["rounded", "overflowing"])
def test_whole_numbers_that_no_float_holds_rank_exactly(order, best_step, low):
    assert sort_by_score(known({"m": low}, {"m": low + 1}), "m", order)[0].step == best_step


@pytest.mark.parametrize("count", [True, 1.0, "1"])
def test_a_count_is_a_whole_number(count):
    with pytest.raises(ValueError, match="num_to_keep="):
        RetentionPolicy(num_to_keep=count)


def test_keep_last_has_no_none():
    with pytest.raises(ValueError, match=r"keep_last=None: give at least 1$"):
        RetentionPolicy(keep_last=None)


@pytest.mark.parametrize("value", ["high", {"n": 1}])
def test_a_score_that_is_no_number_is_missing_so_that_its_evaluation_is_awaited(value):
    policy = RetentionPolicy(num_to_keep=1, checkpoint_score_attribute="m", evaluation_timeout_s=60)
    decided = plan(known({"m": value}, {"m": 1.0}, {"m": 2.0}), policy)
    assert decided.keep["000001-00000000-00000000"] == ("awaiting evaluation",)
    assert [checkpoint.step for checkpoint in decided.drop] == [1]
