"""A rank's memory, byte by byte and step by step, against what its part of a schedule says of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.buffer_layout import OUTSIDE, memory_bytes
from tasp_lab.schedule.dependencies import ARRIVED, RESIDENT, SENT, Dependencies, dependencies
from tasp_lab.schedule.rank_part import SCATTERED, RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.task import KEYS
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes, switch, torus
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_backward import cases_of
from tests.support.kernel_calls import as_arrays, buffers_of, calls_of
from tests.support.schedules import parts, task_of

NAMES = ["ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp"]
TOPOLOGIES = {
    topology.name: topology
    for topology in [*map(full_mesh, range(1, 7)), *map(switch, (3, 5)), nodes(2, 2), nodes(3, 2), torus((3, 3))]
}


@cache
def rings_of(topology: str) -> Decomposition:
    return decompose(TOPOLOGIES[topology])


def built(name: str, topology: str, layer: Workload, *, trim: bool = True, buffers: int = 2) -> Schedule:
    rings = rings_of(topology) if name == "tasp" else None
    return attention(name, TOPOLOGIES[topology], layer, rings, trim=trim, buffers=buffers)


@st.composite
def layers(draw: st.DrawFn) -> Workload:
    sequence = draw(st.integers(1, 40))
    mask = draw(st.sampled_from(["full", "causal", "window"]))
    if mask == "full":
        return Workload(sequence, head_dim=1, dtype="fp32", heads=1, mask="full")
    window = draw(st.integers(1, sequence)) if mask == "window" else None
    return Workload(sequence, head_dim=1, heads=3, mask="causal", window=window)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Attention with two to four buffers, or an AllGather, which keeps all."""
    topology = draw(st.sampled_from(sorted(TOPOLOGIES)))
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from(["ring", "multi-ring"]))
        return collective(name, TOPOLOGIES[topology], draw(st.integers(1, 30)), rings_of(topology))
    name, trim, buffers = draw(st.sampled_from(NAMES)), draw(st.booleans()), draw(st.integers(2, 4))
    return built(name, topology, draw(layers()), trim=trim, buffers=buffers)


every_pass = schedules() | cases_of(st.sampled_from(DATAFLOWS), max_positions=16).map(lambda case: case.backward)
"""Of forward passes and AllGathers, and of backward passes, whose gradients are sums that are made in buffers."""


class Stay(NamedTuple):
    """A thing has [first, end) of a memory from a step to the last that uses it."""

    first: int
    end: int
    comes: int
    last_used: float


def stays(schedule: Schedule, part: RankPart) -> list[Stay]:
    """From the rows alone. Residents are there all the time, and every use is of what came before.

    What comes home of a gradient is used in the step in which it comes: it is added to the rest.
    """
    size, last = schedule.block_bytes.tolist(), defaultdict[tuple[int, int, int], float](float)
    for block, offset in part.resident.items():
        last[block, offset, RESIDENT] = float("inf")
    for row in part.receives:
        if row.since != RESIDENT or row.offset != part.resident[row.block]:
            last[row.block, row.offset, row.step] = row.step
    for call_row in part.calls:
        for place in call_row.adds:
            if place.since != RESIDENT:
                assert place.since == call_row.step
                last[place.block, place.offset, place.since] = call_row.step
    used = [(row.block, row.offset, row.since, row.step) for row in part.sends]
    for call_row in part.calls:
        for operand in call_row.operands:
            offset = operand.offset
            for block, since in zip(operand.blocks, operand.since, strict=True):
                if offset != OUTSIDE:
                    used.append((block, offset, since, call_row.step))
                    offset += size[block]
            assert offset == OUTSIDE or offset == operand.offset + operand.size_bytes
    for block, offset, since, step in used:
        assert (block, offset, since) in last, "what is used has come to its place"
        assert since < step, "and it has come before"
        last[block, offset, since] = max(last[block, offset, since], step)
    return [Stay(offset, offset + size[block], since, until) for (block, offset, since), until in last.items()]


