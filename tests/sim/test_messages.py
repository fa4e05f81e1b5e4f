"""What a message of several blocks takes, as closed forms, on both engines; messages of other libraries."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.array.engine import run
from sim.simulate import Engine, simulate
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.host import Batches, HostModel
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.timeline.critical_path import critical_path
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.schedules import assert_every_transfer_once

ENGINES: tuple[Engine, ...] = ("simpy", "array")
seconds = st.fractions(Fraction(1, 8), Fraction(8), max_denominator=8)


def transfers(world_size: int, size_bytes: int, *steps: list[tuple[int, int, int, int]]) -> Schedule:
    """Five blocks in the order of their numbers at every rank; a rank has what it sends first, and keeps all."""
    has, sent = np.zeros((world_size, 5), dtype=bool), np.zeros((world_size, 5), dtype=bool)
    for step in steps:
        for source, destination, _, block in step:
            sent[source, block] |= not has[source, block]
            has[destination, block] = True
    blocks = Blocks.of_data(np.full(5, size_bytes))
    return Schedule("transfers", world_size, 1, blocks, sent, sent | has, [Step.of(step) for step in steps])


@pytest.mark.parametrize("engine", ENGINES)
@given(seconds, seconds, seconds, st.integers(1, 9))
def test_blocks_side_by_side_are_launched_once_and_passed_on_together(
    engine: Engine, launch_s: Fraction, latency_s: Fraction, flow_s: Fraction, size_bytes: int
) -> None:
    """Two hops: 2 (launch + 2 blocks + latency) side by side; apart, the first block is passed on before the second."""
    machine = Machine(full_mesh(3, size_bytes / flow_s, latency_s), CommLibrary("posts", launch_s))
    together, apart = (
        transfers(3, size_bytes, *([(hop, hop + 1, 0, 0), (hop, hop + 1, 0, block)] for hop in (0, 1)))
        for block in (1, 2)
    )
    for schedule, messages, time_s in (
        (together, 2, 2 * (launch_s + 2 * flow_s + latency_s)),
        (apart, 4, 3 * (launch_s + flow_s) + 2 * latency_s),
    ):
        timeline = simulate(schedule, machine, engine, explain=True)
        assert len(timeline.events) == messages
        assert_every_transfer_once(timeline.events, schedule)
        assert float(timeline.time_s) == pytest.approx(float(time_s), rel=1e-12)
        assert sum(each for _, each in critical_path(timeline)) == pytest.approx(float(time_s), rel=1e-9)


@given(seconds, seconds)
def test_pairs_of_ranks_with_other_messages_are_no_symmetry(launch_s: Fraction, flow_s: Fraction) -> None:
    """Of pairs that send two blocks each, half have them side by side: a launch, or two."""
    side_by_side, apart = ([(first + pair, first + pair + 1) for pair in range(0, 16, 2)] for first in (0, 16))
    rows = [(*pair, 0, block) for pair in side_by_side for block in (3, 4)]
    rows += [(*pair, 0, block) for pair in apart for block in (0, 2)]
    found = run(transfers(32, 1, rows), Machine(full_mesh(32, 1 / flow_s, 0), CommLibrary("posts", launch_s)))
    assert (found.operations, found.classes) == (8 + 16, 1 + 2)
    ends = {(event.rank, event.block): event.end_s for event in found.timeline().events}
    for source, _ in side_by_side:
        assert ends[source, 3] == pytest.approx(float(launch_s + 2 * flow_s))
    for source, _ in apart:
        assert ends[source, 2] == pytest.approx(float(2 * launch_s + 2 * flow_s))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_send_block_by_block(name: str) -> None:
    """The array engine takes one message per hop and step of a ring; so do the engines that derive them."""
    schedule = collective(name, full_mesh(5), 977)
    assert len(message_dependencies(schedule).messages.step) == schedule.transfers


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_model_sends_the_two_tensors_of_a_shard_one_by_one(engine: Engine) -> None:
    """The halves of a zigzag are sent together: keys of both, then values of both."""
    n = 4
    layer = Workload(32 * n, heads=1, head_dim=8, mask="full")
    (schedule,) = attention_schedules("zigzag-ring-attention", full_mesh(n), layer)
    machine = Machine(full_mesh(n), host=HostModel("two messages", separate=("forward",)))
    sent = [event for event in simulate(schedule, machine, engine).events if event.kind == SEND]
    assert len(sent) == 2 * n * (n - 1)
    assert {(event.bytes, len(event.blocks)) for event in sent} == {(int(schedule.bytes_sent().sum()) // len(sent), 2)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("batches", "most"), [("step", 2), ("kind", 1)])
def test_a_batch_per_kind_has_no_message_of_two_kinds(engine: Engine, batches: Batches, most: int) -> None:
    """Where nothing is added to gradients of keys, they go on with the keys, but not with a batch for each of both."""
    options = AttentionOptions("backward", dataflow="rotate-kv")
    grid = load_machine("torus:4x4").topology  # around it, ranks are not in the order of their numbers
    layer = Workload(64, heads=1, head_dim=8, mask="causal")
    (schedule,) = attention_schedules("ring-attention", grid, layer, None, options)
    machine = Machine(grid, host=HostModel("test", batches=batches))
    events = [event for event in simulate(schedule, machine, engine).events if event.kind == SEND]
    assert max(len(set(schedule.blocks.kind[list(event.blocks)].tolist())) for event in events) == most
