"""Ranks in a grid: bytes in rows and columns, FLOPs, calls. Proven on construction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedules_of
from tasp_lab.topology.builders import full_mesh, nodes, ring, torus
from tasp_lab.workload.layer import Workload
from tests.support.links import without_links
from tests.support.routes import direct
from tests.support.schedules import bytes_between, task_of
from tests.support.systems import passes_of

SPLITS = [(2, 2), (2, 4), (4, 2), (3, 3), (1, 3), (3, 1)]
GATHERS = [each for each in schedules_of("AllGather") if each != "direct"]


def named(split: tuple[int, int], gather: str = "") -> str:
    return "grid:{}x{}".format(*split) + (f":{gather}" if gather else "")


def at_steps(schedule: Schedule) -> tuple[IntArray, IntArray, IntArray]:
    """The bytes that each rank sends before the step with calls, at it and after it, int arrays (world_size,)."""
    sent = schedule.bytes_sent().sum(axis=2)
    calls = next(index for index, step in enumerate(schedule.steps) if step.calls)
    return sent[:calls].sum(axis=0), sent[calls], sent[calls + 1 :].sum(axis=0)


def positions_of(schedule: Schedule, blocks: IntArray) -> list[int]:
    """The positions of blocks, one after another."""
    task = task_of(schedule)
    stride = task.layout.stride
    return [int(task.start[block] + stride * at) for block in blocks for at in range(task.count[block])]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("split", SPLITS)
def test_queries_and_results_move_in_rows_and_keys_in_columns(split: tuple[int, int], kv_heads: int) -> None:
    (rows, columns), n = split, split[0] * split[1]
    layer = Workload(sequence=3 * n, batch=2, heads=4, kv_heads=kv_heads, head_dim=4, mask="full")
    positions = layer.batch * 3
    q, kv, sums = 2 * positions * 4 * 4, 4 * positions * kv_heads * 4, 4 * positions * 4
    across, down = columns - 1, rows - 1
    for dtype, size in (("auto", 1), ("fp32", 2)):  # in 16 or 32 bit on the wire
        forward, backward = passes_of(named(split), full_mesh(n), layer, result_dtype=dtype, gradient_dtype=dtype)
        there, home = across * q + down * kv, across * (size * q + sums)
        assert [each.tolist() for each in at_steps(forward)] == [[there] * n, [0] * n, [home] * n]
        there, home = across * (2 * q + 2 * sums), size * (across * q + down * kv)
        assert [each.tolist() for each in at_steps(backward)] == [[there] * n, [0] * n, [home] * n]
    for schedule in (forward, backward):
        for step in schedule.steps:
            in_row = step.lane % (rows + columns - 2) < columns - 1
            assert ((step.source // columns == step.destination // columns) == in_row).all()
            assert ((step.source % columns == step.destination % columns) == ~in_row).all()


@pytest.mark.parametrize("split", [(2, 2), (3, 2), (2, 4)])
def test_a_block_goes_only_to_ranks_whose_mask_needs_it(split: tuple[int, int]) -> None:
    """The pairs of ranks and half shards that a causal mask leaves, counted chunk by chunk."""
    (_, columns), n = split, split[0] * split[1]
    layer = Workload(sequence=2 * n, heads=1, head_dim=4, mask="causal")
    chunks = [(rank, chunk) for rank in range(n) for chunk in (rank, 2 * n - 1 - rank)]
    queries, keys = set(), set()
    for q_rank, q in chunks:
        for k_rank, k in chunks:
            user = q_rank // columns * columns + k_rank % columns
            if k <= q:
                queries |= {(user, q)} if user != q_rank else set()
                keys |= {(user, k)} if user != k_rank else set()
    forward, backward = passes_of(named(split), full_mesh(n), layer)
    there, _, home = (each.sum() for each in at_steps(forward))
    assert there == len(queries) * 2 * 4 + len(keys) * 4 * 4
    assert home == len(queries) * (2 * 4 + 4)
    there, _, home = (each.sum() for each in at_steps(backward))
    assert there == len(queries) * (2 * 2 * 4 + 2 * 4)
    assert home == len(queries) * 2 * 4 + len(keys) * 4 * 4


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("split", [(2, 2), (2, 5), (5, 2), (3, 3), (1, 3)])
def test_along_an_all_gather_as_many_bytes_move_over_its_links(
    split: tuple[int, int], kv_heads: int, gather: str
) -> None:
    """Direct bytes; one link of each rank carries them, or all of a row and of a column evenly. Sums are in float32."""
    (rows, columns), n = split, split[0] * split[1]
    layer = Workload(sequence=4 * n, heads=4, kv_heads=kv_heads, head_dim=4, mask="full")
    q, kv, sums = 4 * 2 * 4 * 4, 4 * 4 * kv_heads * 4, 4 * 4 * 4
    across, down, size = columns - 1, rows - 1, 2
    forward, backward = passes_of(named(split, gather), full_mesh(n), layer)
    expected = [
        (forward, across * q + down * kv, across * (size * q + sums)),
        (backward, across * (2 * q + 2 * sums), size * (across * q + down * kv)),
    ]
    for schedule, *sent in expected:
        there, meanwhile, home = at_steps(schedule)
        assert (there == sent[0]).all()
        assert (home == sent[1]).all()
        assert not meanwhile.any()
    row, column = np.divmod(np.arange(n), columns)
    for group, one_way, other_way in ((row, across * q, across * (size * q + sums)), (column, down * kv, 0)):
        sent = bytes_between(forward)[np.equal.outer(group, group) & ~np.eye(n, dtype=bool)].reshape(n, -1)
        others = sent.shape[1]
        if gather != "ring":
            assert (sent == Fraction(one_way + other_way, max(others, 1))).all()
        elif others:
            by_link = [one_way + other_way] if others == 1 else [one_way, other_way]
            assert (np.sort(sent, axis=1) == sorted(by_link + [0] * (others - len(by_link)))).all()


@pytest.mark.parametrize("gather", ["", *GATHERS])
def test_calls_are_those_on_whole_spans(gather: str) -> None:
    layer = Workload(sequence=70, heads=2, head_dim=2, mask="causal", documents=(13, 0, 1, 40, 16), window=23)
    for schedule, ungathered in zip(
        passes_of(named((2, 3), gather), full_mesh(6), layer), passes_of("grid:2x3", full_mesh(6), layer), strict=True
    ):
        (found,), (expected,) = ([each for step in one.steps for each in step.calls] for one in (schedule, ungathered))
        assert found.rank.tolist() == expected.rank.tolist()
        assert found.params.tolist() == expected.params.tolist()
        for cut, whole in zip(found.operands, expected.operands, strict=True):
            for call in range(len(expected)):
                assert positions_of(schedule, cut[call]) == positions_of(ungathered, whole[call])


def test_sums_have_the_requested_dtype_on_their_way() -> None:
    layer = Workload(sequence=24, heads=2, head_dim=4, mask="full")
    q, sums = 4 * 2 * 2 * 4, 4 * 4 * 2
    for dtype, size in (("auto", 2), ("fp32", 2), ("input", 1)):
        forward = passes_of(named((2, 3), "ring"), full_mesh(6), layer, result_dtype=dtype).forward
        assert (at_steps(forward)[2] == 2 * (size * q + sums)).all()


@pytest.mark.parametrize("gather", ["ring", "multi-ring", "trees"])
def test_a_torus_has_the_links_of_rings_in_rows_and_columns(gather: str) -> None:
    """No direct links between all ranks of a row of four; both directions of a ring carry half of the bytes each."""
    layer = Workload(sequence=16 * 12, heads=2, head_dim=4, mask="full")
    forward = passes_of(named((4, 4), gather), torus((4, 4)), layer).forward
    sent = bytes_between(forward)
    links = torus((4, 4)).linked_pairs
    q, kv, sums = 12 * 2 * 2 * 4, 12 * 4 * 2 * 4, 12 * 4 * 2
    assert sent[~links].sum() == 0
    assert sent.sum() == 16 * 3 * (q + kv + 2 * q + sums)
    if gather == "multi-ring":
        row, column = np.divmod(np.arange(16), 4)
        assert (sent[links & np.equal.outer(row, row)] == Fraction(3, 2) * (3 * q + sums)).all()
        assert (sent[links & np.equal.outer(column, column)] == Fraction(3, 2) * kv).all()
    with pytest.raises(ScheduleError, match=r"has no such link"):
        passes_of("grid:4x4", direct(torus((4, 4))), layer)


def test_rows_need_the_same_links() -> None:
    layer = Workload(sequence=24, heads=2, mask="full")
    with pytest.raises(ScheduleError, match=r"schedule 'grid:2x3:ring': .* ranks 3, 4, 5 have other links"):
        passes_of("grid:2x3:ring", without_links(full_mesh(6), ["3>4"]), layer, groups="consecutive")
    with pytest.raises(ScheduleError, match=r"schedule 'grid:2x3:direct': unknown variant 'direct'"):
        passes_of("grid:2x3:direct", full_mesh(6), layer)


def test_links_within_rows_and_columns_suffice() -> None:
    layer = Workload(sequence=24, heads=2, mask="full")
    passes_of("grid:2x3", nodes(2, 3, "switch", "rails"), layer)
    with pytest.raises(ScheduleError, match=r"rank \d sends to rank \d, but ring:4 has no such link"):
        passes_of("grid:2x2", direct(ring(4)), layer)