@settings(max_examples=150)
@given(every_pass)
def test_no_two_things_are_in_use_at_one_place(schedule: Schedule) -> None:
    """What comes at step s may be written from s on, so what lies there was last used before s."""
    for part in parts(schedule):
        found = stays(schedule, part)
        assert all(0 <= stay.first < stay.end <= part.memory_bytes for stay in found)
        assert memory_bytes(schedule.renamed("again"))[part.rank] == part.memory_bytes  # not as it was laid out
        for one, other in combinations(sorted(found, key=lambda stay: stay.comes), 2):
            apart = one.end <= other.first or other.end <= one.first
            assert apart or (other.comes > one.comes and one.last_used < other.comes)


@settings(max_examples=150)
@given(every_pass)
def test_a_buffer_is_released_by_what_comes_and_its_uses(schedule: Schedule) -> None:
    """Arrivals, or the joins that they are part of; sends; calls that read some of it; and nothing else."""
    for part in parts(schedule):
        joined = {operation for each in part.joins for operation in each.operations}
        expected = defaultdict(set)
        for row in part.receives:
            if row.operation not in joined and schedule.blocks.pools:
                expected[row.step].add((row.operation, ARRIVED))
        for each in part.joins:
            expected[each.step].add((each.operation, ARRIVED))
        for row in part.sends:
            expected[row.since].add((row.operation, SENT))
        for call in part.calls:
            for _, since in call.reads:
                expected[since].add((call.operation, ARRIVED))
        expected.pop(RESIDENT, None)
        numbers = range(part.first_buffer, part.first_join)
        assert [set(part.waits[number]) for number in numbers] == [expected[step] for step in sorted(expected)]


@settings(max_examples=150)
@given(every_pass)
def test_sends_and_receives_are_the_transfers_in_one_order(schedule: Schedule) -> None:
    """By step and lane; those from one rank to another on one lane of one step are in the same order at both ends."""
    found = parts(schedule)
    sent = [(row.step, row.lane, part.rank, row.peer, row.block) for part in found for row in part.sends]
    received = [(row.step, row.lane, row.peer, part.rank, row.block) for part in found for row in part.receives]
    rows = [
        (index, lane, a, b, block) for index, step in enumerate(schedule.steps) for a, b, lane, block in step.rows()
    ]
    assert sorted(sent) == sorted(received) == sorted(rows)
    for pair in {row[:4] for row in rows}:
        assert [row for row in sent if row[:4] == pair] == [row for row in received if row[:4] == pair]
    for part in found:
        for ordered in (part.sends, part.receives):
            assert [(row.step, row.lane) for row in ordered] == sorted((row.step, row.lane) for row in ordered)


@given(every_pass)
def test_the_conditions_of_a_rank_are_its_own_of_all(schedule: Schedule) -> None:
    """What is derived for one rank is what is derived for all, as far as the rank itself can wait for it."""
    whole = dependencies(schedule)
    for rank in range(schedule.world_size):
        own = dependencies(schedule, rank)
        assert edges_of(own, rank) == edges_of(whole, rank)


@given(schedules())
def test_a_memory_is_the_residents_and_the_buffers(schedule: Schedule) -> None:
    """Every buffer holds the most that arrives in a step; without buffers there is a place for every block."""
    size = schedule.block_bytes
    for part in parts(schedule):
        if not schedule.blocks.pools:
            assert part.memory_bytes == size.sum()
        else:
            arriving: Counter[int] = Counter()
            for row in part.receives:
                arriving[row.step] += int(size[row.block])
            most = max(arriving.values(), default=0)
            assert part.memory_bytes == size[list(part.resident)].sum() + buffers_of(schedule) * most


@given(schedules())
def test_residents_are_what_circulates_of_what_a_rank_starts_with(schedule: Schedule) -> None:
    """Queries lie elsewhere. Resident blocks lie side by side from the start of the memory, in their order."""
    for part in parts(schedule):
        blocks = np.arange(len(schedule.block_bytes))
        if schedule.task is not None:
            blocks = task_of(schedule).blocks_of(KEYS)
            blocks = blocks[schedule.initial[part.rank, blocks]]
        starts = np.cumsum(schedule.block_bytes[blocks]) - schedule.block_bytes[blocks]
        assert part.resident == dict(zip(blocks.tolist(), starts.tolist(), strict=True))
        assert all(row.offset == part.resident[row.block] for row in part.sends if row.since == RESIDENT)
        assert all(row.offset == part.resident[row.block] for row in part.receives if row.since == RESIDENT)


