"""Blocks that are sums: what the proof accepts, when transfers start, and what real ranks end up with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.executor import Executor
from runtime.trials.in_process import InProcess, Mailboxes, run_in_process
from runtime.trials.patterns import expected_sums, fill_with_parts, verify_sums
from sim.array.engine import run
from sim.event.engine import simulate
from tasp_lab.arrays import BoolArray
from tasp_lab.collectives.ring_reductions import ring_all_reduce
from tasp_lab.errors import RunError, ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.buffer_layout import memory_bytes, rank_part
from tasp_lab.schedule.reduction import Reduction
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.units import Number
from tests.support.strategies import exact_bandwidths, exact_latencies

Row = tuple[int, int, int, int]
"""Source, destination, lane and block."""


@dataclass(frozen=True)
class Case:
    """A reduction that may be wrong: the rows of each step, and from which step on each block is copied."""

    initial: BoolArray
    final: BoolArray
    steps: tuple[tuple[Row, ...], ...]
    first_copy_step: tuple[int, ...]
    block_bytes: tuple[int, ...]

    def schedule(self) -> Schedule:
        return Schedule(
            name="drawn",
            world_size=len(self.initial),
            lanes=LANES,
            block_bytes=np.array(self.block_bytes),
            initial=self.initial.copy(),
            final=self.final.copy(),
            steps=[Step.of(rows) for rows in self.steps],
            reduction=Reduction(np.array(self.first_copy_step)),
        )


LANES = 3


@st.composite
def reductions(draw: st.DrawFn) -> Case:
    """Every sum is gathered along a tree that is drawn, by some of the ranks, and copied along another to some."""
    ranks, blocks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    initial, final = np.zeros((ranks, blocks), dtype=bool), np.zeros((ranks, blocks), dtype=bool)
    rows: dict[int, list[Row]] = defaultdict(list)
    first_copy_step = []
    for block in range(blocks):
        having = draw(st.lists(st.integers(0, ranks - 1), unique=True, min_size=1))
        initial[having, block] = True
        ready = dict.fromkeys(having, 0)
        while len(having) > 1:
            giver = having.pop(draw(st.integers(0, len(having) - 1)))
            taker, step = draw(st.sampled_from(having)), ready[giver] + draw(st.integers(0, 2))
            rows[step].append((giver, taker, draw(st.integers(0, LANES - 1)), block))
            ready[taker] = max(ready[taker], step + 1)
        ready = {having[0]: ready[having[0]] + draw(st.integers(0, 2))}
        first_copy_step.append(ready[having[0]])
        for rank in draw(st.lists(st.sampled_from([r for r in range(ranks) if r not in having]), unique=True)):
            source = draw(st.sampled_from(sorted(ready)))
            step = ready[source] + draw(st.integers(0, 1))
            rows[step].append((source, rank, draw(st.integers(0, LANES - 1)), block))
            ready[rank] = step + 1
        final[list(ready), block] = True
    steps = tuple(tuple(draw(st.permutations(rows[index]))) for index in range(max(rows, default=-1) + 1))
    sizes = draw(st.lists(st.integers(1, 40), min_size=blocks, max_size=blocks))
    return Case(initial, final, steps, tuple(first_copy_step), tuple(sizes))


@st.composite
def spoilt(draw: st.DrawFn, case: Case) -> Case:
    """One thing is changed, which may or may not make it wrong."""
    ranks, blocks = case.initial.shape
    what = draw(st.sampled_from(["final", "initial", "copied from", "rows"]))
    if what in ("final", "initial"):
        values: BoolArray = getattr(case, what).copy()
        values[draw(st.integers(0, ranks - 1)), draw(st.integers(0, blocks - 1))] ^= True
        changes: dict[str, Any] = {what: values}
        return replace(case, **changes)
    if what == "copied from":
        changed = list(case.first_copy_step)
        changed[draw(st.integers(0, blocks - 1))] += draw(st.sampled_from([-2, -1, 1, 2]))
        return replace(case, first_copy_step=tuple(changed))
    steps = [list(rows) for rows in case.steps] or [[]]
    index = draw(st.integers(0, len(steps) - 1))
    if steps[index]:
        row = steps[index][draw(st.integers(0, len(steps[index]) - 1))]
        if draw(st.booleans()):
            steps[index].remove(row)
        rank = draw(st.integers(0, ranks - 1))
        changed_row = draw(st.sampled_from([row, (rank, *row[1:]), (row[0], rank, *row[2:])]))
        if draw(st.booleans()):
            steps[draw(st.integers(0, len(steps) - 1))].append(changed_row)
    return replace(case, steps=tuple(map(tuple, steps)))


def is_right(case: Case) -> bool:
    """The rules, followed with sets of ranks."""
    ranks, blocks = case.initial.shape
    has = {(r, b): {r} if case.initial[r, b] else set() for r in range(ranks) for b in range(blocks)}
    whole = [set(np.flatnonzero(case.initial[:, b]).tolist()) for b in range(blocks)]
    if not all(whole):
        return False
    for index, rows in enumerate(case.steps):
        added = [row for row in rows if index < case.first_copy_step[row[3]]]
        copied = [row for row in rows if index >= case.first_copy_step[row[3]]]
        if any(source == destination for source, destination, _, _ in rows):
            return False
        if any(has[s, b] != whole[b] or has[d, b] for s, d, _, b in copied):
            return False
        if len({(d, b) for _, d, _, b in copied}) < len(copied) or len({(s, b) for s, _, _, b in added}) < len(added):
            return False
        given = [has[s, b] for s, _, _, b in added]
        has |= {(s, b): set[int]() for s, _, _, b in added}
        if not all(given) or not all(has[d, b] for _, d, _, b in added):
            return False
        for (_, d, _, b), parts in zip(added, given, strict=True):
            assert not has[d, b] & parts, "parts are at one rank at a time"
            has[d, b] = has[d, b] | parts
        has |= {(d, b): whole[b] for _, d, _, b in copied}
    return all(has[r, b] == (whole[b] if case.final[r, b] else set()) for r in range(ranks) for b in range(blocks))


@given(reductions())
def test_every_tree_of_sums_is_accepted(case: Case) -> None:
    assert is_right(case)
    assert case.schedule().transfers == sum(map(len, case.steps))


@settings(max_examples=250)
@given(reductions().flatmap(spoilt))
def test_the_proof_refuses_what_sets_of_parts_refuse(case: Case) -> None:
    if is_right(case):
        case.schedule()
    else:
        with pytest.raises(ScheduleError):
            case.schedule()


@given(reductions(), exact_bandwidths, exact_latencies, st.sampled_from([full_mesh, switch]))
def test_a_transfer_starts_when_its_lane_is_free_and_all_that_came_before_it_is_there(
    case: Case, bandwidth: Fraction, latency: Fraction, build: Callable[..., Topology]
) -> None:
    """Not later, and not earlier: a part that comes at a later step, or at the same one, is not waited for."""
    topology = build(len(case.initial), bandwidth, latency)
    events = {(e.step, e.rank, e.peer, e.lane, e.block): e for e in simulate(case.schedule(), Machine(topology)).events}
    left: dict[tuple[int, int], Number] = {}
    for step, rows in enumerate(case.steps):
        for source, destination, lane, block in rows:
            event = events[step, source, destination, lane, block]
            came = [e.end_s for e in events.values() if (e.peer, e.block) == (source, block) and e.step < step]
            assert event.start_s == max([0, left.get((source, lane), 0), *came])
            left[source, lane] = event.end_s - latency


@settings(max_examples=50)
@given(reductions(), exact_bandwidths, exact_latencies, st.sampled_from([full_mesh, switch]))
def test_both_engines_agree(case: Case, bandwidth: Fraction, latency: Fraction, build: Callable[..., Topology]) -> None:
    machine, schedule = Machine(build(len(case.initial), float(bandwidth), float(latency))), case.schedule()
    assert run(schedule, machine).time_s == pytest.approx(simulate(schedule, machine).time_s, rel=1e-9)


@settings(max_examples=60)
@given(reductions(), st.integers(0, 5), st.booleans())
def test_every_rank_ends_with_the_sums_it_must_have(case: Case, receives_ahead: int, whole_steps: bool) -> None:
    """The executor checks every bit; the timeline has every transfer once."""
    timeline = run_in_process(case.schedule(), receives_ahead, whole_steps)
    found = sorted((event.step, event.rank, event.peer, event.lane, event.block) for event in timeline.events)
    assert found == sorted((index, s, d, lane, b) for index, rows in enumerate(case.steps) for s, d, lane, b in rows)


@given(reductions())
def test_what_comes_to_be_added_has_a_place_of_its_own(case: Case) -> None:
    """Nothing arrives where anything else lies or arrives, but a copy, where the rank's own part has been."""
    schedule = case.schedule()
    for rank, size_bytes in enumerate(memory_bytes(schedule).tolist()):
        part = rank_part(schedule, rank)
        assert part.memory_bytes == size_bytes
        taken = [(row.offset, row.block) for row in part.receives]
        taken += [(part.kept[block], block) for block in range(len(case.block_bytes)) if block in part.kept]
        spans = sorted({(offset, offset + case.block_bytes[block]) for offset, block in taken})
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        adding = [row for row in part.receives if row.step < case.first_copy_step[row.block]]
        assert sorted(row.offset for row in adding) == sorted(
            at for each in part.staging_offsets.values() for at in each
        )


