from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Wait
from runtime.executor.per_lane import PerLane
from runtime.executor.per_step import PerStep
from runtime.executor.views import Views
from runtime.trials.patterns import PatternTrial, pattern
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import CallRow, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective, linear_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.schedule.test_messages import either
from tests.support.loopback import Board, Loopback
from tests.support.one_device import run_in_process
from tests.support.schedules import assert_every_transfer_once
from tests.support.strategies import topologies_and_schedules

IN_PIECES = {
    "all-scan": Workload(sequence=48, heads=2, head_dim=4, mask="causal", kind="linear"),
    "token-ring": Workload(sequence=48, heads=2, head_dim=4, mask="full"),
}
"""Layers of which parts are joined by threads of lanes."""


@settings(max_examples=100)
@given(topologies_and_schedules(), st.integers(1, 300), st.integers(0, 5), st.booleans())
def test_every_schedule_gathers_every_bit(
    case: tuple[Topology, str], shard: int, receives_ahead: int, whole_steps: bool
) -> None:
    """Walked by lanes or by steps. The executor checks the data; the timeline has every transfer once."""
    topology, name = case
    schedule = collective(name, topology, shard)
    timeline = run_in_process(schedule, receives_ahead, whole_steps)
    assert_every_transfer_once(timeline.events, schedule)
    assert all(event.end_s >= event.start_s >= 0 for event in timeline.events)


def test_wrong_data_is_noticed() -> None:
    trial = PatternTrial(collective("ring", full_mesh(2), 100), 1, Loopback(Board(), 1))
    trial.set_up(checked=True)
    with pytest.raises(RunError, match="rank 1: block 0 is not what its owner sent"):
        trial.check()


def test_a_silent_peer_is_named() -> None:
    executor = Executor(collective("ring", full_mesh(3), 100), 1, Loopback(Board(0.01), 1, whole_steps=False))
    executor.prepare()
    with pytest.raises(RunError, match="rank 1, step 0: lost rank 0 waiting for block 0 from it"):
        executor.run()


def test_patterns_tell_blocks_and_positions_apart() -> None:
    first, second = pattern(0, 1000), pattern(1, 1000)
    assert torch.equal(first, pattern(0, 1000))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:999], first[1:])


def test_no_lane_waits_for_another() -> None:
    """Lane 0's block comes late; lane 1's is passed on before it."""
    schedule = collective("multi-ring", full_mesh(3), 10)
    board = Board(5.0)
    executor = Executor(schedule, 1, Loopback(board, 1, whole_steps=False))
    executor.prepare()
    first, second = (step.rows() for step in schedule.steps)
    incoming = {lane: (source, block) for source, destination, lane, block in first if destination == 1}
    onward = {lane: destination for source, destination, lane, _ in second if source == 1}
    for source, destination, lane, _ in first:
        if source == 1:
            receive(board, destination, lane)
    late = threading.Timer(0.5, lambda: deliver(board, incoming[0], 0))
    late.start()
    deliver(board, incoming[1], 1)
    running = threading.Thread(target=executor.run, daemon=True)
    running.start()
    came = {lane: receive(board, onward[lane], schedule.lanes + lane) for lane in (0, 1)}
    came[1]()
    assert not came[0].is_over
    came[0]()
    for lane, source in {row[2]: row[0] for row in second if row[1] == 1}.items():
        deliver(board, (source, 0), schedule.lanes + lane)
    running.join(timeout=5)
    assert not running.is_alive()


