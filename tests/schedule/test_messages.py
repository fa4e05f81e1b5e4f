"""Which blocks go in one message: both ends agree, the blocks lie side by side, and none waits for another's cause."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.schedule.blocks import Blocks, Field, Kind
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import RankPart, Row
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedule.test_buffer_layout import schedules
from tests.schedule.test_home_dtype import SYSTEMS
from tests.schedules.attention.test_backward import cases_of
from tests.support.home_dtype import with_home_dtype
from tests.support.schedules import parts

Message = tuple[int, int, int, int, tuple[int, ...]]
"""Step, lane, source, destination, and the blocks in their order."""


@st.composite
def wide_at_home(draw: st.DrawFn) -> Schedule:
    """Sums are wider at their owners than on the wire."""
    ranks, mask = draw(st.integers(1, 3)), draw(st.sampled_from(["full", "causal"]))
    layer = Workload(2 * ranks + draw(st.integers(1, 20)), heads=12, head_dim=2, mask=mask)  # type: ignore[arg-type]
    return with_home_dtype(SYSTEMS[draw(st.sampled_from(sorted(SYSTEMS)))](full_mesh(ranks), layer))


either = (
    schedules()
    | cases_of(st.sampled_from(DATAFLOWS), max_positions=16).map(lambda case: case.backward)
    | wide_at_home()
)


@settings(max_examples=100)
@given(either)
def test_both_ends_agree(schedule: Schedule) -> None:
    """On the messages, and on their order from one rank to another."""
    sent, received = (
        defaultdict[tuple[int, int], list[Message]](list),
        defaultdict[tuple[int, int], list[Message]](list),
    )
    for part in parts(schedule):
        for rows in part.messages_out:
            sent[part.rank, rows[0].peer].append(message(rows, part.rank, rows[0].peer))
        for rows in part.messages_in:
            received[rows[0].peer, part.rank].append(message(rows, rows[0].peer, part.rank))
    assert sent == received


def message(rows: tuple[Row, ...], source: int, destination: int) -> Message:
    assert len({(row.step, row.lane, row.peer) for row in rows}) == 1
    return rows[0].step, rows[0].lane, source, destination, tuple(row.block for row in rows)


@settings(max_examples=100)
@given(either)
def test_a_rank_derives_the_messages_of_the_whole_schedule(schedule: Schedule) -> None:
    """The engines derive all messages at once, each rank only its own: ends, lanes, blocks in order, and bytes."""
    found, sizes = message_dependencies(schedule).messages, schedule.block_bytes.tolist()
    columns = (found.step, found.lane, found.source, found.destination)
    rows = zip(*(column.tolist() for column in columns), map(tuple, found.blocks.lists()), strict=True)
    posted = [message(rows, part.rank, rows[0].peer) for part in parts(schedule) for rows in part.messages_out]
    assert sorted(rows) == sorted(posted)
    assert found.bytes.tolist() == [sum(sizes[block] for block in blocks) for blocks in found.blocks.lists()]


@settings(max_examples=100)
@given(either)
def test_blocks_of_a_message_lie_side_by_side(schedule: Schedule) -> None:
    """At both ends; every row is in one message."""
    size = schedule.block_bytes.tolist()
    for part in parts(schedule):
        for messages, rows in ((part.messages_out, part.sends), (part.messages_in, part.receives)):
            assert sorted(row for each in messages for row in each) == sorted(rows)
            for each in messages:
                ends = [row.offset + size[row.block] for row in each]
                assert [row.offset for row in each[1:]] == ends[:-1]
                assert len(each) == 1 or each[0].offset != OUTSIDE


@settings(max_examples=100)
@given(either)
def test_no_block_waits_for_a_kernel_call_for_which_it_would_not_wait_alone(schedule: Schedule) -> None:
    for part in parts(schedule):
        for each in part.messages_out:
            assert len({calls_before(part, row) for row in each}) == 1


def calls_before(part: RankPart, row: Row) -> frozenset[int]:
    """The last kernel calls for which a send waits, directly or by what is joined or released before it."""
    found, waiting = set[int](), [row.operation]
    while waiting:
        for operation, _ in part.waits.get(waiting.pop(), ()):
            if part.first_call <= operation < part.first_buffer:
                found.add(operation)
            elif operation >= part.first_buffer:
                waiting.append(operation)
    return frozenset({max(found)} if found else ())


def sums_at_home() -> Schedule:
    """Rank 1 gives a float32 sum, and one that is float32 at home and bfloat16 on the wire, which lies behind it."""
    kinds = (Kind("narrow", "add", fields=(Field("x", "fp32", (4,)),)),
             Kind("wide", "add", fields=(Field("x", "bf16", (4,), home_dtype="fp32"),)))  # fmt: skip
    count, step = np.array([2, 2]), Step.of([(1, 0, 0, block, 1) for block in (0, 1)])
    blocks = Blocks(kinds, np.arange(2), np.array([32, 16]), count)
    initial, part = np.ones((2, 2), dtype=bool), np.array([[0, 0], [1, 1]])
    return Schedule("sums", 2, 1, blocks, initial, np.array([[True] * 2, [False] * 2]), [step], initial_part=part)


def test_what_is_narrowed_goes_alone() -> None:
    """Both sums lie side by side at rank 1, and side by side at the staging places of rank 0."""
    receiver, sender = parts(sums_at_home())
    first, second = receiver.receives
    assert (sender.resident, second.offset - first.offset) == ({0: 0, 1: 32}, 32)
    assert receiver.memory_bytes == 32 + 32 + 32 + 16
    assert [(row.block, row.offset) for (row,) in sender.messages_out] == [(0, 0), (1, OUTSIDE)]
    assert [row for (row,) in receiver.messages_in] == [first, second]


def test_wide_sums_that_lie_in_buffers_are_sent_together() -> None:
    """From the buffer of the rank that computes them to the staging places of their owner, with their size there."""
    layer = Workload(48, heads=12, head_dim=2, mask="causal")
    schedule = with_home_dtype(SYSTEMS["token-ring"](full_mesh(4), layer))
    kinds, size = schedule.blocks.kinds, schedule.block_bytes.tolist()
    kind = schedule.blocks.kind.tolist()
    wide = [rows for part in parts(schedule) for rows in part.messages_in if kinds[kind[rows[0].block]].is_wide_at_home]
    joint = [rows for rows in wide if len(rows) > 1]
    assert joint
    for first, second in joint:
        assert second.offset == first.offset + size[first.block]


def sent_by(name: str, world_size: int, mask: str) -> tuple[list[int], list[int]]:
    """The blocks and the messages that each rank sends, forward."""
    layer = Workload(64 * world_size**2, heads=2, mask=mask)  # type: ignore[arg-type]
    (schedule,) = build_schedules(name, full_mesh(world_size), layer, None, AttentionOptions("forward"))
    found = parts(schedule)
    return [len(part.sends) for part in found], [len(part.messages_out) for part in found]


@pytest.mark.parametrize("world_size", range(2, 9))
def test_one_message_per_step_of_a_zigzag(world_size: int) -> None:
    """Two blocks of each rank go around together: one message for each of n - 1 steps."""
    blocks, messages = sent_by("zigzag-ring-attention", world_size, "full")
    assert blocks == [2 * (world_size - 1)] * world_size
    assert messages == [world_size - 1] * world_size


def test_blocks_that_lie_apart_are_messages_of_their_own() -> None:
    """TASP cuts both halves of a zigzag by ring; a rank's own halves lie in the order of its shard, so not by ring."""
    layer = Workload(64 * 25, heads=2, mask="causal")
    (schedule,) = build_schedules("tasp", full_mesh(5), layer, None, AttentionOptions("forward"))
    for part in parts(schedule):
        assert all(len(rows) == 1 for rows in part.messages_out if rows[0].step == 0)
    assert any(len(rows) > 1 for part in parts(schedule) for rows in part.messages_out)
