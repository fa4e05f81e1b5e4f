"""Placements: every position is held once, shards are about equal, and zigzag shares causal work out evenly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.errors import WorkloadError
from tasp_lab.placement import PLACEMENTS, Placement, Span

names = st.sampled_from(sorted(PLACEMENTS))
sequences = st.integers(1, 200)
world_sizes = st.integers(1, 40)


def held(placement: Placement) -> list[list[int]]:
    return [placement.positions(rank).tolist() for rank in range(placement.world_size)]


@given(names, sequences, world_sizes)
def test_every_position_is_held_once(name: str, sequence: int, world_size: int) -> None:
    shards = held(PLACEMENTS[name](sequence, world_size))
    assert len(shards) == world_size
    assert sorted(position for shard in shards for position in shard) == list(range(sequence))


@given(names, sequences, world_sizes)
def test_a_shard_is_in_ascending_order(name: str, sequence: int, world_size: int) -> None:
    placement = PLACEMENTS[name](sequence, world_size)
    for rank, shard in enumerate(held(placement)):
        assert shard == sorted(shard)
        assert len(shard) == placement.length(rank)


@given(names, sequences, world_sizes)
def test_spans_have_one_stride_and_positions(name: str, sequence: int, world_size: int) -> None:
    placement = PLACEMENTS[name](sequence, world_size)
    spans = [span for each in placement.spans for span in each]
    assert {span.stride for span in spans} == {placement.stride}
    assert min(span.count for span in spans) >= 1


@given(st.sampled_from(["contiguous", "striped"]), sequences, world_sizes)
def test_shards_differ_by_one_position_at_most(name: str, sequence: int, world_size: int) -> None:
    lengths = [len(shard) for shard in held(PLACEMENTS[name](sequence, world_size))]
    assert max(lengths) - min(lengths) <= 1


@given(sequences, world_sizes)
def test_zigzag_stretches_differ_by_one_position_at_most(sequence: int, world_size: int) -> None:
    """And so do the shards, each of them one stretch of the front half and one of the back half."""
    placement = PLACEMENTS["zigzag"](sequence, world_size)
    starts = sorted(span.start for each in placement.spans for span in each)
    lengths = [end - start for start, end in pairwise([*starts, sequence])]
    lengths += [0] * (2 * world_size - len(lengths))
    assert max(lengths) - min(lengths) <= 1
    shards = [len(shard) for shard in held(placement)]
    assert max(shards) - min(shards) <= 1


@given(st.integers(1, 12), world_sizes)
def test_zigzag_ranks_have_equal_causal_work(stretch: int, world_size: int) -> None:
    """Position p sees p + 1 keys: a front stretch and its mirror image see as many together as any other two."""
    shards = held(PLACEMENTS["zigzag"](2 * world_size * stretch, world_size))
    assert len({sum(position + 1 for position in shard) for shard in shards}) == 1


@given(st.integers(1, 12), st.integers(2, 40))
def test_contiguous_ranks_have_more_causal_work_the_later_they_are(length: int, world_size: int) -> None:
    shards = held(PLACEMENTS["contiguous"](length * world_size, world_size))
    work = [sum(position + 1 for position in shard) for shard in shards]
    assert work == sorted(set(work))


@given(sequences, st.integers(1, 5), st.data())
def test_a_part_of_a_span_is_a_slice_of_its_positions(count: int, stride: int, data: st.DataObject) -> None:
    span = Span(data.draw(st.integers(0, 9)), stride, count)
    first = data.draw(st.integers(0, count))
    size = data.draw(st.integers(0, count - first))
    assert span.part(first, size).positions.tolist() == span.positions.tolist()[first : first + size]


@st.composite
def any_spans(draw: st.DrawFn) -> tuple[int, tuple[tuple[Span, ...], ...]]:
    """A placement that is right, with up to two of its numbers changed a little or one of its spans gone or doubled."""
    placement = PLACEMENTS[draw(names)](draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    sequence, spans = placement.sequence, [list(each) for each in placement.spans]
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(["start", "stride", "count", "drop", "double", "split", "sequence"]))
        full = [rank for rank, each in enumerate(spans) if each]
        if kind == "sequence" or not full:
            sequence = max(1, sequence + draw(st.integers(-2, 2)))
            continue
        rank = draw(st.sampled_from(full))
        at = draw(st.integers(0, len(spans[rank]) - 1))
        old, by = spans[rank].pop(at), draw(st.sampled_from([-2, -1, 1, 2]))
        spans[rank][at:at] = {
            "start": [Span(old.start + by, old.stride, old.count)],
            "stride": [Span(old.start, old.stride + by, old.count)],
            "count": [Span(old.start, old.stride, old.count + by)],
            "drop": [],
            "double": [old, old],
            "split": [span for span in (old.part(0, 1), old.part(1, old.count - 1)) if span.count],
        }[kind]
    return sequence, tuple(map(tuple, spans))


def is_placement(sequence: int, spans: tuple[tuple[Span, ...], ...]) -> bool:
    """What a placement promises, position by position."""
    flat = [span for each in spans for span in each]
    if len({span.stride for span in flat}) > 1 or any(span.count < 1 or span.stride < 1 for span in flat):
        return False
    found = Counter(span.start + index * span.stride for span in flat for index in range(span.count))
    return found == Counter(range(sequence))


@given(any_spans())
def test_a_placement_exists_only_if_it_holds_every_position_once(
    case: tuple[int, tuple[tuple[Span, ...], ...]],
) -> None:
    sequence, spans = case
    if is_placement(sequence, spans):
        assert Placement("drawn", sequence, spans).world_size == len(spans)
        return
    with pytest.raises(WorkloadError, match=r"placement 'drawn'") as refused:
        Placement("drawn", sequence, spans)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([Span(0, 1, 5), Span(4, 1, 4)], "position 4"),
        ([Span(0, 1, 3), Span(4, 1, 4)], "position 4"),
        ([Span(0, 1, 4), Span(4, 1, 3)], "each of 8 positions"),
        ([Span(0, 1, 4), Span(4, 1, 5)], "each of 8 positions"),
        ([Span(-1, 1, 5), Span(4, 1, 4)], "position -1"),
        ([Span(0, 2, 4), Span(1, 1, 4)], "strides"),
        ([Span(0, 1, 8), Span(8, 1, 0)], "no positions"),
    ],
    ids=["overlap", "gap", "too short", "too long", "before the first", "two strides", "empty"],
)
def test_what_is_wrong_is_named(spans: list[Span], told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        Placement("wrong", 8, tuple((span,) for span in spans))


@pytest.mark.parametrize("spans", [(Span(2, 1, 2), Span(0, 1, 2)), (Span(0, 2, 2), Span(1, 2, 2))])
def test_a_shard_that_is_not_in_ascending_order_is_refused(spans: tuple[Span, Span]) -> None:
    """Within a shard the causal mask is that of its indices."""
    with pytest.raises(WorkloadError, match="ascending"):
        Placement("wrong", 4, (spans,))