def test_no_compute_lane_waits_for_another() -> None:
    """The attention within a chunk goes on until the state has been added to and sent, as on the chain of LASP."""
    layer = Workload(sequence=48, heads=1, head_dim=4, mask="causal", kind="linear")
    (schedule,) = linear_schedules("lasp", full_mesh(3), layer)
    board, advanced = Board(), threading.Event()

    def run(rank: int) -> None:
        trial = PatternTrial(schedule, rank, Loopback(board, rank, whole_steps=False))
        compute = trial.work.compute

        def waiting(row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
            if rank == 1 and row.kernel == "attend":
                assert advanced.wait(10), "the state of rank 1 waits for the attention within its chunk"
            found = compute(row, operands)
            if rank == 1 and row.kernel == "advance":
                advanced.set()
            return found

        trial.work.compute = waiting  # type: ignore[method-assign]
        trial.set_up(checked=True)
        trial.executor.prepare()
        trial.executor.run()
        trial.check()

    with ThreadPoolExecutor(schedule.world_size) as threads:
        list(threads.map(run, range(schedule.world_size)))


@pytest.mark.parametrize(("name", "layer"), IN_PIECES.items())
def test_all_lanes_are_in_the_modes_of_the_caller(name: str, layer: Workload) -> None:
    """Tensors of `torch.inference_mode` must not change in a thread outside of it."""
    (schedule,) = build_schedules(name, full_mesh(4), layer, None, AttentionOptions())
    board = Board()

    def run(rank: int) -> None:
        with torch.inference_mode():
            trial = PatternTrial(schedule, rank, Loopback(board, rank, whole_steps=False))
            trial.set_up(checked=True)
            trial.executor.prepare()
            trial.executor.run()
            trial.check()

    with ThreadPoolExecutor(schedule.world_size) as threads:
        list(threads.map(run, range(schedule.world_size)))


@pytest.mark.parametrize("whole_steps", [False, True])
def test_calls_of_all_lanes_are_without_autocast(whole_steps: bool) -> None:
    """It would round states in the lane of the calling thread, and not in those of other threads."""
    layer = Workload(sequence=48, heads=1, head_dim=4, mask="causal", kind="linear")
    (schedule,) = linear_schedules("lasp", full_mesh(2), layer)
    board, found = Board(), set[tuple[str, bool]]()

    def run(rank: int) -> None:
        trial = PatternTrial(schedule, rank, Loopback(board, rank, whole_steps=whole_steps))
        compute = trial.work.compute

        def seen(row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
            found.add((row.kernel, torch.is_autocast_enabled("cpu")))
            return compute(row, operands)

        trial.work.compute = seen  # type: ignore[method-assign]
        trial.set_up(checked=True)
        trial.executor.prepare()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trial.executor.run()
            assert torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(schedule.world_size) as threads:
        list(threads.map(run, range(schedule.world_size)))
    assert {kernel for kernel, _ in found} >= {"attend", "advance", "apply_state"}
    assert not any(enabled for _, enabled in found)


@pytest.mark.parametrize("kernel", ["attend", "advance"])
def test_a_failed_call_ends_the_calls_of_all_lanes(kernel: str) -> None:
    """Rank 0 of a chain fails on either lane: the run raises what the call raised, and no thread is left."""
    layer = Workload(sequence=48, heads=2, head_dim=4, mask="causal", kind="linear")
    (schedule,) = linear_schedules("all-scan", full_mesh(2), layer, None, AttentionOptions(pieces=2))
    trial = PatternTrial(schedule, 0, Loopback(Board(1.0), 0, whole_steps=False))
    compute = trial.work.compute

    def failing(row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        if row.kernel == kernel:
            raise RunError(f"no {kernel}")
        return compute(row, operands)

    trial.work.compute = failing  # type: ignore[method-assign]
    trial.set_up(checked=False)
    before = set(threading.enumerate())
    trial.executor.prepare()
    with pytest.raises(RunError, match=f"no {kernel}"):
        trial.executor.run()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def deliver(board: Board, message: tuple[int, int], tag: int) -> None:
    """Send the test pattern of a block to rank 1."""
    source, block = message
    Loopback(board, source, whole_steps=False).send([Message(1, tag, pattern(block, 5))])


def receive(board: Board, rank: int, tag: int) -> Any:
    """The wait of another rank for five bytes from rank 1."""
    (wait,) = Loopback(board, rank, whole_steps=False).receive([Message(1, tag, torch.empty(5, dtype=torch.uint8))])
    return wait


@pytest.mark.parametrize(("ahead", "posted"), [(0, 2), (2, 2), (3, 3), (4, 3), (5, 4)])
def test_receives_are_posted_ahead_of_a_lane_that_begins_late(ahead: int, posted: int) -> None:
    """Those of the first step with any, and of the steps behind it; a peer that sends finds them there."""
    blocks = {9: [0, 2], 12: [4], 14: [6]}  # apart from each other, so they are messages of their own
    steps = [Step.of((0, 1, 0, block) for block in blocks.get(index, ())) for index in range(15)]
    held = np.zeros((2, 8), dtype=np.bool_)
    held[0] = True
    final = held.copy()
    final[1, ::2] = True
    schedule = Schedule("late", 2, 1, Blocks.of_data(np.full(8, 5)), held, final, steps)
    transport = Loopback(Board(), 1, ahead, whole_steps=False)
    with patch.object(transport, "receive", wraps=transport.receive) as receives:
        Executor(schedule, 1, transport).prepare()
    assert receives.call_count == posted


def test_several_blocks_on_one_lane_of_one_step() -> None:
    """A lane takes its blocks one after the other, also when a step gives it several for the same peer."""
    schedule = collective("multi-ring", full_mesh(3), 10)
    steps = [Step.of((s, d, 0, b) for s, d, _, b in step.rows()) for step in schedule.steps]
    several = replace(schedule, steps=steps)
    assert_every_transfer_once(run_in_process(several).events, several)


@settings(max_examples=50)
@given(either, st.booleans())
def test_the_bytes_of_messages_are_those_of_the_ledger(schedule: Schedule, whole_steps: bool) -> None:
    """Each rank sends as many messages as its part says; blocks that lie side by side are one."""
    sent: list[list[Message]] = [[] for _ in range(schedule.world_size)]
    board = Board()

    def run(rank: int) -> None:
        transport = Counting(board, rank, 4 * (not whole_steps), whole_steps)
        transport.sent = sent[rank]
        trial = PatternTrial(schedule, rank, transport)
        trial.set_up(checked=True)
        trial.executor.prepare()
        trial.executor.run()
        trial.check()

    with ThreadPoolExecutor(schedule.world_size) as threads:
        list(threads.map(run, range(schedule.world_size)))
    ledger = np.zeros_like(schedule.bytes_sent())
    for rank, messages in enumerate(sent):
        assert len(messages) == len(rank_part(schedule, rank).messages_out)
        for message in messages:
            step, lane = divmod(message.tag, schedule.lanes)
            ledger[step, rank, lane] += message.data.numel()
    assert np.array_equal(ledger, schedule.bytes_sent())


class Counting(Loopback):
    """Keeps what it sends."""

    sent: list[Message]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        self.sent += messages
        return super().send(messages)


def test_deterministic_algorithms_go_by_steps() -> None:
    """By lanes parts are added in the order in which they arrive."""
    schedule, found = collective("multi-ring", full_mesh(3), 30_000), list[type]()
    for deterministic in (False, True):
        executor = Executor(schedule, 0, Loopback(Board(), 0, whole_steps=False))
        torch.use_deterministic_algorithms(deterministic)
        try:
            executor.prepare()
            found.append(type(executor.strategy))
        finally:
            torch.use_deterministic_algorithms(False)
    assert found == [PerLane, PerStep]
