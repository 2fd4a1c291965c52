"""Who writes what of a state."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import ReportMismatchError
from prefect_torch.ckpt.state.objects.tensors import box_of
from prefect_torch.ckpt.state.plan import TensorShard, plan_writes
from prefect_torch.ckpt.state.planner import StateDescription, StatePlanner
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard


def piece(name, shape, offsets=None, sizes=None, *, by_first=False, dtype="float32"):
    return TensorShard(
        name, (name,), dtype, 4, tuple(shape), tuple(offsets or (0,) * len(shape)), tuple(sizes or shape), by_first
    )


def rows_written(pieces, writes):
    """Count how often each row of each piece is written, by any rank."""
    count = Counter()
    for of_rank, pieces_of_rank in zip(writes, pieces, strict=True):
        for write in of_rank:
            held = pieces_of_rank[write.shard]
            count.update((held.name, held.offsets, row) for row in range(write.start, write.stop))
    return count


shapes = st.lists(st.integers(0, 300), max_size=3).map(tuple) | st.tuples(st.integers(1, 50), st.just(100_000))


@given(st.lists(shapes, max_size=12), st.integers(1, 5))
def test_every_row_is_written_exactly_once(shapes, world_size):
    pieces = [[piece(str(number), shape) for number, shape in enumerate(shapes)] for _ in range(world_size)]
    count = rows_written(pieces, plan_writes(pieces))
    expected = {(held.name, held.offsets, row) for held in pieces[0] for row in range(held.rows)}
    assert dict(count) == dict.fromkeys(expected, 1)


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 2000)), min_size=1, max_size=12), st.integers(1, 8))
def test_ranks_write_equally_many_bytes(shapes, world_size):
    pieces = [[piece(str(number), shape) for number, shape in enumerate(shapes)] for _ in range(world_size)]
    writes = plan_writes(pieces)
    held = pieces[0]
    written = [
        sum((write.stop - write.start) * held[write.shard].bytes / held[write.shard].rows for write in of) for of in writes
    ]
    share = sum(each.bytes for each in held) / world_size
    assert max(abs(each - share) for each in written) <= 1.5 * 2**20  # what is smaller than 1 MiB is not cut
    assert sum(len(of) for of in writes) <= len(held) + world_size - 1


def test_a_sharded_tensor_stays_where_it_is_and_replicas_of_a_shard_share_it():
    def of(rank):
        shard = piece("w", (4000, 1000), ((rank % 2) * 2000, 0), (2000, 1000))
        return [shard]

    writes = plan_writes([of(rank) for rank in range(4)])
    assert [[(write.start, write.stop) for write in of] for of in writes] == [
        [(0, 1000)],
        [(0, 1000)],
        [(1000, 2000)],
        [(1000, 2000)],
    ]


def test_what_counts_on_rank_0_is_written_by_it_and_the_others_take_more_of_the_rest():
    pieces = [[piece("buffer", (1000, 1000), by_first=True), piece("w", (3000, 1000))] for _ in range(2)]
    writes = plan_writes(pieces)
    assert [(write.shard, write.start, write.stop) for write in writes[0]] == [(0, 0, 1000), (1, 0, 1000)]
    assert [(write.shard, write.start, write.stop) for write in writes[1]] == [(1, 1000, 3000)]


def test_what_rank_0_must_write_is_no_burden_to_one_other_rank_alone():
    pieces = [[piece("buffer", (3000, 1000), by_first=True), piece("w", (3000, 1000))] for _ in range(4)]
    written = [sum(write.stop - write.start for write in of) for of in plan_writes(pieces)]
    assert written == [3000, 1000, 1000, 1000]


def test_what_only_some_ranks_have_is_written_by_them():
    pieces = [[piece("a", (2000, 1000))], [piece("b", (10,)), piece("a", (2000, 1000))], [piece("c", ())]]
    writes = plan_writes(pieces)
    assert rows_written(pieces, writes) == {
        **{("a", (0, 0), row): 1 for row in range(2000)},
        **{("b", (0,), row): 1 for row in range(10)},
        ("c", (), 0): 1,
    }


@pytest.mark.parametrize("other", [piece("w", (5,)), piece("w", (4,), dtype="int32"), piece("w", (4, 1))])
def test_something_else_under_one_name_is_a_mismatch_that_names_both_ranks(other):
    with pytest.raises(ReportMismatchError, match=r"rank 1 has 'w' as .* but rank 0 as float32 \[4\]: .*RankLocal"):
        plan_writes([[piece("w", (4,))], [other]])


@pytest.mark.parametrize(
    "parts",
    [[piece("w", (4,), (0,), (2,))], [piece("w", (4,), (0,), (2,)), piece("w", (4,))], [piece("w", (4,), (0,), (3,))] * 2],
)
def test_parts_that_do_not_make_a_whole_are_a_mismatch(parts):
    with pytest.raises(ReportMismatchError, match=r"parts of 'w' hold \d of its 4 elements"):
        plan_writes([[part] for part in parts])


def test_parts_that_overlap_are_a_mismatch_though_they_have_the_size_of_the_whole():
    parts = [piece("w", (8,), (start,), (2,)) for start in (0, 1, 4, 5)]
    with pytest.raises(ReportMismatchError, match="parts of 'w' overlap"):
        plan_writes([[part] for part in parts])


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3))
def test_the_parts_of_tensor_parallelism_are_those_that_fsdp2_shards(rows, num_fsdp, num_tp):
    def chunks(tensor, number):
        return [*tensor.chunk(number), *[tensor[:0]] * number]

    placements = [_StridedShard(0, split_factor=num_tp), Shard(0)]
    for fsdp, tp in itertools.product(range(num_fsdp), range(num_tp)):
        (start,), (size,) = box_of((rows,), placements, (num_fsdp, num_tp), (fsdp, tp))
        part = chunks(chunks(torch.arange(rows), num_tp)[tp], num_fsdp)[fsdp]
        assert [*range(start, start + size)] == part.tolist()


def test_dimensions_are_cut_from_left_to_right_and_each_strided_one_after_the_parts_it_counts():
    strided, plain = _StridedShard(0, split_factor=2), Shard(0)
    assert box_of((8, 6), [Shard(1), plain, plain], (3, 2, 2), (1, 1, 0)) == ((4, 2), (2, 2))
    assert box_of((16,), [strided, strided, plain], (2, 2, 2), (0, 1, 1)) == ((10,), (2,))
    assert box_of((16,), [_StridedShard(0, split_factor=4), strided, plain], (2, 2, 2), (0, 1, 1)) == ((12,), (2,))
    assert box_of((8,), [plain, strided], (2, 2), (0, 1)) is None
    assert box_of((8,), [strided], (2,), (1,)) is None


def test_a_plan_is_made_anew_only_when_a_structure_changes():
    planner = StatePlanner()
    told = StateDescription({}, shards=[piece("w", (4,))])
    silent = StateDescription({})

    def report(*of_ranks):
        return planner.decide(of_ranks).plan

    assert [report(told, told), report(silent, silent), report(silent, silent)] == [1, 1, 1]
    assert report(silent, StateDescription({}, shards=[piece("w", (4,)), piece("v", (1,))])) == 2
    assert report(silent, None) == 3
    assert len(planner.writes[1]) == 0
    assert report(silent, silent) == 4


def test_values_are_common_when_all_ranks_that_bring_a_state_have_them_alike():
    planner = StatePlanner()
    told = [
        StateDescription({"a": "1", "b": "1"}, shards=[]),
        StateDescription({"a": "1", "b": "2", "c": "3"}, shards=[]),
    ]
    decision = planner.decide(told)
    assert (decision.own, decision.writers) == (["b", "c"], {})
    decision = planner.decide([None, told[1]])
    assert (decision.own, decision.writers) == ([], {"a": 1, "b": 1, "c": 1})
