"""A rank's memory in a backward pass: its layout, built anew from what the docs say, and who uses which bytes when."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.attention.backward import DATAFLOWS
from tasp_lab.attention.registry import attention_layout
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.buffer_layout import INITIAL, RankPart, memory_bytes, resident_blocks
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.layer import Workload
from tests.attention.test_backward import Case, Replay, cases_of, plan_of
from tests.support.schedules import parts, task_of

cases = cases_of(st.sampled_from(DATAFLOWS), max_positions=16)

few = settings(max_examples=50)
"""Where every case says much."""

Key = tuple[int, int]
"""A block, and the step at which it comes to lie where it is, or `INITIAL`."""


class Layout:
    """Where everything of a rank should lie, and when it is there: dictionaries, step by step.

    `offset` of own blocks, copies and own gradients, and of all that comes into a buffer. `parts` counts what is added
    up at a place: an arrival, and calls.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.size: list[int] = schedule.block_bytes.tolist()
        self.replay = replay = Replay(plan_of(schedule))
        self.steps = replay.plan.steps
        self.rank, self.buffers = rank, replay.plan.buffers
        self.own = [block for block in replay.circulating if replay.owner[block] == rank]
        self.copies = self._copies()
        self.gradients = [block for block in replay.gradients if replay.owner_of(block) == rank]
        brought = [self._brought(index) for index in range(len(self.steps))]
        self.buffer_bytes = max((sum(self.size[block] for block in blocks) for blocks in brought), default=0)
        self.offset: dict[Key, int] = {}
        self.end = self._side_by_side([*self.own, *self.copies, *self.gradients], 0, INITIAL)
        self.resident_bytes = self.end
        for index, blocks in enumerate(brought):
            buffer = self.resident_bytes + index % self.buffers * self.buffer_bytes
            assert self._side_by_side(blocks, buffer, index) <= buffer + self.buffer_bytes
        self.parts = self._parts()

    def _circulating_of(self, step: int) -> list[list[int]]:
        """For each call of the rank at a step, the blocks that travel among its."""
        calls = [call for call in self.steps[step][1] if call.rank == self.rank]
        blocks = ([*call.queries.tolist(), *call.keys.tolist()] for call in calls)
        return [[block for block in each if block in self.replay.circulating] for each in blocks]

    def _copies(self) -> list[int]:
        """In the order in which the first step computes with them, then those that it does not."""
        held = [b for b in self.replay.plan.initial[self.rank] if b in self.replay.circulating and b not in self.own]
        first = dict.fromkeys(block for blocks in self._circulating_of(0) for block in blocks if block in held)
        return [*first, *sorted(set(held) - set(first))]

    def _begun(self, step: int) -> list[int]:
        """Gradients of others to which calls of a step add a part, in their order."""
        found = []
        for blocks in self._circulating_of(step):
            gradients = (self.replay.gradients[self.replay.circulating.index(block)] for block in blocks)
            found += [block for block in gradients if block not in self.gradients]
        return found

    def _brought(self, step: int) -> list[int]:
        """What a step brings: what arrives, in its order, then gradients of which nothing arrives, each once."""
        arriving = [block for _, destination, _, block in self.steps[step][0] if destination == self.rank]
        return list(dict.fromkeys(arriving + self._begun(step)))

    def _side_by_side(self, blocks: list[int], offset: int, since: int) -> int:
        for block in blocks:
            self.offset[block, since] = offset
            offset += self.size[block]
        return offset

    def _parts(self) -> Counter[Key]:
        found: Counter[Key] = Counter()
        for index, (rows, _) in enumerate(self.steps):
            arriving = [row[3] for row in rows if row[1] == self.rank and row[3] in self.replay.gradients]
            found.update((block, index) for block in arriving + self._begun(index))
        return found


class Stay(NamedTuple):
    """A thing has [first, end) of a memory from a step to the last that uses it."""

    first: int
    end: int
    comes: int
    last_used: float


