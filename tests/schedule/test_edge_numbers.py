"""Edges as numbers: each once, in order; and the sorting that they need."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import stable_order
from tasp_lab.schedule.dependencies import Copies, Edges, compute_in_order, edges_of_numbers, operations_of
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tests.schedule.test_messages import either

WIDTH = 24
"""Bits of the number of an operation."""


@given(either)
def test_numbers_of_edges_are_the_edges_each_once(schedule: Schedule) -> None:
    """Without messages of several blocks, and in an order of their own."""
    transfers, calls = operations_of(schedule, schedule.steps)
    copies, in_order = Copies(schedule, transfers, calls), compute_in_order(calls, schedule.transfers)
    operations = np.arange(len(transfers.step) + len(calls.step) + len(copies.buffers.step))
    numbers = copies.edge_numbers(operations, WIDTH, in_order)
    expected = Counter(row for edges in (in_order, *copies.edges()) for row in rows(edges))
    nothing = Edges.joined([Edges(*(column[:0] for column in in_order))])
    assert rows(edges_of_numbers(numbers, WIDTH, nothing)) == sorted(expected)


def rows(edges: Edges) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in edges), strict=True))


@given(either)
def test_messages_wait_for_each_cause_once(schedule: Schedule) -> None:
    found = rows(message_dependencies(schedule).edges)
    assert len(found) == len(set(found))


@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(-9, 9), st.integers(-(2**31), 2**31))))
def test_rows_are_sorted_stably(values: list[tuple[int, int, int]]) -> None:
    """Ranges of values that fit into a number together with an index, and such that do not."""
    table = np.array(values, dtype=np.int64).reshape(-1, 3)
    for columns in ((0, 1, 2), (1,), (1, 2), (2, 1)):
        chosen = [tuple(row[column] for column in columns) for row in values]
        expected = sorted(range(len(values)), key=chosen.__getitem__)
        assert stable_order(*(table[:, column] for column in columns)).tolist() == expected
