"""Placements: every position is held once, shards are about equal, and causal work is shared out evenly.

A query at place i of its document, counted from 0, sees i + 1 keys: the *pairs* of a rank are the sum of these.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import WorkloadError
from tasp_lab.workload.sequence_layout import SequenceLayout, Span
from tests.support.layouts import LAYOUTS

names = st.sampled_from(sorted(LAYOUTS))
sequences = st.integers(1, 200)
world_sizes = st.integers(1, 40)
packings = st.lists(st.integers(0, 60), min_size=1, max_size=30)


def held(layout: SequenceLayout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world_size)]


def pairs(layout: SequenceLayout, documents: list[int]) -> list[int]:
    """Of each rank, under a causal mask."""
    keys_seen = np.concatenate([np.arange(1, length + 1) for length in documents])
    return [int(keys_seen[layout.positions(rank)].sum()) for rank in range(layout.world_size)]


def spread(numbers: list[int]) -> int:
    return max(numbers) - min(numbers)


@given(names, sequences, world_sizes, st.data())
def test_what_is_after_a_position_is_held_as_before(
    name: str, sequence: int, world_size: int, data: st.DataObject
) -> None:
    layout, first = LAYOUTS[name](sequence, world_size), data.draw(st.integers(0, sequence))
    after = [[position + first for position in shard] for shard in held(layout.after(first))]
    assert after == [[position for position in shard if position >= first] for shard in held(layout)]


@given(st.sampled_from(["contiguous", "striped"]), sequences, world_sizes)
def test_shards_differ_by_one_position_at_most(name: str, sequence: int, world_size: int) -> None:
    lengths = [len(shard) for shard in held(LAYOUTS[name](sequence, world_size))]
    assert max(lengths) - min(lengths) <= 1


@given(st.sampled_from(["contiguous", "striped"]), sequences, world_sizes, st.data())
def test_a_cached_prefix_is_even_and_so_is_what_follows_it(
    name: str, sequence: int, world_size: int, data: st.DataObject
) -> None:
    """By themselves, and together: remainders of the second part go to ranks that had none of the first."""
    cached = data.draw(st.integers(0, sequence))
    shards = held(LAYOUTS[name](sequence, world_size, cached_keys=cached))
    assert spread([len(shard) for shard in shards]) <= 1
    assert spread([sum(position < cached for position in shard) for shard in shards]) <= 1


@given(sequences, world_sizes)
def test_zigzag_stretches_differ_by_one_position_at_most(sequence: int, world_size: int) -> None:
    """And so do the shards, each of them one stretch of the front half and one of the back half."""
    layout = LAYOUTS["zigzag"](sequence, world_size)
    starts = sorted(span.start for each in layout.spans for span in each)
    lengths = [end - start for start, end in pairwise([*starts, sequence])]
    lengths += [0] * (2 * world_size - len(lengths))
    assert max(lengths) - min(lengths) <= 1
    shards = [len(shard) for shard in held(layout)]
    assert max(shards) - min(shards) <= 1


@given(st.integers(1, 12), st.integers(2, 40))
def test_contiguous_ranks_have_more_causal_work_the_later_they_are(length: int, world_size: int) -> None:
    shards = held(LAYOUTS["contiguous"](length * world_size, world_size))
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
    """A layout that is right, with up to two of its numbers changed a little or one of its spans gone or doubled."""
    documents = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    layout = LAYOUTS[draw(names)](sum(documents), draw(st.integers(1, 4)), documents)
    sequence, spans = layout.sequence, [list(each) for each in layout.spans]
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


def is_layout(sequence: int, spans: tuple[tuple[Span, ...], ...]) -> bool:
    """What a layout promises, position by position."""
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
    if is_layout(sequence, spans):
        assert SequenceLayout("drawn", sequence, spans).world_size == len(spans)
        return
    with pytest.raises(WorkloadError, match=r"layout 'drawn'") as refused:
        SequenceLayout("drawn", sequence, spans)
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
        ([Span(0, 1, 8), Span(8, 1, 0)], "not empty"),
    ],
    ids=["overlap", "gap", "too short", "too long", "before the first", "two strides", "empty"],
)
def test_what_is_wrong_is_named(spans: list[Span], told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        SequenceLayout("wrong", 8, tuple((span,) for span in spans))


@pytest.mark.parametrize("spans", [(Span(2, 1, 2), Span(0, 1, 2)), (Span(0, 2, 2), Span(1, 2, 2))])
def test_a_shard_that_is_not_in_ascending_order_is_refused(spans: tuple[Span, Span]) -> None:
    """Within a shard the causal mask is that of its indices."""
    with pytest.raises(WorkloadError, match="ascending"):
        SequenceLayout("wrong", 4, (spans,))


@given(names, packings, world_sizes)
def test_every_position_of_documents_is_held_once(name: str, documents: list[int], world_size: int) -> None:
    shards = held(LAYOUTS[name](sum(documents), world_size, documents))
    assert len(shards) == world_size
    assert sorted(position for shard in shards for position in shard) == list(range(sum(documents)))
    assert all(shard == sorted(shard) for shard in shards)


@given(names, packings, world_sizes)
def test_documents_change_no_span_and_no_order_within_a_document(
    name: str, documents: list[int], world_size: int
) -> None:
    packed, whole = (LAYOUTS[name](sum(documents), world_size, each) for each in (documents, None))
    assert packed.spans == whole.spans
    positions = packed.positions_at(np.arange(sum(documents)))
    assert sorted(positions.tolist()) == list(range(sum(documents)))
    places = np.argsort(positions)
    for start, end in pairwise(accumulate(documents, initial=0)):
        assert (np.diff(places[start:end]) > 0).all()


@given(names, packings, world_sizes)
def test_position_spans_are_the_positions_of_each_rank(name: str, documents: list[int], world_size: int) -> None:
    layout = LAYOUTS[name](sum(documents), world_size, documents)
    for rank, spans in enumerate(layout.position_spans):
        assert [position for span in spans for position in span.positions.tolist()] == held(layout)[rank]


@given(names, sequences, world_sizes)
def test_one_document_is_no_documents(name: str, sequence: int, world_size: int) -> None:
    assert LAYOUTS[name](sequence, world_size, [sequence]) == LAYOUTS[name](sequence, world_size)


@given(names, packings, world_sizes)
def test_empty_documents_change_nothing(name: str, documents: list[int], world_size: int) -> None:
    full = [length for length in documents if length] or [0]
    sequence = sum(documents)
    assert LAYOUTS[name](sequence, world_size, documents) == LAYOUTS[name](sequence, world_size, full)


@given(st.sampled_from([("contiguous", 1), ("zigzag", 2), ("striped", 1)]), packings, st.integers(1, 6))
def test_a_document_is_shared_out_evenly(case: tuple[str, int], documents: list[int], world_size: int) -> None:
    """A rank has one or two stretches of a document, each of them as long as any other or one longer."""
    name, stretches = case
    shards = held(LAYOUTS[name](sum(documents), world_size, documents))
    for start, end in pairwise(accumulate(documents, initial=0)):
        shares = [sum(start <= position < end for position in shard) for shard in shards]
        least = stretches * ((end - start) // (stretches * world_size))
        assert all(least <= share <= least + stretches for share in shares)


@given(names, st.integers(2, 40), st.data())
def test_documents_shorter_than_the_world_size_go_round(name: str, world_size: int, data: st.DataObject) -> None:
    """Documents of one position each: the first n go to n ranks, and so on."""
    rounds = data.draw(st.integers(1, 4))
    layout = LAYOUTS[name](rounds * world_size, world_size, [1] * (rounds * world_size))
    rank_of = {position: rank for rank, shard in enumerate(held(layout)) for position in shard}
    for first in range(0, rounds * world_size, world_size):
        assert len({rank_of[first + number] for number in range(world_size)}) == world_size


@given(names, st.integers(1, 40), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_document_that_can_be_cut_evenly_is_cut_as_if_alone(name: str, world_size: int, sizes: list[int]) -> None:
    documents = [2 * world_size * size for size in sizes]
    shards = held(LAYOUTS[name](sum(documents), world_size, documents))
    for start, length in zip(accumulate(documents, initial=0), documents, strict=False):
        found = [[position - start for position in shard if 0 <= position - start < length] for shard in shards]
        assert found == held(LAYOUTS[name](length, world_size))


@given(world_sizes, st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_zigzag_pairs_are_equal_if_every_document_can_be_cut_evenly(world_size: int, sizes: list[int]) -> None:
    documents = [2 * world_size * size for size in sizes]
    assert spread(pairs(LAYOUTS["zigzag"](sum(documents), world_size, documents), documents)) == 0


@given(st.integers(1, 12), st.integers(0, 60), st.integers(1, 3))
def test_zigzag_pairs_are_equal_over_documents_of_one_length(world_size: int, length: int, rounds: int) -> None:
    """Every cut occurs as often as its mirror image. A stretch of c positions and its image have c (length + 1) pairs.

    The rank of a stretch and of its mirror image is the same, and holds as many positions as any other.
    """
    documents = [length] * (2 * world_size * rounds)
    assert spread(pairs(LAYOUTS["zigzag"](sum(documents), world_size, documents), documents)) == 0


@given(packings, world_sizes)
def test_zigzag_pairs_differ_by_less_than_two_per_position(documents: list[int], world_size: int) -> None:
    """And so in each document of L > 0 positions: q or q + 1 in a stretch, o < 2n odd ones in all.

    For o = 0 all ranks have the same. Else, the first q positions of two stretches have at most q (n - 1) pairs more
    than those of two others. Of the odd positions a rank has up to two, and each sees at most L keys. Where it has two,
    the first lies in the front half behind at most o - 2 others, and sees at most q n + o - 1 keys. In all that is at
    most L + 2 q n + o - 1 = 2 L - 1.
    """
    found = spread(pairs(LAYOUTS["zigzag"](sum(documents), world_size, documents), documents))
    assert found < 2 * sum(documents) or found == 0


@given(packings, world_sizes)
def test_striped_pairs_differ_by_at_most_one_per_position(documents: list[int], world_size: int) -> None:
    """And so in each document of L positions: n q and o < n odd ones.

    For o = 0 the last rank has q (n - 1) more than the first. Else the rank with the last position has the most. One
    that has no odd position has fewer by L, or less: its first q positions come later. One that has, by less than L.
    """
    found = spread(pairs(LAYOUTS["striped"](sum(documents), world_size, documents), documents))
    assert found <= sum(documents)


@given(world_sizes, st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_striped_pairs_of_even_documents_differ_by_those_of_the_last_stripe(world_size: int, sizes: list[int]) -> None:
    """The stripes of a document of n q positions differ by q (n - 1) pairs, always in favour of the last rank."""
    documents = [world_size * size for size in sizes]
    found = spread(pairs(LAYOUTS["striped"](sum(documents), world_size, documents), documents))
    assert found == sum(sizes) * (world_size - 1)


@given(names, packings, world_sizes, st.integers(-5, 5).filter(bool))
def test_documents_of_another_sequence_are_refused(name: str, documents: list[int], n: int, more: int) -> None:
    told = f"{sum(documents)} positions together, expected {sum(documents) + more}"
    with pytest.raises(WorkloadError, match=told):
        LAYOUTS[name](sum(documents) + more, n, documents)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_negative_length_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="document 1: -2 positions, expected 0 or more"):
        LAYOUTS[name](4, 2, [6, -2])
