"""Edges, each once and in order, and the sorting that they need."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import stable_order
from tasp_lab.schedule.dependencies import Copies, Edges, compute_in_order, operations_of
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tests.schedule.test_messages import either


@given(either)
def test_edges_between_are_all_edges_each_once(schedule: Schedule) -> None:
    """Without messages of several blocks, and in an order of their own."""
    transfers, calls = operations_of(schedule, schedule.steps)
    copies = Copies(schedule, transfers, calls)
    operations = np.arange(len(transfers.step) + len(calls.step) + len(copies.buffers.step))
    expected = {row for edges in (compute_in_order(calls, schedule.transfers), *copies.edges()) for row in rows(edges)}
    none = Edges.of(operations[:0], operations[:0], 0, 0)
    assert rows(copies.edges_between(operations, none)) == sorted(expected)


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
