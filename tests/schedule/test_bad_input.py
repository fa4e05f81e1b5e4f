"""What no schedule can be: one line that says what, where, and what was expected, before any memory is taken."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated, stacked
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.systems import lasp2, token_ring, ulysses

KERNELS = "make_state, attend, attend_by_state, fold, advance, combine, apply_state"
LAYER = Workload(16, heads=4, head_dim=4, mask="causal")
SYSTEMS: dict[str, Callable[[Topology, Workload], Schedule]] = {
    "token-ring": token_ring,
    "ulysses": ulysses,
    "lasp2": lasp2,
}


def assert_refused(message: str, make: Callable[[], object], largest_bytes: int = 10_000_000) -> None:
    """A refusal in one line, without arrays of the size of what is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=message) as refusal:
            make()
        assert tracemalloc.get_traced_memory()[1] < largest_bytes
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value)


def with_first_calls(name: str, change: Callable[[Calls], Calls]) -> Schedule:
    """A schedule whose first calls are changed."""
    schedule = SYSTEMS[name](full_mesh(4), LAYER)
    steps = list(schedule.steps)
    at = next(index for index, step in enumerate(steps) if step.calls)
    steps[at] = replace(steps[at], calls=tuple(map(change, steps[at].calls)))
    return replace(schedule, steps=steps)


def reading(calls: Calls, *operands: list[int]) -> Calls:
    """The calls with other operands, the same for all of them."""
    return replace(calls, operands=tuple(BlockLists.of([each] * len(calls)) for each in operands))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token-ring", "'attend'"), ("ulysses", "'attend'"), ("lasp2", f"one of {KERNELS}")],
)
def test_a_call_of_an_unknown_kernel(name: str, expected: str) -> None:
    message = rf"^step \d: unknown kernel 'atend', expected {expected}$"
    assert_refused(message, lambda: with_first_calls(name, lambda calls: replace(calls, kernel="atend")))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token-ring", lambda calls: replace(calls, operands=calls.operands[::-1]),
         r"^step 0: rank 0 attends with block 0 \(keys\), expected queries$"),
        ("ulysses", lambda calls: replace(calls, operands=calls.operands[:1]),
         "^step 1: attend takes queries, keys and a band of two parameters$"),
        ("lasp2", lambda calls: reading(calls, [4]), "^step 0: rank 1 computes with block 4 .*it does not hold"),
        ("token-ring", lambda calls: reading(calls, [], []), "^step 0: rank 0 attends without queries$"),
        ("token-ring", lambda calls: reading(calls, [-1], [0]), "^step 0: rank 0 computes with block -1, there are 24"),
        ("lasp2", lambda calls: reading(calls, [10**9]), "^step 0: rank 0 computes with block 1000000000, there"),
        ("lasp2", lambda calls: replace(calls, params=np.zeros((len(calls), 3), dtype=np.int64)),
         "^step 0: make_state takes keys, and 0 parameters$"),
        ("token-ring", lambda calls: replace(calls, params=np.full_like(calls.params, 2**62)),
         r"^step 0: rank 0 attends with queries 8 to keys 0 in the band 4611686018427387904 to 1, the mask is 0 to 1$"),
        ("ulysses", lambda calls: replace(calls, rank=calls.rank + 4), "^step 1: rank 4 computes, there are 4 ranks$"),
        ("ulysses", lambda calls: replace(calls, rank=calls.rank / 2), "^calls of attend: rank is of float64, exp"),
        ("ulysses", lambda calls: replace(calls, lane=-1), "^calls of attend on compute lane -1, expected 0 or more$"),
        ("token-ring",
         lambda calls: replace(calls, operands=(BlockLists(calls.operands[0].offset + 1, calls.operands[0].block),)),
         "^calls of attend: lists of operand 0 from 1 to 9, expected lists one after another, from 0 to 8$"),
    ],
)  # fmt: skip
def test_operands_of_the_wrong_kind(name: str, change: Callable[[Calls], Calls], message: str) -> None:
    assert_refused(message, lambda: with_first_calls(name, change))


