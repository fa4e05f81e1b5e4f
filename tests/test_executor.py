from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor import Executor, test_pattern
from runtime.in_process import InProcess, Mailboxes, run_in_process
from tasp_lab.all_gather import all_gather
from tasp_lab.builders import full_mesh
from tasp_lab.errors import RunError
from tasp_lab.schedule import Step
from tasp_lab.topology import Topology
from tests.strategies import topologies_and_schedules


@settings(max_examples=200)
@given(topologies_and_schedules(), st.integers(1, 300))
def test_every_schedule_gathers_every_bit(case: tuple[Topology, str], shard: int) -> None:
    """The executor checks the data itself; its timeline has every transfer of the schedule once, with its bytes."""
    topology, name = case
    schedule = all_gather(name, topology, shard)
    timeline = run_in_process(schedule)
    expected = {
        (index, *row): int(schedule.block_bytes[row[3]])
        for index, step in enumerate(schedule.steps)
        for row in step.rows()
    }
    assert {(e.step, e.rank, e.peer, e.lane, e.block): e.bytes for e in timeline.events} == expected
    assert len(timeline.events) == schedule.transfers
    assert all(event.end_s >= event.start_s >= 0 for event in timeline.events)


def test_wrong_data_is_noticed() -> None:
    executor = Executor(all_gather("ring", full_mesh(2), 100), 1, InProcess(1, Mailboxes(), 1.0))
    executor.fill()
    with pytest.raises(RunError, match="rank 1: block 0 is not what its owner sent"):
        executor.verify()


def test_a_silent_peer_is_named() -> None:
    executor = Executor(all_gather("ring", full_mesh(3), 100), 1, InProcess(1, Mailboxes(), 0.01))
    executor.fill()
    with pytest.raises(RunError, match="rank 1, step 0: lost rank 0 waiting for block 0 from it"):
        executor.run()


def test_patterns_tell_blocks_and_positions_apart() -> None:
    first, second = test_pattern(0, 1000), test_pattern(1, 1000)
    assert torch.equal(first, test_pattern(0, 1000))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:999], first[1:])


def test_several_blocks_on_one_lane_of_one_step() -> None:
    """A lane takes its blocks one after the other, also when a step gives it several for the same peer."""
    schedule = all_gather("multi-ring", full_mesh(3), 10)
    steps = [Step.of((s, d, 0, b) for s, d, _, b in step.rows()) for step in schedule.steps]
    assert len(run_in_process(replace(schedule, steps=steps)).events) == schedule.transfers
