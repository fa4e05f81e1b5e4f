"""Arrays of any dtype in any memory: a schedule is what its numbers are, or it is refused in one line."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.arrays import frozen
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TaspLabError, WorkloadError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Blocks, Field, Pool
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.composition import replicated
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import all_blocks, own_blocks
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.schedules.collectives.all_gather import (
    RingSteps,
    direct_all_gather,
    multi_ring_all_gather,
    ring_all_gather,
)
from tasp_lab.schedules.collectives.ring_reductions import ring_reduce_scatter
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span, contiguous
from tests.support import dtypes
from tests.support.dtypes import DTYPES, NAMES, REFUSED, RIGHT, WRONG_DTYPES

few = settings(max_examples=2, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@few
@given(draw=st.randoms(use_true_random=False), large=st.booleans())
def test_a_schedule_in_other_dtypes_is_the_same(name: str, draw: random.Random, large: bool) -> None:
    for schedule in dtypes.built(name, 8 if large and ":" not in name else 4):
        assert dtypes.judge(schedule, list(schedule.steps), draw) == (True, RIGHT)
        accepted, verdict = dtypes.judge(schedule, dtypes.mutated(schedule, draw), draw)
        assert verdict == (RIGHT if accepted else REFUSED)


@pytest.mark.parametrize("name", ["ring-reduce-scatter", "tasp", "lasp-2"])
@few
@given(draw=st.randoms(use_true_random=False), dtype=st.sampled_from(WRONG_DTYPES))
def test_a_column_that_has_no_whole_numbers_is_refused(name: str, draw: random.Random, dtype: str) -> None:
    schedule = dtypes.built(name, 4)[0]
    spoilt, seen = draw.randrange(12), 0

    def cast(values: Any, draw: random.Random) -> Any:
        nonlocal seen
        seen += 1
        return values.astype(dtype) if seen == spoilt + 1 else values

    assert dtypes.judge(schedule, list(schedule.steps), draw, cast) == (True, REFUSED)


def gather(dtype: str, n: int = 11, per: int = 4) -> Schedule:
    """An AllGather around a ring in which the product of a rank and a block has no room in 8 bits."""
    own, source, place = np.repeat(np.eye(n, dtype=bool), per, axis=1), np.repeat(np.arange(n), per), np.arange(n * per)
    steps = []
    for k in range(n - 1):
        block = (source - k) % n * per + place % per
        steps.append(Step(*(each.astype(dtype) for each in (source, (source + 1) % n, 0 * source, block))))
    return Schedule("gather", n, 1, Blocks.of_data(np.full(n * per, 8, dtype=dtype)), own, np.ones_like(own), steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_do_not_wrap_around(dtype: str) -> None:
    assert gather(dtype).digest == gather("i8").digest
    assert gather(dtype).bytes_by_rank().tolist() == [10 * 4 * 8] * 11


def late_sums(dtype: str, *, at_once: bool, n: int = 12, length: int = 8) -> Schedule:
    """Each rank computes the results of the next one, and sends them home after the last tile; or beside it on rank 9.

    The product of rank 9 and a block has no room in 8 bits.
    """
    ranks, layer = (
        np.arange(n),
        Workload(sequence=n * length, heads=2, kv_heads=2, head_dim=8, dtype="fp32", mask="full"),
    )
    columns = {"tensor": np.repeat([KEYS, QUERIES, RESULTS], n), "owner": np.tile(ranks, 3)}
    places = {"start": np.tile(ranks * length, 3), "count": np.full(3 * n, length)}
    task = AttentionTask(layer, contiguous(layer.sequence, n), **columns, **places)
    keys, queries, results = (task.blocks_of(each) for each in (KEYS, QUERIES, RESULTS))

    def step(rows: Sequence[tuple[int, ...]], calls: Sequence[tuple[int, int]] = ()) -> Step:
        table = np.array([(*row, 0)[:5] for row in rows], dtype=np.int64).reshape(-1, 5).T
        band = (1 - length, length - 1)
        called = [(rank, [[int(queries[(rank + 1) % n])], [key]], band) for rank, key in calls]
        columns = (each.astype(dtype) for each in table[:4])
        return Step(*columns, table[4].astype(bool), (Calls.of("attend", called),) if called else ())

    everyone = [(r, to, 0, block) for r in range(n) for to in range(n) if r != to for block in (keys[r], queries[r])]
    home = [(rank, (rank + 1) % n, 0, results[(rank + 1) % n], True) for rank in range(n)]
    late = [(rank, int(keys[-1])) for rank in range(n)]
    steps = [step(everyone), step([], [(rank, int(key)) for rank in range(n) for key in keys[:-1]])]
    if at_once:
        steps.append(step([], [each for each in late if each[0] != 9]))
        steps.append(step([home[9]], [late[9]]))
    else:
        steps.append(step([], late))
    steps.append(step(home[:9] + home[10:] if at_once else home))
    kept = task.owned()
    kept[:, keys] = kept[:, queries] = True
    start, end = task.owned(KEYS, QUERIES), task.owned(RESULTS)
    return Schedule("late", n, 1, task.blocks({}, ()), start, end, steps, task, kept=kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_while_it_is_sent_is_refused_in_every_dtype(dtype: str) -> None:
    assert late_sums(dtype, at_once=False).transfers == 12 * 11 * 2 + 12
    with pytest.raises(ScheduleError, match=r"rank 9 computes parts of block 34 .*sent or read at the same step"):
        late_sums(dtype, at_once=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.array([2**63], dtype=np.uint64),
            "^rows has 9223372036854775808, expected -9223372036854775808 to 92233720",
        ),
        (np.array([1.0]), "^rows is of float64, expected whole numbers$"),
        (np.array([True]), "^rows is of bool, expected whole numbers$"),
        (np.array([1], dtype=object), "^rows is of object, expected whole numbers$"),
        (np.array([1], dtype="m8[s]"), r"^rows is of timedelta64\[s\], expected whole numbers$"),
        (np.ma.masked_array([1], [True]), "^rows: masked_array.* expected rows$"),
        (np.array([[1]]), r"^rows: array\(\[\[1\]\]\) of type ndarray, expected rows$"),
        ([1], r"^rows: \[1\] of type list, expected rows$"),
    ],
)
def test_what_has_no_whole_numbers_is_refused(values: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        frozen("rows", values, np.int64, 1, "rows")


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 127), max_size=6), st.booleans())
def test_a_frozen_array_has_its_own_memory(dtype: str, numbers: list[int], broadcast: bool) -> None:
    base = np.array(numbers, dtype=dtype)
    kept = frozen("rows", np.broadcast_to(base, (3, len(base))) if broadcast else base, np.int64, None, "rows")
    base += 1 if base.size else 0
    assert kept.dtype == np.int64
    assert kept.reshape(-1).tolist() == numbers * (3 if broadcast else 1)
    assert frozen("rows", kept, np.int64, None, "rows") is kept
    with pytest.raises(ValueError, match="WRITEABLE"):
        kept.flags.writeable = True


def test_views_of_what_ranks_hold_are_kept_as_they_are() -> None:
    """In a world of 512 ranks the written-out tables would have 134 million entries each."""
    for table in (own_blocks(512, 511), all_blocks(512, 512 * 511)):
        assert np.shares_memory(frozen("held", table, np.bool_, 2, "a table"), table) or 0 in table.strides
        assert frozen("held", table, np.bool_, 2, "a table").base is not None


CHANGES: dict[str, Callable[[Schedule], Any]] = {
    "a step's source": lambda schedule: schedule.steps[0].source,
    "a step's gives": lambda schedule: schedule.steps[0].gives,
    "sizes": lambda schedule: schedule.blocks.bytes,
    "sizes at home": lambda schedule: schedule.blocks.home_bytes,
    "buffers": lambda schedule: schedule.blocks.buffers,
    "initial": lambda schedule: schedule.initial,
    "final": lambda schedule: schedule.final,
    "initial_part": lambda schedule: schedule.initial_part,
}


@pytest.mark.parametrize("what", CHANGES)
def test_no_array_of_a_schedule_can_be_written_to(what: str) -> None:
    for schedule in (
        ring_reduce_scatter(full_mesh(4), 8),
        dtypes.rebuilt(scatter(), list(scatter().steps), random.Random(0)),
    ):
        values = CHANGES[what](schedule)
        with pytest.raises(ValueError, match="WRITEABLE"):
            values.flags.writeable = True


def scatter() -> Schedule:
    return ring_reduce_scatter(full_mesh(4), 8)


def test_the_arrays_of_the_caller_stay_as_they_are() -> None:
    """They may be written to before and after, and the schedule does not change."""
    rows = np.zeros((5, 2), dtype=np.int64)
    rows[:4] = [[0, 1], [1, 0], [0, 0], [0, 1]]
    gives, own, everything = np.zeros(2, dtype=bool), np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)
    sizes = np.array([4, 4])
    schedule = Schedule("swap", 2, 1, Blocks.of_data(sizes), own, everything, [Step(*rows[:4], gives)], kept=own)
    digest = schedule.digest
    for values in (rows, gives, own, everything, sizes):
        values[:] = 0
    del schedule.__dict__["digest"]
    assert schedule.digest == digest


def test_a_list_of_steps_may_change_afterwards() -> None:
    steps = list(scatter().steps)
    schedule = replace(scatter(), steps=steps)
    steps.clear()
    assert len(schedule.steps) == 3
    operands = [BlockLists.of([[0]])]
    calls = Calls("attend", np.array([0]), operands, np.zeros((1, 0), dtype=np.int64))  # type: ignore[arg-type]
    operands.clear()
    assert len(calls.operands) == 1


def test_numbers_of_a_schedule_are_of_any_whole_type() -> None:
    step, own = Step.of([(0, 1, 0, 0), (1, 0, 0, 1)]), np.eye(2, dtype=bool)
    schedule = Schedule("s", np.int8(2), np.uint8(1), Blocks.of_data(np.array([4, 4])), own, np.ones_like(own), [step])  # type: ignore[arg-type]
    assert (type(schedule.world_size), type(schedule.lanes)) == (int, int)
    assert Field("x", "fp32", (np.int8(100), np.int8(100))).element_count == 10_000  # type: ignore[arg-type]
    assert type(Pool("keys", np.int8(3)).buffers) is int  # type: ignore[arg-type]
    assert Span(np.int8(100), np.int8(1), np.int8(100)).positions_end == 200  # type: ignore[arg-type]
    assert len(RingSteps(np.array([range(9)], dtype=np.int8), np.int8(100))) == 800  # type: ignore[arg-type]
    for gather in (ring_all_gather, multi_ring_all_gather, direct_all_gather):
        assert gather(full_mesh(4), np.int8(100)).digest == gather(full_mesh(4), 100).digest  # type: ignore[operator]
    assert Blocks.of_sums(np.array([8], dtype=np.int8), 200).parts.tolist() == [200]


REFUSALS: dict[str, tuple[Callable[[], object], type[TaspLabError]]] = {
    "gives of numbers": (lambda: Step(*np.zeros((5, 2), dtype=np.int64)), ScheduleError),  # type: ignore[arg-type]
    "a rank that is a flag": (lambda: Step.of([(True, 0, 0, 0)]), ScheduleError),
    "a rank of a call that is no whole number": (lambda: Calls.of("attend", [(0.5, [[0]], [])]), ScheduleError),  # type: ignore[list-item]
    "a block of a call that is no whole number": (lambda: BlockLists.of([[0, 1.5]]), ScheduleError),  # type: ignore[list-item]
    "half a byte": (lambda: ring_all_gather(full_mesh(4), 8.5), ScheduleError),  # type: ignore[arg-type]
    "half a byte in one step": (lambda: direct_all_gather(full_mesh(4), 8.5), ScheduleError),  # type: ignore[arg-type]
    "half a part": (lambda: Blocks.of_sums(np.array([8]), 2.5), ScheduleError),  # type: ignore[arg-type]
    "half a lane": (lambda: replace(scatter(), lanes=1.5), ScheduleError),
    "more lanes than keys have room for": (lambda: replace(scatter(), lanes=2**62), ScheduleError),
    "a flag of lanes": (lambda: replace(scatter(), lanes=True), ScheduleError),
    "half a rank of a ring": (lambda: ring_all_gather(full_mesh(3), 8, np.array([[0, 1.5, 2]])), ScheduleError),  # type: ignore[arg-type]
    "half a rank of a group": (lambda: replicated(scatter(), np.array([[0, 1, 2, 3.5]])), ScheduleError),  # type: ignore[arg-type]
    "a rank beyond 32 bits": (
        lambda: Decomposition(full_mesh(3), np.array([[2**32, 1, 2]]), 1, "wrong"), NoDecompositionError),
    "half a rank of a decomposition": (
        lambda: Decomposition(full_mesh(3), np.array([[0.5, 1, 2]]), 1, "wrong"), NoDecompositionError),
    "half a position": (lambda: SequenceLayout("wrong", 4, ((Span(0, 1, 4.5),),)), WorkloadError),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_numbers_that_are_not_whole_are_refused_in_one_line(what: str) -> None:
    make, error = REFUSALS[what]
    with pytest.raises(error) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_all_tables_of_a_schedule_are_covered() -> None:
    """Whoever adds an array to a schedule adds it to `rebuilt`, too."""
    arrays = {"initial", "final", "initial_part", "kept"}
    assert {each.name for each in fields(Schedule) if each.init and "Array" in str(each.type)} == arrays
