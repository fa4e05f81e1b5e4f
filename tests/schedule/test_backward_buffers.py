"""A rank's memory in a backward pass: its layout, built anew from what the docs say, and who uses which bytes when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.buffer_layout import OUTSIDE, memory_bytes
from tasp_lab.schedule.dependencies import ARRIVED, RESIDENT
from tasp_lab.schedule.rank_part import CallRow, RankPart
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, AttentionTask
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_backward import Case, cases_of, sees
from tests.support.kernel_calls import buffers_of, calls_of, circulates
from tests.support.schedules import parts, task_of

cases = cases_of(st.sampled_from(DATAFLOWS), max_positions=16)

few = settings(max_examples=50)
"""Where every case says much."""

Key = tuple[int, int]
"""A block, and the step at which it comes to lie where it is, or `RESIDENT`."""


class Layout:
    """Where everything of a rank should lie, and when it is there: dictionaries, step by step.

    `offset` of resident blocks and gradients, and of all that comes into a buffer. `parts` counts what is joined at a
    place of a buffer: an arrival, and calls; `returns` are the gradients that come home, each with its step.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.buffers = schedule, rank, buffers_of(schedule)
        self.size: list[int] = schedule.block_bytes.tolist()
        self.keys_move = circulates(schedule, KEYS)
        task = task_of(schedule)
        moving, gradients = (KEYS, KEY_GRADIENTS) if self.keys_move else (QUERIES, QUERY_GRADIENTS)
        self.moving, of_moving = task.blocks_of(moving), task.blocks_of(gradients)
        self.gradient_of = dict(zip(self.moving.tolist(), of_moving.tolist(), strict=True))
        self.gradients = of_moving[task.owner[of_moving] == rank].tolist()
        self.offset: dict[Key, int] = {}
        self.end = self._side_by_side([*self._residents(), *self.gradients], 0, RESIDENT)
        self.resident_bytes = self.end
        brought = [self._brought(index) for index in range(len(schedule.steps))]
        self.buffer_bytes = max((sum(self.size[block] for block in blocks) for blocks in brought), default=0)
        for index, blocks in enumerate(brought):
            buffer = self.resident_bytes + index % self.buffers * self.buffer_bytes
            assert self._side_by_side(blocks, buffer, index) <= buffer + self.buffer_bytes
        self.parts, self.returns = self._parts()

    def reads(self, step: int) -> list[list[int]]:
        """The moving blocks of each call of the rank at a step."""
        calls = [call for call in calls_of(self.schedule.steps[step]) if call.rank == self.rank]
        return [call.keys if self.keys_move else call.queries for call in calls]

    def arriving(self, step: int) -> list[int]:
        found = self.schedule.steps[step]
        blocks: list[int] = found.block[found.destination == self.rank].tolist()
        return blocks

    def _residents(self) -> list[int]:
        """In the order in which calls first read them, then those that none reads."""
        held = self.moving[self.schedule.initial[self.rank, self.moving]].tolist()
        read = [block for step in range(len(self.schedule.steps)) for blocks in self.reads(step) for block in blocks]
        return [*dict.fromkeys(block for block in read if block in held), *(b for b in held if b not in read)]

    def begun(self, step: int) -> list[int]:
        """Gradients of others to which calls of a step add a part, in their order."""
        found = (self.gradient_of[block] for blocks in self.reads(step) for block in blocks)
        return [block for block in found if block not in self.gradients]

    def _brought(self, step: int) -> list[int]:
        """What a step brings: what arrives, in its order, then gradients of which nothing arrives, each once."""
        return list(dict.fromkeys(self.arriving(step) + self.begun(step)))

    def _side_by_side(self, blocks: list[int], offset: int, since: int) -> int:
        for block in blocks:
            self.offset[block, since] = offset
            offset += self.size[block]
        return offset

    def _parts(self) -> tuple[Counter[Key], set[Key]]:
        found, returns = Counter[Key](), set[Key]()
        for index in range(len(self.schedule.steps)):
            arriving = [block for block in self.arriving(index) if block in self.gradient_of.values()]
            returns |= {(block, index) for block in arriving if block in self.gradients}
            kept = [block for block in arriving if block not in self.gradients]
            found.update((block, index) for block in kept + self.begun(index))
        return found, returns