def stays(schedule: Schedule, part: RankPart) -> list[Stay]:
    """What a rank starts with and its own gradients are there all the time. Every use is of what came before.

    What came home of a gradient is used in the step in which it comes: it is added to the rest.
    """
    size, last = schedule.block_bytes.tolist(), defaultdict[tuple[int, int, int], float](float)
    for block, offset in [*part.resident.items(), *part.gradients.items()]:
        last[block, offset, INITIAL] = float("inf")
    for row in part.receives:
        last[row.block, row.offset, row.step] = row.step
    for call_row in part.calls:
        for place in call_row.away:
            assert place.since == call_row.step
            last[place.block, place.offset, place.since] = call_row.step
    used = [(row.block, row.offset, row.since, row.step) for row in part.sends]
    for call_row in part.calls:
        offset = call_row.offset
        for block, since in call_row.reads:
            used.append((block, offset, since, call_row.step))
            offset += size[block]
    for block, offset, since, step in used:
        assert (block, offset, since) in last, "what is used has come to its place"
        assert since < step, "and it has come before"
        last[block, offset, since] = max(last[block, offset, since], step)
    return [Stay(offset, offset + size[block], since, until) for (block, offset, since), until in last.items()]


@settings(max_examples=100)
@given(cases)
def test_no_two_things_are_in_use_at_one_place(case: Case) -> None:
    """What comes at step s may be written from s on, so what lies there was last used before s."""
    for part in parts(case.backward):
        for one, other in combinations(sorted(stays(case.backward, part), key=lambda stay: stay.comes), 2):
            apart = one.end <= other.first or other.end <= one.first
            assert apart or (other.comes > one.comes and one.last_used < other.comes)


@few
@given(cases)
def test_everything_lies_inside_the_buffer(case: Case) -> None:
    for part in parts(case.backward):
        found = stays(case.backward, part)
        assert all(0 <= stay.first < stay.end <= part.memory_bytes for stay in found)
        assert all(
            0 <= each.offset <= part.memory_bytes - case.backward.block_bytes[each.block] for each in part.sums.values()
        )


@settings(max_examples=100)
@given(cases)
def test_everything_lies_where_the_docs_say(case: Case) -> None:
    schedule = case.backward
    for part in parts(schedule):
        layout = Layout(schedule, part.rank)
        assert resident_blocks(schedule, part.rank) == layout.own + layout.copies
        assert (
            part.resident == part.kept == {block: layout.offset[block, INITIAL] for block in layout.own + layout.copies}
        )
        assert part.gradients == {block: layout.offset[block, INITIAL] for block in layout.gradients}
        assert all(row.offset == layout.offset[row.block, row.since] for row in part.sends)
        assert all(row.offset == layout.offset[row.block, row.step] and row.since == row.step for row in part.receives)
        for row in part.calls:
            assert row.offset == layout.offset[row.reads[0]]
            assert row.size_bytes == sum(layout.size[block] for block, _ in row.reads)
            assert all(place.offset == layout.offset[place.key] for place in row.adds)


@few
@given(cases)
def test_a_buffer_is_home_gradients_and_buffers(case: Case) -> None:
    schedule = case.backward
    for part in parts(schedule):
        layout = Layout(schedule, part.rank)
        assert part.memory_bytes == layout.resident_bytes + layout.buffers * layout.buffer_bytes
        assert part.memory_bytes == memory_bytes(schedule)[part.rank]


@few
@given(cases)
def test_own_gradients_lie_side_by_side_in_the_order_of_the_shard(case: Case) -> None:
    schedule, layout = case.backward, attention_layout(case.name, case.workload, case.world_size)
    for part in parts(schedule):
        replay = Replay(plan_of(schedule))
        in_memory = sorted(part.gradients, key=part.gradients.__getitem__)
        tokens = [replay.tokens[replay.circulating[block - replay.gradients.start]] for block in in_memory]
        assert [token for each in tokens for token in each] == layout.positions(part.rank).tolist()
        ends = [part.gradients[block] + int(schedule.block_bytes[block]) for block in in_memory]
        assert [part.gradients[block] for block in in_memory[1:]] == ends[:-1]