def schedule_of(steps: Sequence[Sequence[Row]], first_copy_step: int = 9, final: Sequence[int] = (2,)) -> Schedule:
    """One block that three ranks have parts of."""
    everybody = np.ones((3, 1), dtype=bool)
    in_the_end = np.isin(np.arange(3), final)[:, None]
    return Case(everybody, in_the_end, tuple(map(tuple, steps)), (first_copy_step,), (8,)).schedule()


@pytest.mark.parametrize(
    ("steps", "first_copy_step", "told"),
    [
        ([[(0, 1, 0, 0)]], 9, "after the last step: rank 1 has 2 of the 3 parts of block 0, expected none"),
        ([[(0, 2, 0, 0)], [(0, 2, 0, 0)]], 9, "step 1: .* on lane 0: rank 0 holds no part of this sum when the step"),
        ([[(0, 2, 0, 0), (0, 1, 1, 0)]], 9, "step 0: .*: rank 0 sends this sum twice at this step"),
        ([[(0, 1, 0, 0), (1, 2, 0, 0)]], 9, "step 0: rank 0 .* to rank 1 .*: rank 1 holds no part of this sum to add"),
        ([[(0, 1, 0, 0)]], 0, "step 0: .*: rank 0 does not have the complete sum when the step begins"),
        ([[(0, 2, 0, 0), (1, 2, 1, 0)], [(2, 0, 0, 0)], [(2, 0, 0, 0)]], 1, "step 2: .*: rank 0 already holds a p"),
        ([[(0, 2, 0, 0), (1, 2, 1, 0)], [(2, 0, 0, 0), (2, 0, 1, 0)]], 1, "step 1: .*: rank 0 receives this sum twice"),
    ],
)
def test_what_breaks_a_rule_is_named(steps: list[list[Row]], first_copy_step: int, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        schedule_of(steps, first_copy_step)


def test_sums_of_nothing_in_buffers_and_of_other_blocks_are_refused() -> None:
    right = schedule_of([[(0, 2, 0, 0), (1, 2, 1, 0)]])
    with pytest.raises(ScheduleError, match="no rank holds a part of block 0 at the start"):
        replace(right, initial=np.zeros((3, 1), dtype=bool))
    with pytest.raises(ScheduleError, match="'drawn': a reduction with buffers or a task, expected neither"):
        replace(right, buffers=2)
    with pytest.raises(ScheduleError, match="a reduction of 2 blocks in a schedule that has 1"):
        replace(right, reduction=Reduction(np.array([1, 1])))


def test_when_sums_are_copied_is_part_of_what_a_schedule_is() -> None:
    one, other = (schedule_of([[(0, 2, 0, 0), (1, 2, 1, 0)]], first_copy_step) for first_copy_step in (1, 2))
    assert one.digest != other.digest


def test_a_wrong_sum_is_noticed() -> None:
    executor = Executor(ring_all_reduce(full_mesh(2), 100), 1, InProcess(1, Mailboxes(), 1.0))
    fill_with_parts(executor)
    with pytest.raises(RunError, match="rank 1: block 0 is not the sum of its parts"):
        verify_sums(executor, expected_sums(executor))