@settings(max_examples=100)
@given(cases)
def test_everything_lies_where_the_docs_say(case: Case) -> None:
    """In a buffer, what calls read comes first, in the order of the step; the rest leaves no gap, in some order."""
    schedule = case.backward
    for part in parts(schedule):
        layout = Layout(schedule, part.rank)
        assert part.resident == {block: at for (block, since), at in layout.offset.items() if since == RESIDENT}
        assert part.memory_bytes == layout.resident_bytes + layout.buffers * layout.buffer_bytes
        places = places_of(part)
        assert all(places.get(key, OUTSIDE) == at for row in part.calls for key, at in adds_of(row))
        for row in part.calls:
            queries, keys = row.operands
            moving, fixed = (keys, queries) if layout.keys_move else (queries, keys)
            assert fixed.offset == OUTSIDE
            assert moving.offset == places[moving.blocks[0], moving.since[0]]
            assert moving.size_bytes == sum(layout.size[block] for block in moving.blocks)
        read = {key for row in part.calls for key in row.reads}
        for step in range(len(schedule.steps)):
            buffer = layout.resident_bytes + step % layout.buffers * layout.buffer_bytes
            came = [key for key in layout.offset if key[1] == step]
            ordered = [key for key in came if key in read]
            ordered += sorted((key for key in came if key not in read), key=lambda key: places[key])
            for key in ordered:
                assert places[key] == buffer
                buffer += layout.size[key[0]]


def places_of(part: RankPart) -> dict[Key, int]:
    """Where each copy lies: what sends it, what receives it and what adds to it agree."""
    found: dict[Key, int] = dict(
        zip(((block, RESIDENT) for block in part.resident), part.resident.values(), strict=True)
    )
    copies = [((row.block, row.since), row.offset) for row in part.sends]
    copies += [((row.block, row.step), row.offset) for row in part.receives]
    copies += [place for row in part.calls for place in adds_of(row) if place[1] != OUTSIDE]
    for key, offset in copies:
        assert found.setdefault(key, offset) == offset
    return found


def adds_of(row: CallRow) -> list[tuple[Key, int]]:
    return [(place.key, place.offset) for place in row.adds]


@settings(max_examples=100)
@given(cases)
def test_gradients_that_leave_together_lie_side_by_side(case: Case) -> None:
    """Those that no call reads and that go to the same rank on the same lane, of each step that brought them."""
    schedule = case.backward
    for part in parts(schedule):
        read = {key for row in part.calls for key in row.reads}
        first: dict[Key, tuple[int, int]] = {}
        for row in part.sends:
            first.setdefault((row.block, row.since), (row.peer, row.lane))
        groups = defaultdict[tuple[int, int, int], dict[Key, int]](dict)
        for row in part.sends:
            key = row.block, row.since
            if row.since != RESIDENT and key not in read:
                groups[row.since, *first[key]][key] = row.offset
        for group in groups.values():
            size = sum(int(schedule.block_bytes[block]) for block, _ in group)
            last = max(group, key=lambda key: group[key])
            assert group[last] + int(schedule.block_bytes[last[0]]) - min(group.values()) == size


@few
@given(cases)
def test_own_gradients_lie_in_the_order_of_places(case: Case) -> None:
    schedule = case.backward
    task = task_of(schedule)
    for part in parts(schedule):
        gradients = Layout(schedule, part.rank).gradients
        runs = [task.start[block] + np.arange(task.count[block]) * task.layout.stride for block in gradients]
        found = np.concatenate([np.zeros(0, dtype=np.int64), *runs])
        assert found.tolist() == task.layout.places(part.rank).tolist()
        ends = [part.resident[block] + int(schedule.block_bytes[block]) for block in gradients]
        assert [part.resident[block] for block in gradients[1:]] == ends[:-1]


def meeting(task: AttentionTask, row: CallRow) -> list[int]:
    """The blocks that a call reads of which any query sees any key, as the mask is defined."""
    places = _places(task, row)
    positions = {block: task.layout.positions_at(each).tolist() for block, each in places.items()}
    return _met(row, lambda query, key: _any_sees(task.workload, positions[query], positions[key]))


def may_meet(task: AttentionTask, row: CallRow) -> list[int]:
    """The blocks that meet in their places, with documents that begin before the last one of the other ends."""
    places = _places(task, row)
    ends = np.cumsum(task.workload.documents or (task.workload.sequence,))
    documents = {
        block: np.searchsorted(ends, task.layout.positions_at(each), side="right") for block, each in places.items()
    }
    layer = task.workload
    alone = replace(layer, documents=None, window=None if task.is_packed else layer.window)  # wider between places

    def meet(query: int, key: int) -> bool:
        of_query, of_key = documents[query], documents[key]
        overlap = of_query.min() <= of_key.max() and of_key.min() <= of_query.max()
        return bool(overlap) and _any_sees(alone, places[query].tolist(), places[key].tolist())

    return _met(row, meet)


