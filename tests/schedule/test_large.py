"""Large schedules: tables and machine code find what searches find, part by part and edge by edge."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray, stable_order
from tasp_lab.schedule import dependencies
from tasp_lab.schedule.dependencies import Copies, Edges, compute_in_order, edges_of_numbers, operations_of
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedule.test_messages import either


def derived(schedule: Schedule, fast: bool | None, apart: bool = False) -> tuple[Copies, IntArray]:
    """The copies of a schedule and the numbers of their edges: by searching, or by tables as code or Python.

    Operations are numbered as they are, if `apart`, else downwards and two by two, as some are one message.
    """
    transfers, calls = operations_of(schedule, schedule.steps)
    with pytest.MonkeyPatch.context() as patch:
        if fast is not None:
            called = dependencies.call
            patch.setattr(dependencies, "_MANY_ROWS", -1)
            patch.setattr(dependencies, "_COPIES_PER_ROW", np.inf)
            patch.setattr(dependencies, "call", lambda *arguments, **_: called(*arguments, fast=fast))
        copies = Copies(schedule, transfers, calls)
        operations = np.arange(len(transfers.step) + len(calls.step) + len(copies.buffers.step))
        operations = operations if apart else operations[::-1] // 2
        in_order = compute_in_order(calls, len(transfers.step))
        return copies, copies.edge_numbers(operations, WIDTH, in_order)


WIDTH = 24


def assert_same(schedule: Schedule, fast: bool) -> None:
    (searched, numbers), (tabled, others) = derived(schedule, None), derived(schedule, fast)
    for one, other in ((searched.parts, tabled.parts), (searched.reads, tabled.reads)):
        for column, same in zip(one, other, strict=True):
            assert column.tolist() == same.tolist()
    assert numbers.tolist() == others.tolist()


@settings(max_examples=60)
@given(either)
def test_tables_find_what_searches_find(schedule: Schedule) -> None:
    assert_same(schedule, fast=False)


@pytest.mark.parametrize("dataflow", ["rotate-kv", "rotate-kv-back"])
def test_machine_code_finds_the_same(dataflow: str) -> None:
    options = AttentionOptions("both", dataflow=dataflow)  # type: ignore[arg-type]
    layer = Workload(240, heads=4, kv_heads=2, head_dim=4, mask="causal")
    for schedule in build_schedules("tasp", full_mesh(5), layer, options=options):
        assert_same(schedule, fast=True)


@given(either)
def test_numbers_of_edges_are_the_edges_each_once(schedule: Schedule) -> None:
    """Without messages of several blocks, and in an order of their own."""
    copies, numbers = derived(schedule, None, apart=True)
    _, calls = operations_of(schedule, schedule.steps)
    in_order = compute_in_order(calls, schedule.transfers)
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