@few
@given(cases)
def test_calls_add_to_the_gradients_of_what_they_read(case: Case) -> None:
    """To that at home if it is the rank's own, else to the one that lies in the buffer of the step."""
    schedule = case.backward
    for part in parts(schedule):
        replay = Replay(plan_of(schedule))
        for row in part.calls:
            blocks = [block for block, _ in row.reads]
            assert blocks == task_of(schedule).sides(row.call)[0].tolist()
            gradients = [replay.gradients[replay.circulating.index(block)] for block in blocks]
            since = [INITIAL if block in part.gradients else row.step for block in gradients]
            assert [place.key for place in row.adds] == list(zip(gradients, since, strict=True))
            assert row.away == tuple(place for place in row.adds if place.since != INITIAL)


@few
@given(cases)
def test_sums_are_of_all_that_comes_together(case: Case) -> None:
    """Each is sent on at the step after it, or comes home."""
    schedule = case.backward
    for part in parts(schedule):
        layout = Layout(schedule, part.rank)
        assert {key: each.parts for key, each in part.sums.items()} == dict(layout.parts)
        arrived = {(row.block, row.step) for row in part.receives}
        sent = {(row.block, row.since): row.step for row in part.sends}
        for key, each in part.sums.items():
            assert (each.block, each.since) == key
            assert each.arrives == (key in arrived)
            assert each.offset == layout.offset[key]
            assert sent.get(key) == (None if each.block in part.gradients else each.since + 1)


@few
@given(cases)
def test_the_occupants_of_a_buffer_are_what_comes_and_its_uses(case: Case) -> None:
    """A call counts once for each step that brought some of what it reads, or whose buffer it adds to."""
    for part in parts(case.backward):
        arrived = Counter(row.step for row in part.receives)
        sent = Counter(row.since for row in part.sends)
        buffers_of_calls = [
            {since for _, since in row.reads} | {place.since for place in row.adds} for row in part.calls
        ]
        expected = arrived + sent + Counter(since for buffers in buffers_of_calls for since in buffers)
        del expected[INITIAL]
        assert part.pending_uses == expected


@few
@given(cases)
def test_every_send_has_its_receive(case: Case) -> None:
    found = parts(case.backward)
    sent = [(row.step, row.lane, part.rank, row.peer, row.block) for part in found for row in part.sends]
    received = [(row.step, row.lane, row.peer, part.rank, row.block) for part in found for row in part.receives]
    rows = [
        (index, lane, source, peer, block)
        for index, step in enumerate(case.backward.steps)
        for source, peer, lane, block in step.rows()
    ]
    assert sorted(sent) == sorted(received) == sorted(rows)


@pytest.mark.parametrize("n", range(3, 7))
def test_buffers_of_equal_shards(n: int) -> None:
    """Ring attention with the full mask, shards of one unit of KV, gradients of two (float32), two buffers.

    Onward: KV at home 1, its gradient 2, in each buffer KV and a gradient 3. Reversed: KV of the rank before, 1,
    besides.
    """
    layer = Workload(2 * n, head_dim=4, heads=1)
    unit = 2 * layer.kv_bytes_per_position
    onward, back = (
        Case("ring-attention", f"full-mesh:{n}", layer, dataflow).backward
        for dataflow in ("rotate-kv", "rotate-kv-back")
    )
    assert (memory_bytes(onward) == (1 + 2 + 2 * 3) * unit).all()
    assert (memory_bytes(back) == (1 + 1 + 2 + 2 * 3) * unit).all()


def test_a_backward_pass_needs_buffers() -> None:
    """Without them a gradient would have one place for all that comes to it at different steps."""
    schedule = Case("ring-attention", "full-mesh:3", Workload(6, head_dim=1, heads=1), "rotate-kv").backward
    held = schedule.initial.copy()
    for step in schedule.steps:
        copies = step.block < task_of(schedule).first_gradient
        held[step.destination[copies], step.block[copies]] = True
    with pytest.raises(ScheduleError, match="schedule 'ring-attention': a backward pass without buffers"):
        replace(schedule, buffers=None, final=held)
