"""Schedules of packed documents: what they have of documents, and what they have not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import LAYOUTS

BOTH = AttentionOptions("both")
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)

NAMES = ("tasp", "zigzag-ring-attention", "striped-ring-attention", "kv-and-q-rings", "token-multi-ring", "ulysses",
         "direct-attention", "kv-all-gather", "grid:2x2", "usp:2x2", "double-ring:2x2")  # fmt: skip


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", NAMES)
def test_long_documents_change_neither_blocks_nor_transfers_nor_the_blocks_of_calls(name: str, mask: str) -> None:
    """Each rank has a part of every document, and one rank or another needs all of them."""
    documents = (64, 136, 56)
    plain = Workload(sum(documents), heads=4, head_dim=8, mask=mask)
    mesh = full_mesh(4)
    built = [attention_schedules(name, mesh, each, None, BOTH) for each in (plain, replace(plain, documents=documents))]
    for whole, packed in zip(*built, strict=True):
        assert np.array_equal(whole.block_bytes, packed.block_bytes)
        assert len(whole.steps) == len(packed.steps)
        for before, after in zip(whole.steps, packed.steps, strict=True):
            assert before.rows() == after.rows()
            assert [each.rows() for each in before.calls] == [each.rows() for each in after.calls]


def test_64_documents_are_13_calls_of_a_rank_with_tasp_on_8() -> None:
    random = np.random.default_rng(0)
    cuts = np.sort(random.choice(np.arange(1, 2**16), 63, replace=False))
    layer = Workload(2**16, mask="causal", documents=tuple(np.diff([0, *cuts, 2**16]).tolist()))
    forward, backward = attention_schedules("tasp", full_mesh(8), layer, None, BOTH)
    assert [len(rank_part(each, 1).calls) for each in (forward, backward)] == [13, 13]


@given(lengths, st.sampled_from(sorted(LAYOUTS)), st.integers(1, 4), st.data())
@settings(max_examples=200)
def test_documents_of_a_run_of_places_are_those_of_its_positions(
    documents: list[int], name: str, n: int, data: st.DataObject
) -> None:
    sequence = sum(documents)
    layer = Workload(sequence, heads=1, head_dim=1, documents=tuple(documents), mask="full")
    task = span_task(layer, LAYOUTS[name](sequence, n, documents), "fp32")
    stride = task.layout.stride
    start = data.draw(st.integers(0, sequence - 1))
    count = data.draw(st.integers(1, -(-(sequence - start) // stride)))
    lengths = [length for length in documents if length]
    document = np.repeat(np.arange(len(lengths)), lengths)
    expected = document[task.layout.positions_at(start + stride * np.arange(count))]
    first, last = task.documents_at(np.array([start]), np.array([count]))
    assert (first.tolist(), last.tolist()) == ([expected.min()], [expected.max()])
    entry, parts, position, counts = task.pieces_of(np.array([start]), np.array([count]))
    assert not entry.any()
    found = np.concatenate([at + stride * np.arange(length) for at, length in zip(position, counts, strict=True)])
    assert found.tolist() == task.layout.positions_at(start + stride * np.arange(count)).tolist()
    assert np.repeat(parts, counts).tolist() == expected.tolist()


@given(lengths, st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 4), st.integers(1, 12))
def test_a_window_between_places_is_as_wide_as_one_of_positions(
    documents: list[int], name: str, n: int, window: int
) -> None:
    """Just wide enough for all pairs of positions within the window of one document."""
    sequence = sum(documents)
    layer = Workload(sequence, heads=1, head_dim=1, mask="causal", window=window, documents=tuple(documents))
    task = span_task(layer, LAYOUTS[name](sequence, n, documents), "fp32")
    place = np.argsort(task.layout.positions_at(np.arange(sequence)))
    document = np.repeat(np.arange(len(documents)), documents)
    apart = [
        place[query] - place[key]
        for query in range(sequence)
        for key in range(max(0, query - window + 1), query + 1)
        if document[query] == document[key]
    ]
    if layer.visible.high is not None and task.layout.pieces:
        assert (task.visible.low, task.visible.high) == (0, max(apart))