@given(schedules())
def test_a_part_has_the_calls_of_its_rank(schedule: Schedule) -> None:
    for part in parts(schedule):
        wanted = [
            (index, call.queries, call.keys, [call.low, call.high])
            for index, step in enumerate(schedule.steps)
            for call in calls_of(step)
            if call.rank == part.rank
        ]
        found = [(row.step, *(list(each.blocks) for each in row.operands), list(row.params)) for row in part.calls]
        assert found == wanted
        flops = Counter[int]()
        for row in part.calls:
            flops[row.step] += row.flops
        assert [flops[step] for step in range(len(schedule.steps))] == schedule.flops()[:, part.rank].tolist()


def edges_of(derived: Dependencies, rank: int) -> set[tuple[object, ...]]:
    """The edges from what a rank has, by names instead of numbers: messages, calls and buffers."""
    sends = [("send", *row) for row in zip(*(column.tolist() for column in derived.transfers), strict=True)]
    calls, names, number = derived.calls, list[tuple[object, ...]](sends), Counter[int]()
    place = [(source, destination) for _, _, source, destination, *_ in sends]
    for owner in calls.rank.tolist():
        names.append(("call", owner, number[owner]))
        place.append((owner, owner))
        number[owner] += 1
    for row in zip(*(column.tolist() for column in derived.buffers), strict=True):
        names.append(("buffer", *row))
        place.append((row[0], row[0]))
    rows = zip(*(column.tolist() for column in derived.edges), strict=True)
    return {(names[before], names[after], *row) for before, after, *row in rows if place[before][row[0]] == rank}


@given(st.sampled_from(sorted(TOPOLOGIES)), st.integers(0, 60), st.sampled_from(["full", "causal"]), st.booleans())
def test_tasp_needs_about_as_much_memory_as_ring_attention(topology: str, more: int, mask: str, trim: bool) -> None:
    """Three shards each; where shards are uneven but no ring is without positions, at most a fifth more."""
    n, rings = TOPOLOGIES[topology].world_size, max(len(rings_of(topology).rings), 1)
    layer = Workload(2 * n * rings + more, head_dim=1, mask="causal" if mask == "causal" else "full", heads=1)
    ring, tasp = (
        max(part.memory_bytes for part in parts(built(name, topology, layer, trim=trim)))
        for name in ("ring-attention", "tasp")
    )
    assert tasp <= 1.2 * ring
    if layer.sequence % (2 * n) == 0:
        shards = 1 if n == 1 else 3
        assert tasp == ring == shards * layer.sequence // n * layer.kv_bytes_per_position


def test_keys_that_lie_apart_are_gathered() -> None:
    """Blocks that came together lie in one order; a call that takes the first two in the other one gathers them."""
    schedule = built("tasp", "full-mesh:5", Workload(20, heads=1, mask="full"))
    step = schedule.steps[1]
    first, *others = calls_of(step)
    a, b, *keys = first.keys
    calls = as_arrays(task_of(schedule), [first._replace(keys=[b, a, *keys]), *others])
    steps = [*schedule.steps]
    steps[1] = replace(step, calls=calls)
    (call,) = (each for each in rank_part(replace(schedule, steps=steps), first.rank).calls if each.step == 1)
    assert call.operands[1].offset == SCATTERED
    assert [piece.blocks for piece in call.operands[1].pieces][:2] == [(b,), (a,)]


def test_one_rank_alone_has_no_buffers() -> None:
    layer = Workload(12, heads=1, mask="full")
    part = rank_part(attention("tasp", full_mesh(1), layer), 0)
    assert part.memory_bytes == layer.sequence * layer.kv_bytes_per_position
    assert (part.sends, part.receives, part.waits, len(part.calls)) == ((), (), {}, 1)