def _places(task: AttentionTask, row: CallRow) -> dict[int, IntArray]:
    """The places of each block that a call reads."""
    return {block: task.start[block] + task.layout.stride * np.arange(task.count[block]) for block, _ in row.reads}


def _any_sees(layer: Workload, queries: list[int], keys: list[int]) -> bool:
    return any(sees(layer, query, key) for query, key in product(queries, keys))


def _met(row: CallRow, meet: Callable[[int, int], bool]) -> list[int]:
    queries, keys = (operand.blocks for operand in row.operands)
    return sorted(set().union(*({query, key} for query, key in product(queries, keys) if meet(query, key))))


@few
@example(
    Case(
        "tasp",
        "bidirectional-ring:4",
        Workload(13, heads=1, head_dim=1, mask="causal", window=9),
        "rotate-kv-back",
        trim=False,
    )
)  # rank 1 computes with a run of two key blocks, the first of which is out of the window
@example(
    Case(
        "ring-attention",
        "bidirectional-ring:4",
        Workload(5, heads=1, head_dim=1, documents=(1, 1, 3), mask="full"),
        "rotate-kv-back",
        trim=False,
    )
)  # a rank's queries are of the first and the last document
@given(cases)
def test_calls_add_to_the_gradients_of_what_meets_in_them(case: Case) -> None:
    """To the resident one if it is the rank's own, else to the one that lies in the buffer of the step.

    Also to gradients of a block that lacks all documents of the others, if they are between two that it has.
    """
    schedule = case.backward
    task = task_of(schedule)
    for part in parts(schedule):
        for row in part.calls:
            met, may = (
                {(block, RESIDENT if task.owner[block] == part.rank else row.step) for block in task.output_of[blocks]}
                for blocks in (meeting(task, row), may_meet(task, row))
            )
            added = {place.key for place in row.adds}
            assert len(added) == len(row.adds)
            assert met <= added <= may
            assert task.is_packed or added == met
            assert task.workload.window is not None or added == may


@few
@given(cases)
def test_joins_are_of_all_that_comes_together(case: Case) -> None:
    """Each is sent on at the step after it, or comes home. What arrives and is not added to is there at once."""
    schedule = case.backward
    for part in parts(schedule):
        layout = Layout(schedule, part.rank)
        arrived = {(row.block, row.step): row for row in part.receives}
        sent = {(row.block, row.since): row.step for row in part.sends}
        away = {each.place.key: each for each in part.joins if each.place.since != RESIDENT}
        assert set(away) == {key for key, count in layout.parts.items() if count > 1 or key not in arrived}
        for key, each in away.items():
            assert len(each.operations) == layout.parts[key]
            assert (each.begun, each.received) == (key in arrived, ())
            assert each.place.offset == places_of(part)[key]
            assert sent[key] == each.step + 1
        home = {(each.place.block, each.step): each for each in part.joins if each.place.since == RESIDENT}
        assert set(home) == layout.returns
        for key, each in home.items():
            assert each.received == (arrived[key].offset,)
            assert each.place.offset == part.resident[each.place.block]
        assert all(
            set(part.waits[each.operation]) == {(operation, ARRIVED) for operation in each.operations}
            for each in part.joins
        )


@pytest.mark.parametrize("n", range(3, 7))
def test_buffers_of_equal_shards(n: int) -> None:
    """Ring attention with the full mask, shards of one unit of KV, gradients of two (float32), two buffers.

    rotate-kv: KV resident 1, its gradient 2, in each buffer KV and a gradient 3. rotate-kv-back: KV of the rank before,
    1, besides.
    """
    layer = Workload(2 * n, head_dim=4, heads=1, mask="full")
    unit = 2 * layer.kv_bytes_per_position
    onward, back = (
        Case("ring-attention", f"full-mesh:{n}", layer, dataflow).backward
        for dataflow in ("rotate-kv", "rotate-kv-back")
    )
    assert (memory_bytes(onward) == (1 + 2 + 2 * 3) * unit).all()
    assert (memory_bytes(back) == (1 + 1 + 2 + 2 * 3) * unit).all()
