"""The plans of the per-step executor: batches wait for kernel calls of no later step than they must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.per_step import AFTER, CALLS, FINISH, JOIN, MARK, POST, RECEIVE, Batch, step_plan
from runtime.executor.plans import Plan, lanes_are_alike, plan_of
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import Join, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedule.test_messages import either


@settings(max_examples=60)
@given(either)
def test_a_batch_waits_for_calls_of_no_later_step_than_it_must(schedule: Schedule) -> None:
    """For those that its messages need, or that what is before it in communication does.

    Calls of a step are queued together, so by steps: a batch that needs the first of them waits for all.
    """
    for rank in range(schedule.world_size):
        assert_waits_for_no_more(schedule, rank)


def test_buffers_are_filled_while_the_rank_computes() -> None:
    """Of three buffers, what arrives at step s takes that of step s - 3, which the call of step s - 2 reads.

    The call of step s - 1 has been made by then, and may run meanwhile.
    """
    schedule = attention("ring-attention", full_mesh(6), Workload(48, head_dim=2, heads=1, mask="full"), buffers=3)
    latest = latest_calls(schedule, 1)
    assert [step - call for step, call in latest.items() if call >= 0] == [2, 2]


@pytest.mark.parametrize("name", ["kv-and-q-rings", "double-ring:4x2", "direct-attention"])
def test_what_nothing_waits_for_is_received_when_the_next_batch_is_posted(name: str) -> None:
    """Of its channel: on a GPU, where the host goes on, its time is then known, and no batch is held up."""
    layer = Workload(128, head_dim=2, heads=1, kv_heads=1, mask="causal")
    late = 0
    for schedule in attention_schedules(name, full_mesh(8), layer, options=AttentionOptions("both")):
        for rank in range(schedule.world_size):
            assert unreceived(schedule, rank, prompt=True) == 0
            late += unreceived(schedule, rank, prompt=False)
    assert late, "a host, which would have to wait, receives some later"


@settings(max_examples=60)
@given(either, st.integers(1, 4))
def test_single_messages_are_received_ahead(schedule: Schedule, ahead: int) -> None:
    """Each message is posted once, with all that it waits for behind it; receives up to `ahead` steps early.

    Those of a lane are posted in order, as several of one step have one tag. Of those that may be posted with a batch,
    none is left for a later one.
    """
    for rank in range(schedule.world_size):
        plan = plan_of(schedule, rank_part(schedule, rank))
        found = step_plan(plan, len(schedule.steps), (0,) * schedule.lanes, False, ahead=ahead)
        happened, posted = set[int](), list[int]()
        post(plan, found.first, 0, ahead, happened, posted)
        for kind, what in found.on_host:
            if kind == POST:
                assert what.nodes
                post(plan, what, what.sends[0].step if what.sends else None, ahead, happened, posted)
            else:
                happened |= nodes_of(plan, kind, what)
        assert sorted(posted) == list(range(plan.first_call))
        for lane in range(schedule.lanes):
            of_lane = [node for node in posted if plan.first_receive <= node and lane_of(plan, node) == lane]
            assert of_lane == sorted(of_lane)


def post(plan: Plan, batch: Batch, step: int | None, ahead: int, happened: set[int], posted: list[int]) -> None:
    """Post a batch of a step, which is not known of receives alone."""
    for message in (*batch.receives, *batch.sends):
        assert has_happened(plan, plan.waits[message.node], happened)
        assert step is None or message.step <= step + ahead
    posted += batch.nodes
    left = [message for message in plan.receives if message.node not in posted]
    first_of_lanes = {message.lane: message for message in reversed(left)}.values()
    for message in first_of_lanes:
        if step is not None and message.step <= step + ahead:
            assert not has_happened(plan, plan.waits[message.node], happened)


def lane_of(plan: Plan, node: int) -> int:
    return plan.receives[node - plan.first_receive].lane


def has_happened(plan: Plan, nodes: Iterable[int], happened: set[int]) -> bool:
    """Whether all nodes have; a buffer is free once all that it waits for has happened."""
    buffers = range(plan.first_buffer, plan.first_join)
    return all(
        node in happened or (node in buffers and has_happened(plan, plan.waits[node], happened)) for node in nodes
    )


def nodes_of(plan: Plan, kind: int, what: Any) -> set[int]:
    """What happens in an action of a host other than `POST`."""
    if kind == JOIN:
        return {plan.first_join + plan.joins.index(join) for join in what}
    if kind == CALLS:
        return {plan.first_call + plan.calls.index(row) for row in what}
    assert kind in (RECEIVE, FINISH)
    return {message.node for message in what}


@pytest.mark.parametrize("alike", [True, False])
def test_lanes_that_are_alike_are_received_in_the_order_of_steps(alike: bool) -> None:
    """Rank 1 passes on what it receives on lane 0 alone. The time of the rest is known if lane 1 is not slower."""
    sizes = np.full(6, 5)
    sizes[1] += not alike
    steps = [
        Step.of([(0, 1, 0, 0), (0, 1, 1, 1)]),
        Step.of([(1, 2, 0, 0), (0, 1, 0, 2), (0, 1, 1, 3)]),
        Step.of([(1, 2, 0, 2), (0, 1, 0, 4), (0, 1, 1, 5)]),
    ]
    held = np.zeros((3, 6), dtype=np.bool_)
    held[0] = True
    final = held.copy()
    final[1] = True
    final[2, [0, 2]] = True
    schedule = Schedule("passes on", 3, 2, Blocks.of_data(sizes), held, final, steps)
    plan = plan_of(schedule, rank_part(schedule, 1))
    received = [
        message.block_numbers for kind, what in step_plan(plan, 3, (0, 0), False, ahead=1).on_host
        if kind == RECEIVE for message in what
    ]  # fmt: skip
    assert lanes_are_alike(plan) == alike
    assert received == ([(0,), (1,), (2,), (3,), (4,), (5,)] if alike else [(0,), (2,), (1,), (3,), (4,), (5,)])


def unreceived(schedule: Schedule, rank: int, prompt: bool) -> int:
    """How many messages of the batch before the last one have not been received when a batch is posted."""
    plan = plan_of(schedule, rank_part(schedule, rank))
    found, received = 0, set[int]()
    posted: defaultdict[int, list[set[int]]] = defaultdict(list)
    for _, actions in step_plan(plan, len(schedule.steps), channels(schedule), False, prompt).runs:
        for kind, what in actions:
            if kind == RECEIVE:
                received |= {message.node for message in what}  # type: ignore[union-attr]
            elif isinstance(what, Batch):
                found += sum(len(batch - received) for batch in posted[what.channel][:-1])
                posted[what.channel].append({message.node for message in what.receives})
    assert received == {message.node for message in plan.receives}
    return found


def latest_calls(schedule: Schedule, rank: int) -> dict[int, int]:
    """The step of the last call for which the batch of each step waits, -1 for none."""
    plan = plan_of(schedule, rank_part(schedule, rank))
    found = waits_of_batches(schedule, plan)
    steps = {node: row.step for node, row in enumerate(plan.calls, plan.first_call)}
    return {
        (*batch.sends, *batch.receives)[0].step: max((steps[node] for node in waits), default=-1)
        for batch, waits, _ in found
    }


def assert_waits_for_no_more(schedule: Schedule, rank: int) -> None:
    plan = plan_of(schedule, rank_part(schedule, rank))
    steps = {node: row.step for node, row in enumerate(plan.calls, plan.first_call)}
    for _, waits, needs in waits_of_batches(schedule, plan):
        assert max((steps[node] for node in waits), default=-1) <= max((steps[node] for node in needs), default=-1)


def waits_of_batches(schedule: Schedule, plan: Plan) -> list[tuple[Batch, set[int], set[int]]]:
    """Each batch, the calls for which it waits, and those that it or what is before it in communication needs."""
    found, node_of = [], {row.operation: node for node, row in enumerate(plan.calls, plan.first_call)}
    waits, needs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    marks: dict[int, tuple[set[int], set[int]]] = {}
    planned = step_plan(plan, len(schedule.steps), channels(schedule), every_step=False)
    for stream, (kind, what) in ((stream, action) for stream, actions in planned.runs for action in actions):
        if kind == MARK:
            assert isinstance(what, int)
            marks[what] = set(waits[stream]), set(needs[stream])
        elif kind == AFTER:
            assert isinstance(what, int)
            waits[stream] |= marks[what][0]
            needs[stream] |= marks[what][1]
        elif kind == CALLS:
            assert isinstance(what, tuple)
            waits[stream] |= {node_of[row.operation] for row in what}  # type: ignore[union-attr]
        elif kind == JOIN:
            assert isinstance(what, tuple)
            for join in what:
                assert isinstance(join, Join)
                needs[stream] |= calls_before(plan, plan.first_join + plan.joins.index(join))
                if join.place.since == -1:
                    needs[stream] |= waits[stream]  # changes of a resident copy follow one another
        elif kind == POST:
            assert isinstance(what, Batch)
            for message in chain(what.sends, what.receives):
                needs[stream] |= calls_before(plan, message.node)
            found.append((what, set(waits[stream]), set(needs[stream])))
    return found


def calls_before(plan: Plan, node: int) -> set[int]:
    """All calls for which a node waits, directly or by what happens before it at this rank."""
    found, seen, waiting = set[int](), {node}, [node]
    while waiting:
        for before in plan.waits[waiting.pop()]:
            if before not in seen:
                seen.add(before)
                waiting.append(before)
            if plan.first_call <= before < plan.first_buffer:
                found.add(before)
    return found