def test_an_end_that_nobody_can_reach() -> None:
    gather = ring_all_gather(full_mesh(4), 8)
    nowhere, everywhere = np.zeros((4, 4), dtype=np.bool_), np.ones((4, 4), dtype=np.bool_)
    for message, make in (
        ("^without any step: rank 0 never received block 0$", lambda: replace(gather, initial=nowhere, steps=[])),
        ("^schedule 'ring': final is of int64, expected bool$",
         lambda: replace(gather, final=everywhere.astype(np.int64))),
        (r"^schedule 'ring': kept has the shape \(4, 5\), expected \(4, 4\)$",
         lambda: replace(gather, kept=np.ones((4, 5), dtype=np.bool_))),
    ):  # fmt: skip
        assert_refused(message, make)


def test_a_copy_that_stays_for_several_reasons_lies_in_one_place() -> None:
    """Whether it is there at the start, promised, kept, of a kind without a pool, or all of this, it is one copy."""
    gather = ring_all_gather(full_mesh(3), 64)
    pooled = replace(gather.blocks, kinds=[Kind("data", pool=Pool("some", 2))])
    everywhere = np.ones_like(gather.final)
    plain = replace(gather, blocks=pooled, steps=list(gather.steps))
    twice = replace(plain, kept=everywhere, steps=list(gather.steps))
    thrice = replace(gather, kept=everywhere, steps=list(gather.steps))
    for schedule in (plain, twice, thrice):
        assert (memory_bytes(schedule) == 3 * 64).all()
        for rank in range(3):
            places = sorted(rank_part(schedule, rank).resident.values())
            assert places == [0, 64, 128]
            assert {row.since for row in rank_part(schedule, rank).sends} == {RESIDENT}


@pytest.mark.parametrize("buffers", [1, 0, -3, 2.5, "2", None])
def test_a_pool_that_is_too_small_or_no_number(buffers: object) -> None:
    assert_refused(f"^pool 'keys': {buffers} buffers, expected 2 or more$", lambda: Pool("keys", buffers))  # type: ignore[arg-type]


def test_more_than_can_be_counted_or_replayed() -> None:
    one = np.ones((1, 1), dtype=np.bool_)
    gather = ring_all_gather(full_mesh(64), 2**30)
    for message, make in (
        ("^block 0 has too few or too many parts, expected 1 to 2147483647$",
         lambda: Blocks.of_sums(np.array([8]), 2**31)),
        (r"^blocks of 9\.22e\+18 bytes in all, expected less than 2\*\*63$",
         lambda: Blocks.of_data(np.array([2**62, 2**62]))),
        ("^schedule 'ring in 16777216 chunks': 64 ranks and 1073741824 blocks are too many to replay, expected at most",
         lambda: in_chunks(gather, 2**24)),
        ("^schedule '100000 x ring': 6400000 ranks and 6400000 blocks are too many to replay",
         lambda: replicated(gather, np.broadcast_to(np.zeros(1, dtype=np.int64), (100_000, 64)))),
        ("^schedule 'none' is for 0 ranks, expected 1 or more$",
         lambda: Schedule("none", 0, 1, Blocks.of_data(np.array([8])), one[:0], one[:0].copy(), [])),
    ):  # fmt: skip
        assert_refused(message, make)


def test_two_levels_of_too_many_ranks() -> None:
    level = ring_all_gather(full_mesh(256), 2**16)
    message = "^schedule 'ring over ring': 65536 ranks and 65536 blocks are too many to replay, expected at most"
    assert_refused(message, lambda: over_groups(level, level))


def test_schedules_of_different_world_sizes() -> None:
    few, many = ring_all_gather(full_mesh(3), 8), ring_all_gather(full_mesh(4), 8)
    layers = ulysses(full_mesh(2), LAYER), ulysses(full_mesh(4), LAYER)
    assert_refused("^schedule 'ring' is for 4 ranks, 'ring' for 3$", lambda: in_sequence(few, many))
    assert_refused("^schedule 'ulysses' is for 4 ranks, 'ulysses' for 2$", lambda: stacked(layers))
    assert_refused(r"^schedule 'ring' in groups of shape \(1, 4\), expected \(groups, 3\)$",
                   lambda: replicated(few, np.arange(4)[None]))  # fmt: skip
    assert_refused("^schedule 'ring' in no groups, expected one or more$", lambda: replicated(few, np.zeros((0, 3))))
    assert_refused(r"^schedule 'ring': initial has the shape \(3, 3\), expected \(4, 3\)$",
                   lambda: replace(few, world_size=4))  # fmt: skip


def test_steps_of_what_are_no_numbers() -> None:
    assert_refused("^a step's source is of float64, expected whole numbers$", lambda: Step(*np.zeros((4, 2))))
